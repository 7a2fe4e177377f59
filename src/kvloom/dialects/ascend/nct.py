"""Nct: new tokens anywhere in the storage of ``key`` and ``value``, by a stride and an offset.

``key`` has the shape ``[T, H, D]`` and the start; token t is the ``H * D`` elements from
``offset + t * stride`` on.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError

LIB: Final = torch.library.Library("kvloom", "FRAGMENT")


def read_uncollected(
    key: Tensor, value: Tensor | None, strides: Sequence[int] | None, offsets: Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Read the tokens at ``strides`` and ``offsets``, in elements from a tensor's first.

    Returns views, but copies while tracing: a compiler sees only the part of a storage that the tensor
    covers.

    Raises:
        ArgumentError: they are no pair of numbers, or one leads outside the storage of its tensor.
    """
    if strides is None and offsets is None:
        return key, value
    for name, pair, low in (("strides", strides, 1), ("offsets", offsets, 0)):
        if pair is not None and not _is_pair(pair, low):
            raise ArgumentError(f"{name} must be two ints of at least {low}, for key and value, got {pair!r}")
    sides = [_uncollected("key", key, strides, offsets, 0)]
    if value is not None:
        sides.append(_uncollected("value", value, strides, offsets, 1))
    return sides[0], sides[1] if value is not None else None


def _is_pair(pair: object, low: int) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(n, int) and low <= n < 1 << 63 for n in pair)
    )


def _uncollected(
    name: str, x: Tensor, strides: Sequence[int] | None, offsets: Sequence[int] | None, side: int
) -> Tensor:
    if not x.is_contiguous():
        raise ArgumentError(f"strides must be None for a {name} that is itself strided, got {strides!r}")
    stride = x.shape[1] * x.shape[2] if strides is None else strides[side]
    offset = 0 if offsets is None else offsets[side]
    if torch.compiler.is_compiling():
        copied: Tensor = collect(x.detach(), stride, offset, name)
        return copied
    return _rows_behind(x, stride, offset, name)


def _rows_behind(x: Tensor, stride: int, offset: int, name: str) -> Tensor:
    tokens, heads, head_size = x.shape
    start = x.storage_offset() + offset
    end = start + (tokens - 1) * stride + heads * head_size
    available = x.untyped_storage().nbytes() // x.itemsize
    if tokens and end > available:
        raise ArgumentError(
            f"strides and offsets must stay within the {available} elements after {name}, "
            f"got token {tokens - 1} ending at {end}"
        )
    return x.as_strided((tokens, heads, head_size), (stride, head_size, 1), start if tokens else 0)


def _collect(x: Tensor, stride: int, offset: int, name: str) -> Tensor:
    return _rows_behind(x, stride, offset, name).clone(memory_format=torch.contiguous_format)


def _collect_fake(x: Tensor, stride: int, offset: int, name: str) -> Tensor:
    return x.new_empty(x.shape)


LIB.define("collect(Tensor x, SymInt stride, SymInt offset, str name) -> Tensor")
LIB.impl("collect", _collect, "CompositeExplicitAutograd")
torch.library.register_fake("kvloom::collect", _collect_fake, lib=LIB)
collect = torch.ops.kvloom.collect.default
"""Copying variant: an operator, opaque to a compiler, since it reads the storage outside ``x``."""
