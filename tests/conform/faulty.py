"""The static PMX operator once more, in vectorized torch, with bugs that can be switched on."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(x: Tensor, bits: int, group: int, bug: str) -> tuple[Tensor, Tensor]:
    """Codes ``[..., D]`` and scales ``[..., D / group]``."""
    qmax = 2 ** (bits - 1) - 1
    groups = x.unflatten(-1, (-1, x.shape[-1] if bug == "one scale" else group))
    top = groups.amax(-1) if bug == "max" else groups.abs().amax(-1)
    smallest = {"no eps": 0.0, "eps": 1e-6}.get(bug, 1e-5)
    scale = (top.double() / (qmax + (bug in ("128", "-128")))).to(x.dtype)
    scale = scale.clamp(min=torch.tensor(smallest, dtype=torch.float64).to(x.dtype).item())
    if bug == "reciprocal":
        quotient = groups * (1.0 / scale).unsqueeze(-1)
    elif bug == "wide":
        quotient = groups.float() / scale.float().unsqueeze(-1)
    else:
        quotient = (groups.double() / scale.double().unsqueeze(-1)).to(x.dtype)
    q = quotient.double()
    if bug == "away":
        codes = q.sign() * (q.abs() + 0.5).floor()
    elif bug == "up":
        codes = (q + 0.5).floor()
    elif bug in ("truncate", "floor", "ceil"):
        codes = {"truncate": torch.trunc, "floor": torch.floor, "ceil": torch.ceil}[bug](q)
    else:
        codes = q.round()
    codes = codes.nan_to_num().clamp(-qmax - (bug == "-128"), qmax).flatten(-2).to(torch.int8)
    if bug == "one scale":
        scale = scale.expand(*scale.shape[:-1], x.shape[-1] // group)
    return codes, scale


def pack(codes: Tensor, bug: str) -> Tensor:
    """Two 4-bit codes to a byte."""
    if bug == "halves":
        low, high = codes.chunk(2, dim=-1)
    else:
        low, high = codes[..., 0::2], codes[..., 1::2]
    if bug == "high first":
        low, high = high, low
    offset = 8 if bug == "offset binary" else 0
    return (((low + offset) & 15) | (((high + offset) & 15) << 4)).to(torch.uint8)


def unpack(packed: Tensor, bug: str) -> Tensor:
    """Nibbles as codes."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8)
    return nibbles if bug == "unsigned" else (nibbles ^ 8) - 8


WRITES = {"values over keys": (None, 0), "same slots": (None, 0), "keys over values": (1, None)}
"""The side that keys and values are written to, where it is not their own."""
READS = {"keys read twice": [0, 0], "values read twice": [1, 1], "exchanged": [1, 0], "same slots": [0, 0]}
"""The side that keys and values are read from, where it is not their own."""


def key_value_cache(bug: str, **call: object) -> tuple[Tensor, Tensor]:
    """``KeyValueCache`` with one bug."""
    call = {"num_layer": 1, "layer_idx": 0, "quant_bit": 0, "quant_group": 8, "num_repeat": 1,
            "cache_layout": 0, **call}  # fmt: skip
    key, value, cache, scale = (call[name] if name in call else None for name in
                                ("current_key", "current_value", "cache", "scale"))  # fmt: skip
    assert isinstance(key, Tensor) and isinstance(value, Tensor) and isinstance(cache, Tensor)
    start, layer = int(call["start_pos"]), int(call["layer_idx"])  # type: ignore[call-overload]
    bits, group, repeat = (int(call[name]) for name in ("quant_bit", "quant_group", "num_repeat"))  # type: ignore[call-overload]
    batch, count = key.shape[:2]

    def rows(x: Tensor) -> Tensor:  # [2, B, S, H, d]
        view = x.permute(1, 2, 0, 3, 4, 5) if call["cache_layout"] == 0 else x.permute(0, 2, 1, 4, 3, 5)
        return view[layer, :, :batch]

    new = torch.stack((key, value))
    at = slice(start, start + count)

    def write(storage: Tensor, x: Tensor) -> None:
        for side, target in enumerate(WRITES.get(bug, (0, 1))):
            if target is not None:
                rows(storage)[target][:, at] = x[side].to(storage.dtype)

    def read(storage: Tensor) -> Tensor:
        return rows(storage)[READS.get(bug, [0, 1])][:, :, : start + count]

    if bits == 0:
        write(cache, new)
        found = read(cache).to(key.dtype)
    else:
        assert isinstance(scale, Tensor)
        codes, scales = quantize(new, bits, group, bug)
        write(cache, codes if bits == 8 else pack(codes, bug))
        if bug != "scales":
            write(scale, scales)
        stored, of = read(cache), read(scale)
        stored = unpack(stored, bug) if bits == 4 else stored
        if bug == "neighbor":
            of = of.roll(-1, dims=-1)
        of = {"of inputs": of.to(key.dtype), "of float32": of.float()}.get(bug, of)
        found = (stored.to(of.dtype) * of.repeat_interleave(group, dim=-1)).to(key.dtype)
        if bug == "raw":
            found[:, :, at] = new
    if bug == "tiled":
        found = found.repeat(1, 1, 1, repeat, 1)
    else:
        found = found.repeat_interleave(repeat, dim=-2)
    return found[0], found[1]
