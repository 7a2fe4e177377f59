"""The Ascend golden itself, against results written down by hand."""

from __future__ import annotations

import pytest
import torch
from oracles import ascend_cases, bits
from oracles.ascend_cases import golden_nd_to_nz, golden_slot_mapping
from torch import Tensor

from kvloom.conform.oracles import ascend as ascend_golden

KEY = torch.arange(1, 13, dtype=torch.float32).reshape(6, 2, 1)  # token t, head h: 2 * t + h + 1
EMPTY = torch.zeros(4, 3, 1, 1)


def written(call: dict, cache: Tensor = EMPTY, key: Tensor = KEY) -> list[float]:
    """The cache, flat, after a keys-only call."""
    cache = cache.clone()
    ascend_golden.scatter_pa_kv_cache(key, None, cache, None, **call)
    return cache.flatten().tolist()


def ints(*values: object) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("rule", "length", "win", "off", "run"),
    [
        ("Alibi", 5, 2, None, [3, 4]),
        ("Alibi", 5, 5, None, [0, 1, 2, 3, 4]),
        ("Alibi", 5, 0, None, []),
        ("Rope", 5, 2, 1, [0, range(1, 3), 3, 4]),
        ("Rope", 5, 5, 0, [range(5)]),
        ("Rope", 5, 1, 4, [0, 1, 2, 3, range(4, 5)]),
        ("Rope", 3, 2, -1, [0, 1, 2]),
        ("Rope", 3, 0, 1, [0, 1, 2]),
        ("Rope", 3, 2, 3, [0, 1, 2]),
        ("Rope", 0, 0, 0, []),
        ("Omni", 5, 2, 1, [0, 3, 4]),
        ("Omni", 5, 5, 0, []),
        ("Omni", 3, 2, -1, [0, 1, 2]),
        ("Omni", 3, 0, 1, [0, 1, 2]),
        ("Omni", 3, 2, 3, [0, 1, 2]),
    ],
)
def test_pieces_of_a_run(rule: str, length: int, win: int, off: int | None, run: list) -> None:
    assert ascend_golden.pieces(rule, length, win, off) == run


def test_tokens_go_to_their_slots() -> None:
    cache = torch.zeros(2, 2, 2, 1)
    expected = [0, 0, 3, 4, 0, 0, 1, 2]
    assert written({"slot_mapping": ints(3, 1, -1)}, cache, KEY[:3]) == expected


def test_head_wise_layout_puts_heads_before_tokens() -> None:
    cache = torch.zeros(2, 2, 2, 1)
    call = {"slot_mapping": ints(3, 1, -1), "scatter_mode": "NHSD"}
    assert written(call, cache, KEY[:3]) == [0, 3, 0, 4, 0, 1, 0, 2]


def test_fractal_layout_cuts_tokens_in_pieces() -> None:
    key = torch.arange(1, 17, dtype=torch.float32).reshape(1, 1, 16)
    flat = written({"slot_mapping": ints(1), "cache_mode": "PA_NZ"}, torch.zeros(1, 2, 2, 8), key)
    assert flat == [0] * 8 + list(range(1, 9)) + [0] * 8 + list(range(9, 17))


def test_strides_and_offsets_address_the_buffer() -> None:
    buffer = torch.arange(12, dtype=torch.float32)
    declared = buffer[:4].view(2, 2, 1)
    call = {"slot_mapping": ints(1, 0), "scatter_mode": "Nct", "strides": (6, 6), "offsets": (3, 0)}
    assert written(call, torch.zeros(1, 2, 2, 1), declared) == [9, 10, 3, 4]


def test_alibi_keeps_the_last_tokens_of_every_head() -> None:
    call = {"slot_mapping": ints(0, 4, -1, 9), "compress_lens": ints(2, 3, 1, 1), "seq_lens": ints(4, 2)}
    expected = [5, 7, 0, 0, 4, 6, 8, 0, 0, 12, 0, 0]
    assert written({**call, "scatter_mode": "Alibi"}) == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("Rope", [1, 4, 7, 0, 2, 4, 6, 8, 9, 11, 11, 0]), ("Omni", [1, 7, 0, 0, 2, 4, 6, 8, 9, 0, 0, 0])],
)
def test_a_window_becomes_one_mean_or_none(mode: str, expected: list[float]) -> None:
    call = {
        "compress_lens": ints(2, 1, 1, 2),
        "seq_lens": ints(4, 2),
        "compress_seq_offset": ints(1, -1, 1, 0),
    }
    assert written({**call, "slot_mapping": ints(0, 4, 8, 10), "scatter_mode": mode}) == expected


def test_padded_keys_read_each_row_from_its_start() -> None:
    call = {
        "compress_lens": ints([1, 2], [1, 0]),
        "seq_lens": ints(2, 3),
        "slot_mapping": ints([0, 3], [6, 9]),
    }
    key = KEY.reshape(2, 3, 2, 1)
    assert written(call, key=key) == [3, 0, 0, 2, 4, 0, 11, 0, 0, 0, 0, 0]
    folded = written({**call, "compress_seq_offset": ints(0, 0, 1, 0)}, key=key)
    assert folded == [1, 3, 0, 3, 0, 0, 7, 9, 11, 8, 10, 12]


@pytest.mark.parametrize(
    ("dtype", "window", "expected"),
    [
        (torch.int8, [-3, 0], -1),
        (torch.int8, [127, 127, 127], 127),
        (torch.uint8, [255, 254], 254),
        (torch.int16, [-32768, -32767], -32767),
        (torch.int32, [2**31 - 1, 1], -(2**30)),
        (torch.uint32, [2**32 - 1, 3], 1),
        (torch.float16, [60000.0, 60000.0], 60000.0),
        (torch.float8_e5m2, [1.0, 1.25, 1.25], 1.25),
    ],
)
def test_mean_of_a_window(dtype: torch.dtype, window: list, expected: float) -> None:
    rows = torch.tensor(window, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
    assert ascend_golden.mean(rows[:, None]).tolist() == [expected]


def test_gather_follows_the_table_and_zeroes_what_it_lacks() -> None:
    cache = torch.arange(1, 9, dtype=torch.float32).reshape(4, 2, 1, 1)
    out = torch.full((8, 1, 1), -1.0)
    ascend_golden.gather_pa_kv_cache(
        cache, cache, ints([2, 0], [-1, 3]), ints(3, 4), out, out.clone(), seq_offset=ints(0, 3)
    )
    assert out.flatten().tolist() == [5, 6, 1, 7, 8, 0, 0, -1]


def test_fractal_gather_joins_the_pieces() -> None:
    cache = torch.arange(32, dtype=torch.float32).reshape(1, 2, 2, 8)
    out = torch.zeros(2, 16)
    call = {"cache_mode": "PA_NZ", "is_seq_lens_cumsum": True}
    ascend_golden.gather_pa_kv_cache(cache, cache, ints([0]), ints(0, 2), out, out.clone(), **call)
    assert out.tolist() == [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]


def test_fractal_conversion_is_the_documented_permutation() -> None:
    nd = bits.poison((2, 3, 2, 16), torch.float16, bits.generator(0))
    expected = nd.reshape(2, 3, 2, 16).permute(0, 2, 1, 3)
    bits.assert_same_bits(golden_nd_to_nz(nd), expected, "nz")


def test_slots_of_a_block_table() -> None:
    assert golden_slot_mapping(ints([5, 1], [0, 2]), ints(2, 0), ints(3, 2), 4) == [22, 23, 4, 0, 1]


@pytest.mark.parametrize("dtype", ascend_cases.FLOATS)
def test_ulp_comparison_refuses_two_steps(dtype: torch.dtype) -> None:
    one = torch.ones(1, dtype=dtype)
    word = ascend_golden.raw(one)
    ascend_cases.assert_within_one_ulp((word + 1).view(dtype), one, "one step")
    with pytest.raises(AssertionError, match="two steps"):
        ascend_cases.assert_within_one_ulp((word + 2).view(dtype), one, "two steps")
