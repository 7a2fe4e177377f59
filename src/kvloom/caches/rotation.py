"""Keys and values that are rotated before they are quantized, and what that asks of those who read them.

Shapes: T tokens, H heads, Hq query heads, D head dim.
"""

from typing import NamedTuple

from torch import Tensor

from kvloom import ops
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.specs import KVSpec
from kvloom.quant.rotation import block_of


class Rotation(NamedTuple):
    """Elements of a head vector that are rotated together, of keys and of values; 0 where none are.

    Attention over rotated keys and values has the scores of rotated queries with them, and its result is
    rotated.
    """

    key: int = 0
    value: int = 0

    @classmethod
    def of(cls, key: KVSpec, value: KVSpec) -> "Rotation | None":
        """That of keys and values which are kept so; ``None`` if neither is rotated."""
        blocks = (
            block_of(x.head_dim) if x.quant is not None and x.quant.rotated else 0 for x in (key, value)
        )
        rotation = cls(*blocks)
        return rotation if any(rotation) else None

    def rotated(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., T, D]`` or ``[T, H, D]`` as they are stored, or back as they were."""
        return self.side(0, key) if self.key else key, self.side(1, value) if self.value else value

    def side(self, side: int, x: Tensor) -> Tensor:
        """Keys (0) or values (1) as they are stored, or back; what cannot be stored is left to be refused."""
        if not self[side] or not isinstance(x, Tensor) or x.dim() not in (3, 4):
            return x
        return ops.rotate(x, self[side]) if x.dtype in FLOAT_DTYPES and x.shape[-1] % self[side] == 0 else x

    def query(self, query: Tensor) -> Tensor:
        """Queries ``[T, Hq, D]`` or ``[B, Hq, T, D]`` for keys as they are stored."""
        return ops.rotate(query, self.key) if self.key else query

    def output(self, out: Tensor) -> Tensor:
        """Attention's result ``[T, Hq, D]``, unrotated."""
        return self.side(1, out) if self.value else out
