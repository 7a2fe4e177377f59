"""Keys and values of an encoder, for the cross-attention of a decoder: stored once, shared by equal rows.

Shapes: B rows, R stored rows, N tokens of the encoder, H key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer, Pages, Sequences
from kvloom.caches.layers.assigning import SIDES
from kvloom.caches.layers.read_only import ReadOnly, WrittenBack
from kvloom.core.checks import expect
from kvloom.core.specs import QuantSpec
from kvloom.errors import OutOfPages, ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers.attention.crossed import CrossStates, Sources
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.integrations.transformers.cache.encoder_input import EncoderInput
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer, States
from kvloom.paging import PageTable, whole
from kvloom.terminal import TableReport

_PAGE: Final = 16
"""Tokens in a page where the decoder's tokens are in fixed storage."""
_FEW: Final = 4
_MANY: Final = 8
"""Bits of an encoder's keys in the second half of the layers, where those of the decoder's tokens are few."""


def format_beside(format: CacheFormat, numbers: Sequence[int]) -> CacheFormat:
    """Format of an encoder's tokens for these layers of a decoder, whose own tokens have ``format``."""
    late = len(numbers) / 2
    layers = tuple(_crossed(format.of_layer(n), is_late=i >= late) for i, n in enumerate(numbers))
    size = _PAGE if format.page_size == 1 else format.page_size
    return replace(format, page_size=size, max_tokens=None, recent=0, smoothing=None, layers=layers)


class EncoderLayer(KVCacheLayer):
    """Keys and values of an encoder that one layer attends to, stored once.

    Attributes:
        sources: The stored row of each row of the batch.
    """

    keeps = "keys and values of the encoder"

    def __init__(self, pages: PagedLayer, config: Any) -> None:
        self.sources = Sources()
        self._pair: tuple[CrossStates, CrossStates] | None = None  # of keys that were read, for their values
        super().__init__(pages, config)

    def gathered(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values ``[B, H, N, D]``, gathered."""
        pair = super().gathered()
        return None if pair is None else (self.sources.spread(pair[0]), self.sources.spread(pair[1]))

    def _assign(self, side: int, x: Tensor | None) -> None:
        rows = getattr(self, "sources", Sources()).rows
        if x is not None and rows:
            sizes = expect(SIDES[side], x, "B H N D")
            if sizes["B"] != len(rows):
                raise ShapeError(f"{SIDES[side]} must be [B, H, N, D] with B={len(rows)}, got {[*x.shape]}")
            if not self.sources.fit(x, x):
                raise UnsupportedError(
                    f"{SIDES[side]} must be equal in rows that share those of an encoder, got others for "
                    f"rows {rows}"
                )
            x = self.sources.taken(x)
        super()._assign(side, x)

    def _side(self, side: int) -> Any:
        waiting = self.pages.assignment.get(side)
        if waiting is not None:
            return self.sources.spread(waiting)
        if self._dtype is None or not self.is_in_place:
            x = super()._side(side)
            # A write to a row would be one to all that share it.
            return ReadOnly.of(x) if self.sources.are_shared and isinstance(x, WrittenBack) else x
        pair, self._pair = self._pair, None
        if pair is None or side == 0:
            pair = CrossStates.of(self.pages.stored(), self._dtype, self.sources)
            self._pair = pair if side == 0 else None
        return pair[side]


class EncoderKVCache(KVCache):
    """Keys and values of encoders, for the cross-attention of a decoder; rows with equal ones share them.

    Args:
        layers: The layers; ``None`` for none, as transformers makes a cache of this class.
        theirs: Arguments of transformers, which are not used.

    Attributes:
        input: What the encoder read.
        grows: Whether more keys may follow those that are stored, as those of another picture.
    """

    grows = False

    def __init__(self, layers: list[Any] | None = None, **theirs: Any) -> None:
        super().__init__(layers or [])
        self._sources, self.input = Sources(), EncoderInput()

    @classmethod
    def beside(
        cls, config: Any, format: CacheFormat, numbers: Sequence[int], max_tokens: int | None = None
    ) -> "EncoderKVCache":
        """An empty one for a decoder with tokens of this format; these of its layers attend to an encoder.

        With ``max_tokens`` its pages are kept, so that they can be found again.
        """
        own = replace(format_beside(format, numbers), max_tokens=max_tokens)
        sequences = Sequences(Pages(own, is_kept=max_tokens is not None))
        return cls([EncoderLayer(PagedLayer(own, sequences, i), config) for i in range(len(numbers))])

    @property
    def num_rows(self) -> int:
        """B; 0 before the first update."""
        return len(self._sources.rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[States, States]:
        """Store ``[B, H, N, D]`` of an encoder in a layer; return all that it has for attention.

        Rows that follow one another share one stored row if their keys and values are equal in all layers.

        Raises:
            StateError: the layer has the keys of an encoder already, and they do not grow.
        """
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx)
        self._expect_usable()
        if self.grows and layer_idx == 0:
            self.expect_whole()
        elif not self.grows and 0 <= layer_idx < len(self.layers) and self.layers[layer_idx].pages.num_tokens:
            raise StateError(
                f"layer {layer_idx} must be empty before the keys of an encoder are stored, got "
                f"{self.layers[layer_idx].pages.num_tokens} tokens: reset the cache before another input"
            )
        is_first = not self.num_rows
        if is_first:
            self._set_sources(Sources.of(key_states, value_states))
        elif not self._sources.fit(key_states, value_states):
            self._part()
        taken, spread = self._sources.taken, self._sources.spread
        try:
            keys, values = super().update(taken(key_states), taken(value_states), layer_idx)
        except BaseException as error:
            if is_first:
                self._set_sources(Sources())
            if isinstance(error, OutOfPages):  # of a pool
                raise OutOfPages(str(error).replace("max_tokens", "max_encoder_tokens")) from error
            raise
        self.layers[layer_idx].pages.stored()  # finds slots, which no compiler can
        if not isinstance(keys, LazyStates) or not isinstance(values, LazyStates):
            return spread(cast(Tensor, keys)), spread(cast(Tensor, values))
        pair = CrossStates.of(keys.tokens, keys.dtype, self._sources)
        pair[0].untrained, pair[1].untrained = keys.untrained, values.untrained
        return pair

    @whole
    def adopt(
        self, tables: Sequence[PageTable], rows: Sequence[int], num_tokens: int, states: Tensor
    ) -> None:
        """Hold the keys and values of encoders that were found, in an empty cache.

        Args:
            tables: Pages of each stored row.
            rows: The stored row of each row.
            num_tokens: N.
            states: Empty tensor with the dtype and device of keys.
        """
        for sequences in self.sequences:
            sequences.adopt(tables, [0] * len(tables), num_tokens)
        for layer in self.layers:
            layer.pages.num_tokens = num_tokens
            layer.lazy_initialization(states)
        self._set_sources(Sources(rows))

    @property
    def sources(self) -> Sources:
        """The stored row of each row."""
        return self._sources

    def report(self) -> TableReport:
        """``report_of`` the encoder's half, and ``stored_rows``."""
        return TableReport(super().report() | {"stored_rows": len(self._sources.firsts)})

    def fork(self) -> "EncoderKVCache":
        """A cache of the same keys and values on the same pages."""
        fork: EncoderKVCache = super().fork()
        fork._set_sources(self._sources)
        fork.input, fork.grows = self.input.fork(), self.grows
        return fork

    def reset(self) -> None:
        """Forget all; the next input may be of another batch size."""
        super().reset()
        self._set_sources(Sources())

    @whole
    def _select(self, rows: Sequence[int]) -> None:
        """Replace row i by row ``rows[i]``; stored rows that no row has any more are released."""
        chosen = [self._sources.rows[i] for i in rows]
        kept = sorted({*chosen})
        if kept != sorted({*self._sources.rows}):
            super()._select(kept)
        self._set_sources(Sources([kept.index(r) for r in chosen]))
        self.input.select(rows)

    @whole
    def _part(self) -> None:
        """Give each row a stored row of its own, since another layer has different keys for them."""
        super()._select(self._sources.rows)
        for sequences in self.sequences:
            sequences.own_pages()
        self._set_sources(Sources(range(self.num_rows)))

    def _set_sources(self, sources: Sources) -> None:
        self._sources = sources
        for layer in self.layers:
            layer.sources, layer._pair = sources, None


def _crossed(format: CacheFormat, *, is_late: bool) -> CacheFormat:
    """Format of a layer's encoder half, for the format of its decoder's tokens.

    Of four bits: keys in the second half of the layers have eight, which matter most there, and values are
    rotated where keys are.
    """
    keys, values = format.quant, format.values
    if keys is not None and keys.bits == _FEW:
        if values is None:
            values = replace(format, smoothing=None)
        if values.quant is not None and values.quant.bits == _FEW:
            values = replace(
                values, quant=replace(values.quant, rotated=values.quant.rotated or keys.rotated)
            )
        if is_late:
            keys = QuantSpec(_MANY, keys.group, keys.scale_dtype)
    return replace(format, quant=keys, values=values, smoothing=None, recent=0)
