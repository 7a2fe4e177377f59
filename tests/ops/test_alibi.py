"""ALiBi slopes, for all heads of a model and for the share of one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.attention import make_case
from oracles.bits import assert_same_bits

from kvloom import ops
from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.core.views import KVView, Side
from kvloom.errors import ArgumentError
from kvloom.ops import Scores, alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 64])
def test_slopes_of_a_power_of_two_are_one_geometric_series(heads: int) -> None:
    ratio = 2.0 ** (-8 / heads)
    assert alibi_slopes(heads).tolist() == [float(torch.tensor(ratio ** (n + 1))) for n in range(heads)]


def test_slopes_of_12_heads() -> None:
    first = [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12).tolist() == pytest.approx([*first, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


@pytest.mark.parametrize("heads", range(1, 70))
def test_slopes_equal_the_published_recipe(heads: int) -> None:
    expected = torch.tensor(pmx_golden.alibi_slopes(heads), dtype=torch.float64)
    torch.testing.assert_close(alibi_slopes(heads).double(), expected, rtol=1e-6, atol=0)


@given(st.integers(1, 80), st.data())
def test_slopes_of_a_rank_are_a_slice_of_the_whole(total: int, data: st.DataObject) -> None:
    held = data.draw(st.integers(1, total))
    offset = data.draw(st.integers(0, total - held))
    part = alibi_slopes(held, offset=offset, total_heads=total)
    assert part.dtype == torch.float32
    assert_same_bits(part, alibi_slopes(total)[offset : offset + held], "slopes")


@pytest.mark.parametrize("total", [4, 6, 12])
def test_attention_of_a_rank_is_a_slice_of_the_whole(total: int) -> None:
    case = make_case([3, 1], [7, 5], kv_heads=total // 2, ratio=2)
    whole = ops.attend(case.query, case.kv, case.batch(), Scores(alibi_slopes=alibi_slopes(total)))
    for offset in range(0, total, 2):
        query, kv_heads = case.query[:, offset : offset + 2], slice(offset // 2, offset // 2 + 1)
        kv = KVView(*(Side(side.cache[:, :, :, kv_heads]) for side in case.kv.sides))
        scores = Scores(alibi_slopes=alibi_slopes(2, offset=offset, total_heads=total))
        out = ops.attend(query, kv, case.batch(), scores)
        torch.testing.assert_close(out, whole[:, offset : offset + 2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_heads": 0}, "total_heads|num_heads"),
        ({"num_heads": -1, "total_heads": 4}, "num_heads"),
        ({"num_heads": 2.0}, "total_heads|num_heads"),
        ({"num_heads": 2, "total_heads": 0}, "total_heads"),
        ({"num_heads": 2, "total_heads": True}, "total_heads"),
        ({"num_heads": 2, "offset": -1, "total_heads": 4}, "offset"),
        ({"num_heads": 2, "offset": 3, "total_heads": 4}, "offset"),
        ({"num_heads": 2, "offset": 1}, "offset"),
        ({"num_heads": 5, "total_heads": 4}, "offset|num_heads"),
    ],
    ids=str,
)
def test_bad_share_is_refused_by_name(arguments: dict[str, int], name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^({name}) must be"):
        alibi_slopes(**arguments)


def test_slopes_use_the_device() -> None:
    assert alibi_slopes(4, device="meta").device.type == "meta"
