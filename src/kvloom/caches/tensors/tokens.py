"""Stored tokens of a batch: attention to them in place, or gathered tensors.

Shapes: B sequences, N columns, Q new tokens of each sequence, H key/value heads, Hq query heads, Dk and Dv
head dims. A column is one token of every sequence, as in ``[B, H, N, D]``. Sequences end in the same column;
a shorter one has empty columns in front.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.residual import Unquantized, attend_beside, scores_of_newest
from kvloom.caches.tensors.token_index import TokenIndex
from kvloom.caches.tensors.transform import Transform, attend, stored_by
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView

_CAUSAL = ops.Scores()
_DENSE = CacheLayout("B H S D")


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """Residual window of tokens that are codes: their last columns, unquantized.

    Attributes:
        tokens: The unquantized columns.
        num_newest: Length of the residual window: tokens that a query reads from here, itself included, even
            beyond its attention window if a mask shows them. It reads all others as codes.
        known: ``[B]``, the first valid one of these columns in each sequence; ``None`` if all are valid.
        column: Number of the first of these columns among all, 0-d int64, if empty columns follow the stored
            tokens; ``None`` if these columns are the last.
    """

    tokens: "Tokens"
    num_newest: int
    known: Tensor | None = None
    column: Tensor | None = None

    def row(self, b: int) -> "Exact":
        """Sequence b alone."""
        tokens = replace(self.tokens, index=self.tokens.index.row(b))
        return replace(self, tokens=tokens, known=None if self.known is None else self.known[b : b + 1])

    def before(self, num_columns: int) -> int | Tensor:
        """Number of columns, of ``num_columns``, before the unquantized ones."""
        return num_columns - self.tokens.index.num_columns if self.column is None else self.column

    def put_into(self, codes: tuple[Tensor, Tensor]) -> None:
        """Overwrite their columns in dequantized keys and values ``[B, H, N, D]``."""
        before = self.before(codes[0].shape[2])
        column = torch.arange(self.tokens.index.num_columns, device=codes[0].device)
        where = slice(before, None) if isinstance(before, int) else before + column
        known = None if self.known is None else (column >= self.known.unsqueeze(1))[:, None, :, None]
        for whole, exact in zip(codes, self.tokens.gather(codes[0].dtype), strict=True):
            whole[:, :, where] = exact if known is None else torch.where(known, exact, whole[:, :, where])

    def mask(self, mask: Tensor) -> Tensor:
        """Part of a mask ``[..., N]`` of one sequence that is for the stored tokens of these columns."""
        index = self.tokens.index
        if self.column is None:
            return _shifted(mask[..., self.before(mask.shape[-1]) :], index.origins)
        token = torch.arange(index.index.table.shape[1] * index.index.page_size, device=mask.device)
        column = token + self.column if index.origins is None else token + self.column - index.origins
        return mask.index_select(-1, column.clamp(0, mask.shape[-1] - 1))


@dataclass(slots=True, eq=False)  # not frozen, which takes twice as long in each layer
class Tokens:
    """N columns of B sequences of one layer.

    Attributes:
        view: Keys and values of the layer.
        index: Slots of the columns in ``view``.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        rows: Keys and values ``[B, H, N, D]`` as views of the cache, if they can be.
        transform: Transform of the view's keys and values; ``None`` for none.
        exact: The residual window; ``None`` without one.
        is_latent: Whether attention is to latents, the keys, with rope keys, the values: as ``ops.attend``.
    """

    view: KVView
    index: TokenIndex
    window: int | None = None
    rows: tuple[Tensor, Tensor] | None = None
    transform: Transform | None = None
    exact: Exact | None = None
    is_latent: bool = False

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``: dequantized copies, or views.

        Columns of the residual window are unquantized: the new ones, and those that the first new one reads
        from it. Columns that are placeholders are zeros.
        """
        if self.rows is not None and self.rows[0].dtype == self.rows[1].dtype == dtype:
            return self.rows
        transform = self.transform
        positions = self.index.positions() if transform is not None and transform.needs_positions else None
        found = ops.load(self.index.slots, self.view, dtype=dtype, **stored_by(transform, positions))
        if self.exact is not None:
            self.exact.put_into(found)
        if self.index.begins is not None:
            column = torch.arange(self.index.num_columns, device=self.view.device)
            is_other = (column < self.index.begins.unsqueeze(1))[:, None, :, None]
            return found[0].masked_fill(is_other, 0), found[1].masked_fill(is_other, 0)
        return found

    def mapped(
        self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> "Tokens":
        """The same columns with other keys and values, in tensors.

        Args:
            change: Function of keys and values ``[B, H, N, D]``. It is called for all tokens as codes, and
                again for the residual window, so each query reads the tokens unquantized that it would read
                so here.
            dtype: Dtype of what ``change`` is given.
        """
        codes = replace(self, rows=None, exact=None).gather(dtype)
        exact = self.exact
        if exact is not None:
            exact = replace(exact, tokens=exact.tokens.mapped(change, dtype))
        return replace(dense(*change(*codes), self.index.dense()), window=self.window, exact=exact)

    def attend(
        self,
        query: Tensor,
        scores: ops.Scores | None = None,
        *,
        first: Tensor | None = None,
        mask: Tensor | None = None,
        firsts: Sequence[int] | None = None,
    ) -> Tensor:
        """Attention of the last Q columns over all of them, reading the cache in place.

        Args:
            query: ``[B, Hq, Q, Dk]``.
            scores: As ``ops.attend``, without window and mask; causal if ``None``.
            first: ``[B]``, the first visible column of each sequence; all if ``None``.
            mask: ``[B or 1, Hq or 1, Q, N]``, bool (true is visible) or added to the scores. It replaces the
                window, too.
            firsts: ``first`` on the host; ``None`` if it is not known there.

        Returns:
            ``[B, Q, Hq, Dv]``.
        """
        scores = _CAUSAL if scores is None else scores  # Dynamo of torch 2.10 traces no object as a default
        rows, num_new, exact, is_latent = query.shape[0], query.shape[2], self.exact, self.is_latent
        block: Tensor | None = None
        if mask is not None and rows > 1:  # the mask of ``ops.attend`` has the tokens of all on one axis
            return torch.cat([self._attend_row(query, scores, first, mask, b) for b in range(rows)])
        if mask is not None:
            block = _of_heads(mask[0], query.shape[1])
            scores = replace(scores, mask=_shifted(block, self.index.origins))
        elif self.window is not None:
            scores = replace(scores, window=self.window)
        batch = self.index.batch(num_new, first, firsts)
        packed = query.squeeze(2) if num_new == 1 else query.transpose(1, 2).flatten(0, 1)
        if exact is not None:
            newest, start, skip_from = exact.tokens, None, None
            if first is not None or exact.known is not None:
                before = exact.before(self.index.num_columns)
                start = None if first is None else first - before
                if exact.known is not None:
                    start = exact.known if start is None else torch.maximum(start, exact.known)
                    skip_from = exact.known + before
                    skip_from = skip_from if self.index.origins is None else skip_from + self.index.origins
            of_newest = scores_of_newest(scores, exact.num_newest)
            if block is not None:
                of_newest = replace(of_newest, mask=exact.mask(block))
            own = Unquantized(newest.view, newest.index.batch(num_new, start), of_newest)
            codes = self.view, batch, scores, self.transform, self.index.first_position, is_latent
            out = attend_beside(packed, own, *codes, skip=exact.num_newest, skip_from=skip_from)
        elif self.transform is None:
            out = ops.attend(packed, self.view, batch, scores, is_latent=is_latent)
        elif batch.counts is not None:
            first_position = self.index.first_position
            out = attend(packed, self.view, batch, scores, self.transform, first_position, is_latent)
        else:  # of a decoding step, in fewer calls
            transform, rank = self.transform, self.view.key.head_dim if is_latent else 0
            packed, scores = transform.query(packed, scores, self.index.first_position, rank)
            out = ops.attend(packed, self.view, batch, scores, is_latent=is_latent)
            out = transform.output(out, rank) if rank or transform.value else out
        return out.unsqueeze(1) if num_new == 1 else out.view(rows, num_new, *out.shape[1:])

    def _attend_row(
        self, query: Tensor, scores: ops.Scores, first: Tensor | None, mask: Tensor, b: int
    ) -> Tensor:
        """Attention of sequence b alone, ``[1, Q, Hq, Dv]``; the arguments are those of all."""
        exact = None if self.exact is None else self.exact.row(b)
        row = replace(self, index=self.index.row(b), exact=exact)
        own = slice(b, b + 1)
        first = None if first is None else first[own]
        return row.attend(query[own], scores, first=first, mask=mask[own] if len(mask) > 1 else mask)


def dense(key: Tensor, value: Tensor, index: TokenIndex) -> Tokens:
    """Tokens of tensors ``[B, H, N, D]``, whose columns ``index`` has as ``TokenIndex.dense`` makes them."""
    return Tokens(KVView.split(_DENSE, key, value), index)


def added(mask: Tensor) -> Tensor:
    """A mask of any shape that is added to scores: of a bool one 0 where it is true, else -inf."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))


def _of_heads(mask: Tensor, num_heads: int) -> Tensor:
    """Convert a mask ``[Hq or 1, Q, N]`` of one sequence to one that is added to scores."""
    mask = added(mask)
    return mask[0] if mask.shape[0] == 1 else mask.expand(num_heads, -1, -1)


def _shifted(mask: Tensor, origins: Tensor | None) -> Tensor:
    """Convert a mask ``[..., N]`` of the columns of one sequence to one of its stored tokens."""
    if origins is None:
        return mask
    before = int(origins)
    return torch.nn.functional.pad(mask, (before, 0)) if before > 0 else mask[..., -before:]
