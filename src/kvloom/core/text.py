"""``Text``: the token ids of a text, read without a copy, and what is computed of them once."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any


class Text(Sequence[int]):
    """Token ids from the start of a text. ``text[:n]`` is a ``Text``, too, with the same ``known``.

    Other slices are lists. It equals a sequence of the same tokens.

    Args:
        tokens: First token ids.
        more: Token ids after them; more may be added to both.
        num_tokens: Number of tokens of the text; all of ``tokens`` and ``more`` if ``None``.

    Attributes:
        known: What was computed of this text and of those of which it is a prefix, such as digests, by keys
            of those who did. It must hold for each prefix that has the tokens it is asked for.
    """

    __slots__ = ("_indices", "_more", "_tokens", "known")
    __hash__ = None  # type: ignore[assignment]  # it equals lists

    def __init__(
        self, tokens: Sequence[int], more: Sequence[int] = (), num_tokens: int | None = None
    ) -> None:
        self._tokens, self._more = tokens, more
        self._indices = range(len(tokens) + len(more) if num_tokens is None else num_tokens)
        self.known: dict[Any, Any] = {}

    @classmethod
    def of(cls, tokens: Sequence[int]) -> "Text":
        """A text of some tokens, or the same object if it is one."""
        return tokens if isinstance(tokens, Text) else cls(tokens)

    def __reduce__(self) -> Any:
        """Pickle the tokens alone."""
        return Text, (list(self),)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return islice(chain(self._tokens, self._more), len(self))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __getitem__(self, at: Any) -> Any:
        first, indices = len(self._tokens), self._indices[at]
        if isinstance(indices, int):
            return self._tokens[indices] if indices < first else self._more[indices - first]
        if indices.step != 1:
            return list(self)[at]
        start, stop = indices.start, max(indices.stop, indices.start)
        if not start:
            other = Text(self._tokens, self._more, stop)
            other.known = self.known
            return other
        return [*self._tokens[start:stop], *self._more[max(start - first, 0) : max(stop - first, 0)]]
