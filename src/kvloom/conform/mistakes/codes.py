"""Known mistakes of codes and scales, and of dequantization."""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.making import Mistake, by_numbers
from kvloom.conform.oracles import pmx


def _quantizer(
    rounding: Callable[[float], int] = round, divisor: int = 0, largest: str = "abs", smallest: float = 1e-5,
    reciprocal: bool = False, wide: bool = False, lowest: int = 0,
) -> Callable[[Tensor, int], tuple[list[int], Tensor]]:  # fmt: skip
    """Quantizer of a group with one wrong step."""

    def quantize(x: Tensor, bit: int) -> tuple[list[int], Tensor]:
        if not bool(torch.isfinite(x).all()):
            return [0] * x.numel(), torch.tensor(float("nan"), dtype=x.dtype)
        qmax = 2 ** (bit - 1) - 1
        exact = x.double()
        top = exact.abs().max() if largest == "abs" else exact.max()
        scale = torch.maximum(
            pmx.rounded(top / (qmax + divisor), x.dtype),
            pmx.rounded(torch.tensor(smallest, dtype=torch.float64), x.dtype),
        )
        if reciprocal:
            inverse = pmx.rounded(1.0 / scale.double(), x.dtype)
            quotient = pmx.rounded(exact * inverse.double(), x.dtype)
        else:
            of = torch.float32 if wide else x.dtype
            quotient = pmx.rounded(exact / scale.double(), of)
        low = -qmax - lowest
        return [max(low, min(qmax, rounding(q))) for q in quotient.nan_to_num(0.0).tolist()], scale

    return quantize


def half_away(q: float) -> int:
    return int(q + 0.5) if q >= 0 else -int(-q + 0.5)


def _half_to_plus(q: float) -> int:
    return math.floor(q + 0.5)


def _one_scale_store(
    x: Tensor, cache: Tensor, scale: Tensor | None, at: tuple[int, ...], bit: int, group: int
) -> None:
    """One scale of the whole head vector for every group."""
    _STORE(x, cache, scale, at, bit, len(x))
    if scale is not None and bit:
        scale[at] = scale[at][0]


def _codes_only(
    x: Tensor, cache: Tensor, scale: Tensor | None, at: tuple[int, ...], bit: int, group: int
) -> None:
    """Codes are written, their scales are not."""
    _STORE(x, cache, None if scale is None else scale.clone(), at, bit, group)


_STORE: Final = pmx.store_vector


def _neighbor_load(
    cache: Tensor, scale: Tensor | None, at: tuple[int, ...], bit: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Each group is read with the scale of the next one."""
    if scale is not None and bit:
        scale = scale.roll(-1, dims=-1)
    return _LOAD(cache, scale, at, bit, group, dtype)


_LOAD: Final = pmx.load_vector


def _high_first(codes: list[int]) -> list[int]:
    return [(codes[2 * j + 1] & 0xF) | ((codes[2 * j] & 0xF) << 4) for j in range(len(codes) // 2)]


def _offset_binary(codes: list[int]) -> list[int]:
    return [
        ((codes[2 * j] + 8) & 0xF) | (((codes[2 * j + 1] + 8) & 0xF) << 4) for j in range(len(codes) // 2)
    ]


def _halves(codes: list[int]) -> list[int]:
    half = len(codes) // 2
    return [(codes[j] & 0xF) | ((codes[half + j] & 0xF) << 4) for j in range(half)]


def _high_first_read(packed: list[int]) -> list[int]:
    return [((nibble & 0xF) ^ 8) - 8 for byte in packed for nibble in (byte >> 4, byte)]


def _offset_binary_read(packed: list[int]) -> list[int]:
    return [nibble - 8 for byte in packed for nibble in (byte & 0xF, byte >> 4)]


def _halves_read(packed: list[int]) -> list[int]:
    return [(nibble ^ 8) - 8 for nibble in [byte & 0xF for byte in packed] + [byte >> 4 for byte in packed]]


def _unsigned(packed: list[int]) -> list[int]:
    return [nibble for byte in packed for nibble in (byte & 0xF, byte >> 4)]


def _dequantizer(
    of: Callable[[torch.dtype], torch.dtype],
) -> Callable[[list[int], Tensor, torch.dtype], Tensor]:
    """Dequantizer that multiplies in another dtype, ``of`` the requested one."""

    def dequantize(codes: list[int], scale: Tensor, dtype: torch.dtype) -> Tensor:
        factor = scale.to(of(dtype)).double()
        product = pmx.rounded(torch.tensor(codes).double() * factor, of(dtype))
        return pmx.saturated(pmx.rounded(pmx.saturated(product), dtype))

    return dequantize


def _undequantized(operator: Operator, call: Call, results: Results) -> Results | None:
    """New tokens are returned unquantized, not as stored."""
    if not call["quant_bit"]:
        return None
    repeat = call["num_repeat"]
    for name in ("key", "value"):
        new = call[f"current_{name}"].repeat_interleave(repeat, dim=-2)
        if "seqstarts" not in call:
            results[name][:, call["start_pos"] :] = new
            continue
        seq, kv = call["seqstarts"].tolist(), call["kvstarts"].tolist()
        for b in range(len(seq) - 1):
            count = seq[b + 1] - seq[b]
            results[name][kv[b + 1] - count : kv[b + 1]] = new[seq[b] : seq[b + 1]]
    return results


def _tiled(operator: Operator, call: Call, results: Results) -> Results | None:
    repeat = call["num_repeat"]
    if repeat == 1:
        return None
    for name in ("key", "value"):
        x = results[name]
        results[name] = x.unflatten(-2, (-1, repeat)).transpose(-3, -2).flatten(-3, -2)
    return results


def _in_quantizing(name: str, text: str, **wrong: Any) -> Mistake:
    """A mistake in one step of the quantizer, with options of ``_quantizer``."""
    return by_numbers(name, text, pmx, quantize_group=_quantizer(**wrong))


def _nibbles(
    name: str, text: str, pack: Callable[[list[int]], list[int]], unpack: Callable[[list[int]], list[int]]
) -> tuple[Mistake, Mistake]:
    """The mistake in what is written alone, and in what is read, too."""
    return (
        by_numbers(name, text, pmx, pack_nibbles=pack),
        by_numbers(name, text, pmx, pack_nibbles=pack, unpack_nibbles=unpack),
    )


MISTAKES: Final = (
    _in_quantizing("round half away from zero", "ties are rounded away from zero, they go to the even code",
                   rounding=half_away),
    _in_quantizing("round half up", "ties are rounded up, they go to the even code", rounding=_half_to_plus),
    _in_quantizing("truncated codes", "quotients are cut off, they are rounded", rounding=int),
    _in_quantizing("rounded down", "quotients are rounded down, they go to the nearest", rounding=math.floor),
    _in_quantizing("rounded up", "quotients are rounded up, they go to the nearest", rounding=math.ceil),
    _in_quantizing("range of 128", "the scale divides by 128 (8), it is by 127 (7)", divisor=1),
    _in_quantizing("-128 code", "the scale is max / 128 and the code -128 occurs", divisor=1, lowest=1),
    _in_quantizing("largest, not largest absolute", "the scale is of max(x), it is of max(abs(x))",
                   largest="max"),
    _in_quantizing("no smallest scale", "the scale of a tiny group is less than 1e-5", smallest=0.0),
    _in_quantizing("another smallest scale", "the scale of a tiny group is 1e-6, it is 1e-5", smallest=1e-6),
    _in_quantizing("multiplied by a reciprocal", "codes are x * (1 / scale), they are x / scale",
                   reciprocal=True),
    _in_quantizing("quotient not rounded", "the quotient is float32, it is rounded to the dtype of the input",
                   wide=True),
    by_numbers("one scale for all groups", "the scale is of the whole head vector, each group has its own",
               pmx,
               store_vector=_one_scale_store),
    by_numbers("scales not updated", "codes were written without their scales", pmx,
               store_vector=_codes_only),
    by_numbers("scale of the neighboring group", "codes are read with the scale of the next group", pmx,
               load_vector=_neighbor_load),
    *_nibbles("nibbles swapped", "the even element is in the high nibble, it belongs in the low one",
              _high_first, _high_first_read),
    *_nibbles("offset binary nibbles", "nibbles are codes + 8, they are in two's complement",
              _offset_binary, _offset_binary_read),
    *_nibbles("nibbles of two halves", "byte j holds elements j and j + D/2, it holds 2j and 2j + 1",
              _halves, _halves_read),
    by_numbers("unsigned nibbles", "nibbles are read as 0 to 15, they are in two's complement", pmx,
               unpack_nibbles=_unsigned),
    by_numbers("dequantized in the dtype of the inputs",
               "codes * scale is computed in the dtype of the scale", pmx,
               dequantize_group=_dequantizer(lambda dtype: dtype)),
    by_numbers("dequantized in float32", "codes * scale is computed in the dtype of the scale", pmx,
               dequantize_group=_dequantizer(lambda dtype: torch.float32)),
    Mistake("new tokens not dequantized", "new keys are returned as they came, not as they are stored",
               _undequantized),
    Mistake("heads tiled", "output head g is head g % H, it is g // num_repeat", _tiled),
)  # fmt: skip
