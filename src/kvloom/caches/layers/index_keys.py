"""Index keys of a layer, by which a model chooses the tokens that each query attends to.

They are always unquantized, in the dtype that the model computes in, since small differences decide which
tokens are chosen.

Shapes: B sequences, Q new tokens of each, N tokens, D elements of an index key.
"""

from typing import Final

from torch import Tensor

from kvloom.caches.format import CacheFormat
from kvloom.caches.layers.fixed import FixedLayer
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.rows.sequences import Sequences

_FIRST: Final = 1 << 20
"""Offset of layer numbers: index keys of layer i are stored as layer ``_FIRST + i``."""


class IndexKeys(PagedLayer):
    """Index keys of one layer, in the pages of its sequences: they are forked, moved and cropped with them.

    Args:
        sequences: Sequences of the layer.
        index: Number of the layer among those that share the sequences.
    """

    def __init__(self, sequences: Sequences, index: int) -> None:
        super().__init__(sequences.format, sequences, _FIRST + index)

    @property
    def format(self) -> CacheFormat:
        """Format of the index keys."""
        return _unquantized(self.sequences.format)


def index_keys_beside(pages: PagedLayer | FixedLayer) -> IndexKeys | FixedLayer:
    """Make an empty layer of index keys for the tokens of an empty layer."""
    if isinstance(pages, FixedLayer):
        return FixedLayer(_unquantized(pages.format))
    return IndexKeys(pages.sequences, pages.index)


def add_index_keys(layer: IndexKeys | FixedLayer, keys: Tensor) -> Tensor:
    """Store ``[B, Q, D]`` and return all, ``[B, N, D]``; a view if they are contiguous.

    Raises:
        ShapeError, StateError, OutOfPages: as ``Layer.update``.
    """
    new = keys.unsqueeze(1)
    return layer.update(new, new[..., :0])[0].squeeze(1)


def _unquantized(format: CacheFormat) -> CacheFormat:
    return CacheFormat(page_size=format.page_size, max_tokens=format.max_tokens)
