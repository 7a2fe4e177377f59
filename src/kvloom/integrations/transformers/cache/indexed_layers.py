"""Cache layers with index keys, by which models such as DeepSeek V3.2 choose the tokens they attend to.

Shapes: B sequences, Q new tokens of each, N tokens, D elements of an index key.
"""

from typing import Any, TypeVar

from torch import Tensor

from kvloom.caches import FixedLayer, PagedLayer
from kvloom.caches.layers.changing import Forks
from kvloom.caches.layers.index_keys import IndexKeys, add_index_keys, index_keys_beside
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.cache.layers import (
    KVCacheLayer,
    StaticKVCacheLayer,
    expect_thawed,
    num_kept,
)

_Layer = TypeVar("_Layer", bound="IndexedKVCacheLayer")


class IndexedKVCacheLayer(KVCacheLayer):
    """Keys and values of one layer, and the keys of its index.

    Attributes:
        index_keys: Storage of the index keys.
        has_keys: Whether it has keys and values of its own, and does not use those of another layer.
        has_index: Whether it has an index of its own, and does not use another layer's choice.
    """

    def __init__(self, pages: PagedLayer | FixedLayer, config: Any, **kwargs: Any) -> None:
        super().__init__(pages, config, **kwargs)
        self.index_keys: IndexKeys | FixedLayer = index_keys_beside(pages)
        if isinstance(pages, PagedLayer):
            pages.is_indexed = True
        self._positions: Tensor | None = None
        self.keep(has_keys=True, has_index=True)

    def keep(self, *, has_keys: bool, has_index: bool) -> None:
        """Set whether it has keys and an index of its own; both at first."""
        self.has_keys, self.has_index = has_keys, has_index
        self.streams = (self.pages,) * has_keys + (self.index_keys,) * has_index

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store index keys ``[B, Q, D]`` and return all of them, ``[B, N, D]``.

        Raises:
            ShapeError: they have another shape or dtype than those before.
            StateError: the cache is frozen, or has tokens without index keys.
            UnsupportedError: the model's configuration says that this layer has no index.
        """
        expect_thawed(self)
        num_new = expect("indexer_key_states", indexer_key_states, "B Q D", dtype=FLOAT_DTYPES)["Q"]
        if not self.has_index:
            raise UnsupportedError("index keys must be of a layer that has an index by the configuration")
        if isinstance(self.index_keys, IndexKeys):
            stored, own = self.index_keys.sequences.num_positions, self.index_keys.num_tokens
            if own not in (stored, stored - num_new):
                raise StateError(
                    f"index keys must be of all {stored} tokens of the cache, got {own} and {num_new} new"
                )
        return add_index_keys(self.index_keys, indexer_key_states)

    @property
    def indexer_keys(self) -> Tensor | None:
        """Index keys ``[B, N, D]``, read-only; ``None`` if there are none."""
        return None if self.index_keys.dtype is None else self.index_keys.keys.squeeze(1)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of the tokens, ``[axes, B, N]``, as the model assigned them; ``None`` without tokens.

        Raises:
            UnsupportedError: there are tokens without positions, such as those of a found prefix.
        """
        num_tokens = int(self.streams[0].get_seq_length())
        if self._positions is None and num_tokens:
            raise UnsupportedError(
                f"positions must be of all {num_tokens} tokens, some of which the model did not compute"
            )
        return None if self._positions is None else self._positions[..., :num_tokens]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        expect_thawed(self)
        self._positions = positions

    def crop_positions(self, num_tokens: int) -> None:
        """Keep the positions of the first tokens."""
        if self._positions is not None:
            self._positions = self._positions[..., :num_tokens] if num_tokens else None

    def select_positions(self, rows: Tensor) -> None:
        """Give row i the positions of row ``rows[i]``."""
        if self._positions is not None:
            self._positions = self._positions.index_select(1, rows.to(self._positions.device))

    def expect_croppable_by_row(self) -> None:
        """Raise UnsupportedError if rows cannot be cropped by different numbers of tokens."""
        if self._positions is not None:
            raise UnsupportedError("positions of index keys cannot be cropped row by row")

    def crop(self, tokens_to_remove: int) -> None:
        """Crop keys, values, index keys and positions; argument as in ``KVCacheLayer``."""
        self.expect_changeable()
        num_tokens = num_kept(tokens_to_remove, max(stream.num_tokens for stream in self.streams))
        for stream in self.streams:
            stream.truncate(num_tokens)
        self.crop_positions(num_tokens)

    def reset(self) -> None:
        """Forget all tokens, with their index keys and positions."""
        super().reset()
        self.index_keys.reset()
        self._positions = None

    def fork(self: _Layer, forks: Forks) -> _Layer:  # noqa: PYI019 (not in Python 3.10)
        """A copy of this layer over ``forks``, with its index keys and positions."""
        other = super().fork(forks)
        other.index_keys = self.index_keys.fork(forks)
        other.keep(has_keys=self.has_keys, has_index=self.has_index)
        other._positions = self._positions
        return other


class StaticIndexedKVCacheLayer(IndexedKVCacheLayer, StaticKVCacheLayer):
    """The same in fixed storage, for ``torch.compile``; all positions of index keys are returned."""
