"""Pages of vLLM as views: what a block keeps of one head, in planes.

vLLM allocates pages ``[B, H, S, C]`` and copies, zeroes and sends whole blocks; the ``S * C`` bytes of a head
in a block are free to be used. They are the keys of its tokens, the values, and where these are codes the
scales of the keys and those of the values, each in the axis order that attention reads best.

Shapes: B blocks, H key/value heads, S tokens of a block, D head dim, C elements of a token of a head.
"""

from dataclasses import replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import page_layout
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ShapeError


def content_bytes(head_dim: int, dtype: torch.dtype, quant: QuantSpec | None) -> int:
    """Bytes of a token of a head, key and value, scales included.

    Args:
        head_dim: D, a multiple of the group.
        dtype: Of keys and values where they are not quantized.
        quant: How they are quantized; ``None`` if they are not.

    Raises:
        ConfigError: the group does not divide ``head_dim``.
    """
    return 2 * KVSpec(1, 1, head_dim, dtype, "T H D", quant).nbytes(1)


def largest_block(tokens: int, most: int) -> int:
    """Tokens of a block in the place of one of ``tokens``: the largest divisor up to ``most``, at least 1."""
    return next((size for size in range(min(tokens, most), 1, -1) if tokens % size == 0), 1)


def view(pages: Tensor, head_dim: int, dtype: torch.dtype, quant: QuantSpec | None) -> KVView:
    """Keys, values and scales in the pages of one layer; writing through the view writes the pages.

    Args:
        pages: ``[B, H, S, C]`` of any dtype, dense in the last two axes; blocks and heads may lie apart.
        head_dim: D.
        dtype: What the model computes in, and of keys and values where they are not quantized.
        quant: As of ``content_bytes``.

    Raises:
        ShapeError: ``pages`` are not dense, or not of ``content_bytes``.
        ConfigError: the group does not divide ``head_dim``.
    """
    blocks, heads, size, content = pages.shape
    if pages.stride()[2:] != (content, 1):
        raise ShapeError(f"pages must be dense in tokens and content, got strides {pages.stride()}")
    wanted = content_bytes(head_dim, dtype, quant)
    if content * pages.itemsize != wanted:
        raise ShapeError(f"pages must have {wanted} bytes a token, got {content * pages.itemsize}")
    runs = pages.view(torch.uint8).flatten(2)
    spec = KVSpec(1, heads, head_dim, dtype, quant=quant)
    key, value = (replace(spec, layout=_layout(side, spec, size)) for side in ("key", "value"))
    both = zip(*(side.tensors(blocks * size, size) for side in (key, value)), strict=True)
    parts = [part for pair in both for part in pair]
    lengths = [prod(shape[2:]) * dtype.itemsize for shape, dtype in parts]
    planes = [
        run.view(dtype).unflatten(-1, shape[2:])
        for run, (shape, dtype) in zip(runs.split(lengths, dim=-1), parts, strict=True)
    ]
    return KVView.split(key.axes, *planes, value_layout=value.axes)


def _layout(side: Literal["key", "value"], spec: KVSpec, block_size: int) -> CacheLayout:
    """One in which a head of a block is one run of bytes."""
    name = "auto" if ops.cpu_kernels() else "HND"
    return page_layout(name, side, spec, block_size, torch.device("cpu"))
