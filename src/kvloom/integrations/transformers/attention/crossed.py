"""Cross-attention: a decoder's queries over the keys of an encoder, stored once and read in place.

Rows of a batch with the same keys share one stored row, as beams do. Their queries become queries of that
row, so its tokens are read once for all of them.

Shapes: B rows, R stored rows, Q queries of each row, N tokens of the encoder, Hq query heads, Dk and Dv head
dims.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches import TokenIndex, Tokens
from kvloom.caches.rows.selection import repeated
from kvloom.caches.tensors.tokens import added
from kvloom.integrations.tensor_state import version_of
from kvloom.integrations.transformers.attention.lazy_states import LazyStates

_Found = TypeVar("_Found")


class _Look(Generic[_Found]):
    """What a function finds in a tensor that all layers are given: only the first one looks at it."""

    def __init__(self, find: Callable[[Tensor], _Found]) -> None:
        self._find = find
        self._last: tuple[Tensor, int, _Found] | None = None

    def at(self, x: Tensor) -> _Found:
        """What it finds in ``x``, looked for again once that was written."""
        last = self._last
        if last is None or last[0] is not x or last[1] != version_of(x):
            self._last = last = x, version_of(x), self._find(x)
        return last[2]


class Sources:
    """The stored row of each row of a batch.

    Attributes:
        rows: Number of the stored row, for each of the B rows.
        firsts: The first row of each of the R stored rows.
        repeats: Number of rows of each stored row, if each has as many and they follow one another; else
            ``None``.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self.rows = [*rows]
        self.firsts = [self.rows.index(r) for r in range(max(self.rows, default=-1) + 1)]
        repeats = max(len(self.rows) // max(len(self.firsts), 1), 1)
        is_even = self.rows == repeated(repeats, len(self.firsts))
        self.repeats = repeats if is_even else None
        self._lengths = _Look(_lengths_of)
        self._is_zero = _Look(lambda bias: not bool(bias.any()))
        self._read: tuple[TokenIndex, Tensor | None, TokenIndex, int] | None = None

    def __reduce__(self) -> tuple[type["Sources"], tuple[list[int]]]:
        return Sources, (self.rows,)

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "Sources":
        """Sources of keys and values ``[B, H, N, D]``: equal rows that follow one another share one."""
        rows = list[int]()
        for b in range(key.shape[0]):
            is_new = b == 0 or not _are_equal(key, value, b - 1, b)
            rows.append(rows[-1] + is_new if rows else 0)
        return cls(rows)

    @property
    def are_shared(self) -> bool:
        """Whether rows share a stored row."""
        return len(self.firsts) < len(self.rows)

    def fit(self, key: Tensor, value: Tensor) -> bool:
        """Whether the rows of each stored row are equal in these keys and values, too."""
        pairs = ((self.firsts[r], b) for b, r in enumerate(self.rows))
        return all(a == b or _are_equal(key, value, a, b) for a, b in pairs)

    def taken(self, x: Tensor) -> Tensor:
        """``[R, ...]``, the first row of each stored row of ``[B, ...]``."""
        return x if self.repeats == 1 else x[self.firsts]

    def spread(self, x: Tensor) -> Tensor:
        """``[B, ...]`` of ``[R, ...]``."""
        if self.repeats == 1:
            return x
        if len(x) == 1:
            return x.expand(len(self.rows), *x.shape[1:])
        return x[self.rows]

    def lengths_of(self, mask: Tensor) -> Tensor | None:
        """``[B or 1]`` int64, the number of tokens that a mask shows, if these are the first ones.

        ``None`` for another mask.
        """
        if torch.compiler.is_compiling() or mask.shape[1] != 1:
            return None
        return self._lengths.at(mask)

    def adds_nothing(self, bias: Tensor) -> bool:
        """Whether a bias of scores is 0, as T5's is in cross-attention."""
        return not torch.compiler.is_compiling() and self._is_zero.at(bias)

    def read(self, index: TokenIndex, lengths: Tensor | None) -> tuple[TokenIndex, int]:
        """What queries read: an index, and the number of rows whose queries are those of one row of it.

        All layers have the same, so only the first one makes it.

        Args:
            index: Index of the R stored rows.
            lengths: ``lengths_of`` a mask; ``None`` if all tokens are visible.
        """
        known = self._read
        if known is None or known[0] is not index or known[1] is not lengths:
            self._read = known = index, lengths, *self._find(index, lengths)
        return known[2:]

    def _find(self, index: TokenIndex, lengths: Tensor | None) -> tuple[TokenIndex, int]:
        repeats, num_rows = self.repeats, len(self.rows)
        if lengths is not None:
            lengths = lengths.expand(num_rows)
            if repeats is not None and bool((lengths.view(-1, repeats) != lengths[::repeats, None]).any()):
                repeats = None
        if repeats is None:
            table = replace(index.index, table=index.index.table[self.rows])
            own = index.lengths[self.rows] if lengths is None else lengths
            return TokenIndex(table, own, index.num_columns), 1
        if lengths is None:
            return index, repeats
        return TokenIndex(index.index, lengths[::repeats], index.num_columns), repeats


class CrossStates(LazyStates):
    """Keys or values ``[B, H, N, D]`` of an encoder, of which R rows are stored.

    Attributes:
        sources: The stored row of each row.
    """

    sources: Sources

    @classmethod
    def of(cls, tokens: Tokens, dtype: torch.dtype, sources: Sources) -> tuple["CrossStates", "CrossStates"]:
        """Keys and values of R stored rows, for attention that computes in ``dtype``."""
        keys, values = cls(), cls()
        keys.tokens = values.tokens = tokens
        keys.dtype = values.dtype = dtype
        keys.untrained = values.untrained = None
        keys.sources = values.sources = sources
        values._key_states = keys
        return keys, values

    @property
    def shape(self) -> torch.Size:
        """``[B, H, N, D]``."""
        return torch.Size((len(self.sources.rows), *super().shape[1:]))

    def numel(self) -> int:
        """Number of elements, which Mllama asks for in each step."""
        return self.shape.numel()

    def gather(self) -> Tensor:
        """Gather the tensor, dequantized, for each row."""
        return self.sources.spread(super().gather())


def attend_crossed(
    states: CrossStates, query: Tensor, scores: ops.Scores, mask: Any, bias: Tensor | None
) -> Tensor:
    """Attention of queries over all tokens of an encoder.

    Args:
        states: Keys of B rows.
        query: ``[B, Hq, Q, Dk]``.
        scores: Not causal.
        mask: ``[B or 1, Hq or 1, Q or 1, N]``, bool or added to the scores; ``None`` for none.
        bias: ``[B or 1, Hq, Q, N]``, added to the scores.

    Returns:
        ``[B, Q, Hq, Dv]``.
    """
    sources, tokens = states.sources, states.tokens
    num_rows, _, num_new, _ = query.shape
    if bias is not None and sources.adds_nothing(bias):
        bias = None
    lengths = None
    if mask is not None:
        lengths = sources.lengths_of(mask) if bias is None else None
        mask = mask[..., : tokens.index.num_columns]
    if lengths is not None:
        mask = None
    elif bias is not None:
        mask = bias if mask is None else bias + added(mask)
    index, repeats = sources.read(tokens.index, lengths)
    if index is not tokens.index:
        tokens = replace(tokens, rows=None, index=index)
    if mask is not None:
        mask = mask.expand(num_rows if len(mask) > 1 else 1, -1, num_new, -1)
    if repeats > 1:
        query, mask = _merged(query, repeats), None if mask is None else _merged(mask, repeats)
    out = tokens.attend(query, scores, mask=mask)
    return out.reshape(num_rows, num_new, *out.shape[2:])


def _merged(x: Tensor, repeats: int) -> Tensor:
    """``[R, H, repeats * Q, D]`` of ``[B or 1, H, Q, D]``: queries of rows that follow one another."""
    if len(x) == 1:
        return x.repeat(1, 1, repeats, 1)
    rows, heads, num_new, size = x.shape
    parted = x.reshape(rows // repeats, repeats, heads, num_new, size)
    return parted.transpose(1, 2).reshape(rows // repeats, heads, repeats * num_new, size)


def _lengths_of(mask: Tensor) -> Tensor | None:
    """``Sources.lengths_of`` a mask ``[B or 1, 1, Q or 1, N]``."""
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    seen = seen[:, 0]
    lengths = seen.sum(-1)
    column = torch.arange(seen.shape[-1], device=seen.device)
    fits = (
        (seen == (column < lengths.unsqueeze(-1))).all() & (lengths == lengths[:, :1]).all() & lengths.all()
    )
    return lengths[:, 0] if bool(fits) else None


def _are_equal(key: Tensor, value: Tensor, a: int, b: int) -> bool:
    """Whether rows a and b have equal keys and values."""
    return torch.equal(key[a], key[b]) and torch.equal(value[a], value[b])
