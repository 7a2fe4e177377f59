"""What a model remembers of texts whose pages a pool has, for caches that go on from found pages.

A prefix with pictures is found only behind the last of them, where what the model remembered there is known.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from kvloom.core.newest import keep_newest
from kvloom.integrations.transformers.models.remembered import Memory, Remembered, Values, is_offset, rows_of
from kvloom.integrations.transformers.pool.origin import Origin

_MOST: Final = 4096
"""Number of last texts with pictures that are known."""
Key: TypeAlias = tuple[str, bytes, int]
"""Scope of a text, digest of its tokens up to the last placeholder, and its padding."""


class Recalled(NamedTuple):
    """What is known of a row.

    Attributes:
        first: Number of tokens before the first placeholder of a picture.
        last: Number of tokens up to the last one.
        values: What the model remembers from there on, one row; ``None`` if that is not known.
    """

    first: int
    last: int
    values: Values | None

    def hides(self, end: int) -> bool:
        """Whether it is unknown what the model remembers after the first ``end`` tokens."""
        return self.first < end and (end < self.last or self.values is None)


class PoolMemory:
    """What the model of a pool remembers after the pictures of texts.

    Args:
        memory: Memory of the model; ``None`` if it remembers nothing outside of its cache. If the model names
            no tokens of pictures, any token of a row with content may be one.
    """

    def __init__(self, memory: Memory | None) -> None:
        self._pictures = None if memory is None else memory.pictures
        self._known: dict[Key, Values] = {}

    def recall(self, rows: Sequence[Sequence[int]], origin: Origin, begins: Sequence[int]) -> list[Recalled]:
        """What is known of each row of a batch."""
        found = []
        for tokens, scope, content, begin in zip(rows, origin.scopes(), origin.contents, begins, strict=True):
            where = self._where(tokens, content)
            last = where[-1] + 1 if where else 0
            values = self._known.get(self._key(tokens[:last], scope, begin)) if where else ()
            found.append(Recalled(where[0] if where else len(tokens), last, values))
        kinds = {tuple(x is None for x in row.values) for row in found if row.values}
        return found if len(kinds) < 2 else [row._replace(values=None) for row in found]

    def restore(self, remembered: Remembered, rows: Sequence[Recalled], ends: Sequence[int]) -> None:
        """Give a cache that begins with the first ``ends[b]`` tokens of each row what is known of them."""
        behind = [row.values for row, end in zip(rows, ends, strict=True) if row.first < end]
        if not behind or behind[0] is None:
            return
        blank = tuple(None if x is None else torch.zeros_like(x) for x in behind[0])
        each = [
            (row.values if row.first < end else None) or blank for row, end in zip(rows, ends, strict=True)
        ]
        values = (None if x[0] is None else torch.cat(x) for x in zip(*each, strict=True))
        remembered.note(0, max(row.last for row in rows), tuple(values))

    def keep(
        self,
        remembered: Remembered,
        rows: Sequence[Sequence[int]],
        origin: Origin,
        begins: Sequence[int],
    ) -> None:
        """Keep what is remembered of the rows of a cache, if it holds for whatever text follows."""
        values = remembered.values
        if remembered.is_lost or not all(x is None or is_offset(x, len(rows)) for x in values):
            return
        said = zip(rows, origin.scopes(), origin.contents, begins, strict=True)
        for i, (tokens, scope, content, begin) in enumerate(said):
            if where := self._where(tokens, content):
                own = tuple(None if x is None else rows_of(x, len(rows))[i : i + 1].clone() for x in values)
                key = self._key(tokens[: where[-1] + 1], scope, begin)
                keep_newest(self._known, key, own, _MOST)

    def renamed(self, rename: Callable[[str], str | None] | None) -> "PoolMemory":
        """The same with other scopes, unless ``None``; a result of ``None`` omits what is known in one."""
        if rename is None:
            return self
        other = PoolMemory(None)
        other._pictures = self._pictures
        for (scope, digest, begin), values in self._known.items():
            if (name := rename(scope)) is not None:
                other._known[name, digest, begin] = values
        return other

    def _where(self, tokens: Sequence[int], content: str) -> list[int]:
        """Where the pictures of a text are."""
        if self._pictures is None or not content:
            return []
        return [i for i, token in enumerate(tokens) if not self._pictures or token in self._pictures]

    def _key(self, tokens: Sequence[int], scope: str, begin: int) -> Key:
        return scope, hashlib.sha256(array("q", tokens).tobytes()).digest(), begin
