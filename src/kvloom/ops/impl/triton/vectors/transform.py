"""Smoothing and rotation of head vectors, each in one launch, with the bits of ``quant/smoothing.py``.

A program has one vector, of one token and head. Shapes: T tokens, B sequences of N tokens, H key/value heads,
Hq query heads, D head dim, K pairs of channels.
"""

from functools import lru_cache
from math import log2, sqrt
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvloom.core.memo import form_of
from kvloom.ops.impl.reference import is_by_token
from kvloom.ops.impl.triton.launching import Launcher, on_device
from kvloom.ops.impl.triton.numerics import LARGEST, is_finite

MAX_DIM: Final = 1024
"""Largest head dim: a vector must fit in the registers of a program."""


class Rows(NamedTuple):
    """Vectors of A groups, of each head, of C tokens, and their strides in elements."""

    data: Any
    group: int
    head: int
    token: int
    element: int


class Places(NamedTuple):
    """Positions ``[A, C]`` and their strides."""

    data: Any
    group: int
    token: int


class Offset(NamedTuple):
    """Pairs of channels of each head, as ``quant.smoothing.offset_at`` has them."""

    mean: Any
    channels: Any
    frequencies: Any


def why_not(x: Tensor, *_: object) -> str | None:
    """Reason why vectors cannot be smoothed and rotated here, or ``None``."""
    return None if x.shape[-1] <= MAX_DIM else f"smooths head dims up to {MAX_DIM}, got {x.shape[-1]}"


def rotate(x: Tensor, block: int) -> Tensor:
    """Same contract as the reference."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, out, block=block)
    return out


def smooth(
    key: Tensor,
    positions: Tensor | None,
    factor: Tensor,
    mean: Tensor | None,
    channels: Tensor | None,
    frequencies: Tensor | None,
    block: int,
    is_restored: bool,
) -> Tensor:
    """Same contract as the reference."""
    if is_by_token(key):
        out = key.new_empty(key.transpose(1, 2).shape).transpose(1, 2)
    else:
        out = key.new_empty(key.shape)
    offset = None
    if positions is not None and mean is not None and channels is not None and frequencies is not None:
        offset = Offset(mean.contiguous(), channels.contiguous(), frequencies.contiguous())
    _launch(key, out, factor, offset, positions, block, is_restored)
    return out


def smooth_query(
    query: Tensor, gain: Tensor, mean: Tensor | None, channels: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    """Same contract as the reference."""
    out, offset, pairs = query.new_empty(query.shape), None, 0
    if mean is not None and channels is not None:
        offset, pairs = Offset(mean.contiguous(), channels.contiguous(), None), mean.shape[1]
    coefficients = query.new_empty((*query.shape[:2], 2 * pairs), dtype=torch.float32)
    _launch(query, out, gain, offset, block=block, coefficients=coefficients)
    return out, coefficients


def _launch(
    x: Tensor,
    out: Tensor,
    factor: Tensor | None = None,
    offset: Offset | None = None,
    positions: Tensor | None = None,
    block: int = 0,
    is_restored: bool = False,
    coefficients: Tensor | None = None,
) -> None:
    if x.numel() == 0:
        return
    heads, dim, tokens = x.shape[1], x.shape[-1], 1 if x.ndim == 3 else x.shape[2]
    ratio = 1 if factor is None else heads // factor.shape[0]
    pairs = 0 if offset is None else offset.mean.shape[1]
    places = None
    if positions is not None and offset is not None:
        places = Places(positions, positions.stride(0), 0 if positions.ndim == 1 else positions.stride(1))
    offsets = (None,) * 3 if offset is None else offset
    launch = _launcher(block, is_restored, *map(form_of, (x, out, factor, *offsets, positions, coefficients)))
    with on_device(x):
        launch(
            (x.numel() // dim, 1, 1),
            _rows(x),
            _rows(out),
            None if factor is None else factor.contiguous(),
            offset,
            places,
            coefficients,
            heads,
            tokens,
            ratio,
            dim,
            triton.next_power_of_2(dim),
            block,
            int(log2(block)) if block else 0,
            sqrt(block),
            pairs,
            triton.next_power_of_2(max(pairs, 1)),
            is_restored,
            LARGEST[x.dtype],
        )


@lru_cache(256)
def _launcher(*forms: object) -> Launcher:
    """Launcher for arguments of these forms."""
    return Launcher(_vectors_kernel, num_warps=1, enable_fp_fusion=False)


def _rows(x: Tensor) -> Rows:
    group, head, *token, element = x.stride()
    return Rows(x, group, head, token[0] if token else 0, element)


@triton.jit(do_not_specialize=["tokens"])
def _vectors_kernel(
    x,
    out,
    factor,
    offset,
    places,
    coefficients,
    heads,
    tokens,
    ratio,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROOT: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_WIDTH: tl.constexpr,
    IS_RESTORED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token, head, group = row % tokens, row // tokens % heads, row // (tokens * heads)
    source = x.data + group * x.group + head * x.head + token * x.token
    element = tl.arange(0, WIDTH)
    inside = element < DIM
    v = tl.load(source + element * x.element, mask=inside, other=0.0).to(tl.float32)
    scale = v
    if factor is not None:
        scale = tl.load(factor + head // ratio * DIM + element, mask=inside, other=1.0)
    moved = v
    if PAIRS > 0:
        of_head = head // ratio * PAIRS
        if coefficients is not None:
            pair = tl.arange(0, PAIR_WIDTH)
            is_pair = pair < PAIRS
            place = (of_head + pair) * 2
            first = tl.load(offset.channels + place, mask=is_pair, other=0)
            second = tl.load(offset.channels + place + 1, mask=is_pair, other=0)
            mean_x = tl.load(offset.mean + place, mask=is_pair, other=0.0)
            mean_y = tl.load(offset.mean + place + 1, mask=is_pair, other=0.0)
            own_x = tl.load(source + first * x.element, mask=is_pair, other=0.0).to(tl.float32)
            own_y = tl.load(source + second * x.element, mask=is_pair, other=0.0).to(tl.float32)
            target = coefficients + row * 2 * PAIRS + pair
            tl.store(target, own_x * mean_x + own_y * mean_y, mask=is_pair)
            tl.store(target + PAIRS, own_y * mean_x - own_x * mean_y, mask=is_pair)
        else:
            which = tl.full((WIDTH,), -1, tl.int32)  # twice the pair of a channel, and 1 for its second one
            for k in range(PAIRS):
                channels = offset.channels + (of_head + k) * 2
                which = tl.where(element == tl.load(channels), 2 * k, which)
                which = tl.where(element == tl.load(channels + 1), 2 * k + 1, which)
            has_offset = which >= 0
            place = of_head + which // 2
            position = tl.load(places.data + group * places.group + token * places.token).to(tl.float64)
            turn = tl.load(offset.frequencies + place, mask=has_offset, other=0.0)
            angle = position * turn.to(tl.float64)
            cos, sin = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
            mean_x = tl.load(offset.mean + 2 * place, mask=has_offset, other=0.0)
            mean_y = tl.load(offset.mean + 2 * place + 1, mask=has_offset, other=0.0)
            turned = tl.where(which % 2 == 0, mean_x * cos - mean_y * sin, mean_x * sin + mean_y * cos)
            moved = tl.where(has_offset, turned, 0.0)
    if IS_RESTORED:
        if BLOCK > 0:
            v = _rotated(v, WIDTH, BLOCK, ROUNDS, ROOT)
        v = v * scale
        if PAIRS > 0:
            v = v + moved
    else:
        if PAIRS > 0 and coefficients is None:
            v = v - moved
        if factor is not None:
            v = v * scale
        if BLOCK > 0:
            v = _rotated(v, WIDTH, BLOCK, ROUNDS, ROOT)
    target = out.data + group * out.group + head * out.head + token * out.token + element * out.element
    within = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
    tl.store(target, tl.where(is_finite(v), within, v).to(out.data.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(v, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ROOT: tl.constexpr):
    """``quant.rotation.rotate`` of blocks of a vector, float32."""
    sums = v * (1.0 / BLOCK)  # exact, as BLOCK is a power of two
    for i in tl.static_range(ROUNDS):
        halves = tl.permute(tl.reshape(sums, (WIDTH // (2 << i), 2, 1 << i)), (0, 2, 1))
        first, second = tl.split(halves)
        both = tl.join(first + second, first - second)
        sums = tl.reshape(tl.permute(both, (0, 2, 1)), (WIDTH,))
    turned = sums * ROOT
    largest: tl.constexpr = 3.4028234663852886e38
    turned = tl.minimum(tl.maximum(turned, -largest), largest)
    return tl.where(is_finite(sums), turned, float("nan"))
