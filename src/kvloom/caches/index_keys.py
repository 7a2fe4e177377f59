"""Keys of an index, by which a model chooses the tokens that it attends to, beside a layer's keys and values.

They are kept unquantized, in the dtype that the model computes in, whatever becomes of keys and values: which
tokens are chosen hangs on small differences.

Shapes: B sequences, Q new tokens of each, N tokens, D elements of an index key.
"""

from typing import Final

from torch import Tensor

from kvloom.caches.fixed import FixedLayer
from kvloom.caches.format import CacheFormat
from kvloom.caches.paged import PagedLayer
from kvloom.caches.sequences import Sequences

_FIRST: Final = 1 << 20
"""Among the layers that share sequences, index keys of layer i are number ``_FIRST + i``."""


class IndexKeys(PagedLayer):
    """Index keys of one layer in the pages of its sequences, so that they go wherever its tokens go.

    Args:
        sequences: Those of the layer.
        index: Its number among the layers that share them.
    """

    def __init__(self, sequences: Sequences, index: int) -> None:
        super().__init__(sequences.format, sequences, _FIRST + index)

    @property
    def format(self) -> CacheFormat:
        """How index keys are kept."""
        return _unquantized(self.sequences.format)


def index_keys_beside(pages: PagedLayer | FixedLayer) -> IndexKeys | FixedLayer:
    """An empty layer for the index keys of an empty layer's tokens."""
    if isinstance(pages, FixedLayer):
        return FixedLayer(_unquantized(pages.format))
    return IndexKeys(pages.sequences, pages.index)


def add_index_keys(layer: IndexKeys | FixedLayer, keys: Tensor) -> Tensor:
    """Store ``[B, Q, D]`` and return all, ``[B, N, D]``: a view where they lie in one piece.

    Raises:
        ShapeError, StateError, OutOfPages: as ``Layer.update``.
    """
    new = keys.unsqueeze(1)
    return layer.update(new, new[..., :0])[0].squeeze(1)


def _unquantized(format: CacheFormat) -> CacheFormat:
    return CacheFormat(page_size=format.page_size, max_tokens=format.max_tokens)
