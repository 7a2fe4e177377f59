"""The golden itself, against numbers written down by hand and against other formulations."""

from __future__ import annotations

import random

import pytest
import torch
from oracles import attention, bits, pmx_cases

from kvloom.conform.oracles import pmx as pmx_golden

EXAMPLE = [0.1, -0.3, 0.7, 1.0, -2.0, 0.05, 0.0, 1.5]


@pytest.mark.parametrize(
    ("dtype", "bit", "scale", "codes"),
    [
        (torch.float32, 8, 0.0157480314, [6, -19, 44, 64, -127, 3, 0, 95]),
        (torch.float16, 8, 0.0157470703, [6, -19, 44, 64, -127, 3, 0, 95]),
        (torch.float32, 4, 0.285714298, [0, -1, 2, 3, -7, 0, 0, 5]),
    ],
)
def test_published_example(dtype: torch.dtype, bit: int, scale: float, codes: list[int]) -> None:
    got_codes, got_scale = pmx_golden.quantize_group(torch.tensor(EXAMPLE, dtype=dtype), bit)
    assert got_codes == codes
    assert float(got_scale) == float(torch.tensor(scale, dtype=dtype))


def test_published_nibbles() -> None:
    packed = pmx_golden.pack_nibbles([0, -1, 2, 3, -7, 0, 0, 5])
    assert bytes(packed).hex() == "f0320950"
    assert pmx_golden.unpack_nibbles(packed) == [0, -1, 2, 3, -7, 0, 0, 5]


def test_every_nibble_pair_survives_packing() -> None:
    codes = [code for low in range(-8, 8) for high in range(-8, 8) for code in (low, high)]
    assert pmx_golden.unpack_nibbles(pmx_golden.pack_nibbles(codes)) == codes


@pytest.mark.parametrize("dtype", bits.FLOATS)
@pytest.mark.parametrize("bit", [8, 4])
def test_quantizer_equals_arithmetic_in_the_input_dtype(dtype: torch.dtype, bit: int) -> None:
    qmax = 2 ** (bit - 1) - 1
    for x in pmx_cases.random_input((200, 8), dtype, bits.generator(1)):
        codes, scale = pmx_golden.quantize_group(x, bit)
        expected = torch.maximum(x.abs().max() / qmax, torch.tensor(1e-5, dtype=dtype))
        assert float(scale) == float(expected)
        assert codes == (x / expected).round().clamp(-qmax, qmax).int().tolist()


@pytest.mark.parametrize(
    ("num_heads", "log2_slopes"),
    [(1, [-8]), (2, [-4, -8]), (3, [-4, -8, -2]), (4, [-2, -4, -6, -8]), (6, [-2, -4, -6, -8, -1, -3])],
)
def test_alibi_slopes(num_heads: int, log2_slopes: list[int]) -> None:
    assert pmx_golden.alibi_slopes(num_heads) == [2.0**e for e in log2_slopes]


def test_slot_of_every_form() -> None:
    kvstarts = [0, 5, 12]
    assert pmx_golden.slot_of(1, 6, [40, 7], kvstarts, 0, 4) == 13
    assert pmx_golden.slot_of(1, 6, [[0, 4], [33, 21]], kvstarts, 1, 4) == 23
    assert pmx_golden.slot_of(1, 6, [9, 8, 7, 6, 5, 20, 22, 21, 24, 26, 25, 30], kvstarts, 1, 4) == 30


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
def test_attention_equals_torch_in_float64(is_causal: bool, ratio: int) -> None:
    rng = bits.generator(3)
    query, key, value = (torch.randn(5, heads, 8, generator=rng) for heads in (2 * ratio, 2, 2))
    starts = torch.tensor([0, 5])
    got = pmx_golden.multi_head_attention(
        query,
        key,
        value,
        starts,
        starts,
        0,
        5,
        5,
        num_heads=2 * ratio,
        head_dim=8,
        is_causal=is_causal,
        num_kv_heads=2,
    )
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", bits.FLOATS)
def test_plain_attention_follows_the_golden(dtype: torch.dtype) -> None:
    batch = pmx_cases.random_batch("page", 3, (4, 1, 3), (0, 5, 2), random.Random(5))
    call = pmx_cases.attention_call(
        batch, pmx_cases.Numerics(dtype, dtype), bits.generator(5), ratio=3, is_alibi=True
    )
    golden = pmx_golden.multi_head_cache_attention(**call)
    plain = attention.plain_attention(key=golden.key, value=golden.value, **{**call, "cache": None})
    error = float((plain.double() - golden.output).abs().max())
    assert error <= 40 * torch.finfo(dtype).eps * float(golden.output.abs().max())
