"""States of llama.cpp made by their document, byte by byte, and the numbers in them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvloom.carry import CacheGeometry, LayerGeometry

HEADS, DIM, TOKENS = 2, 64, 5
GEOMETRY = CacheGeometry.uniform(2, HEADS, DIM, "llama")
WINDOW = 4
WINDOWED = CacheGeometry(
    (LayerGeometry(HEADS, DIM, DIM, DIM, window=WINDOW), LayerGeometry(HEADS, DIM, DIM, DIM)), "gemma3"
)
LATENTS = CacheGeometry((LayerGeometry(1, 64, 16, 16, has_latents=True),) * 2, "deepseek_v3")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adjacent(x: Tensor) -> Tensor:
    """Element 2i + p is element i + p D/2."""
    half = x.shape[-1] // 2
    return x[..., [i // 2 + (i % 2) * half for i in range(2 * half)]]


def raw(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


def cache_bytes(
    positions: Sequence[int],
    keys: Sequence[Tensor],
    values: Sequence[Tensor] | None,
    *,
    v_trans: int = 0,
    kind: int = 0,
    ids: int = 1,
    streams: int = 1,
) -> bytes:
    """One cache; keys and values ``[C, n]`` in llama.cpp's order."""
    out = struct.pack("<II", streams, len(positions))
    out += b"".join(struct.pack(f"<iI{ids}i", p, ids, *[0] * ids) for p in positions)
    out += struct.pack("<II", v_trans, len(keys))
    for x in keys:
        out += struct.pack("<iQ", kind, x.shape[1] * x.element_size()) + raw(x)
    for x in values or ():
        if v_trans:
            out += struct.pack("<iII", kind, x.element_size(), x.shape[1]) + raw(x.t())
        else:
            out += struct.pack("<iQ", kind, x.shape[1] * x.element_size()) + raw(x)
    return out


def state_bytes(*caches: bytes) -> bytes:
    return struct.pack("<Ii", 0xAF143CD8, 0) + b"".join(caches)


def plain(v_trans: int = 0, dtype: torch.dtype = torch.float32, **more: int) -> tuple[bytes, Tensor, Tensor]:
    """A state of ``GEOMETRY``, and its keys and values ``[layers, T, H, D]`` as transformers has them."""
    keys, values = (numbers(2, TOKENS, HEADS, DIM, seed=x).to(dtype) for x in (1, 2))
    kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}[dtype]
    found = cache_bytes(
        range(TOKENS), [*adjacent(keys).flatten(2)], [*values.flatten(2)], v_trans=v_trans, kind=kind, **more
    )
    return state_bytes(found), keys, values
