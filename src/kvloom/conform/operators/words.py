"""Common parts of descriptions of operators: dtypes, and calls that break a rule."""

from typing import Final

from torch import Tensor

from kvloom.conform.describe import Call, Spoil
from kvloom.conform.draw import Draw

FLOAT: Final = "float32 float16"
WIDE: Final = "float32 float16 bfloat16"
INDEX: Final = "int32 int64"
STORED: Final = "float32 float16 bfloat16 int8 uint8"
ADDED: Final = "float32 float16 bfloat16 float64 uint8 int8 int16 int32 int64"
"""Numbers of a mask, which are added to scores, integers as well."""
COPIED: Final = "float32 float16 bfloat16 int8 uint8 int16 int32"


def put(name: str, value: int, at: int = 0) -> tuple[str, Spoil]:
    """Change that puts ``value`` at ``at`` of an index tensor."""

    def spoil(call: Call, draw: Draw) -> Call:
        x: Tensor | None = call.get(name)
        if x is None or x.numel() == 0:
            return {}
        x = x.clone()
        x.view(-1)[at] = value
        return {name: x}

    return name, spoil


def set_to(name: str, value: object) -> tuple[str, Spoil]:
    return name, lambda call, draw: {name: value}
