"""Keys without an offset that turns with the position: their scores, what is gathered, and bad arguments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ops.attention import Case, float32_error, make_case, plain
from ops.cases import codes, golden, offset_of, waves
from ops.pools import INT4, INT8, PLAIN, Kind, make_pool
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom import ops
from kvloom.core.views import KVView, Side
from kvloom.errors import ArgumentError, KVError, ShapeError
from kvloom.ops import KeyOffset, Scores
from kvloom.ops.impl import cpu

BACKEND = pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("cpu", marks=pytest.mark.skipif(cpu.ISA is None, reason=str(cpu.WHY_NOT)))],
)
HEADS, D = 2, 16


def turned(offset: KeyOffset, h: int, position: int) -> list[float]:
    """The vector of head h, by the definition."""
    vector = [0.0] * offset.head_dim
    for i, (x, y) in enumerate(offset.mean[h].tolist()):
        angle = float(offset.frequencies[h, i]) * position
        one, other = offset.channels[h, i].tolist()
        vector[one] = x * math.cos(angle) - y * math.sin(angle)
        vector[other] = x * math.sin(angle) + y * math.cos(angle)
    return vector


@pytest.mark.parametrize("positions", [[0, 1, 2, 1000, 10**6], [[5, -3], [2**30, 7]]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_vectors_turn_as_rope_does(positions: list[object], dtype: torch.dtype) -> None:
    offset, at = offset_of(), torch.tensor(positions, dtype=dtype)
    expected = [[turned(offset, h, p) for h in range(HEADS)] for p in at.flatten().tolist()]
    assert offset.at(at).dtype == torch.float32
    torch.testing.assert_close(
        offset.at(at).double(),
        torch.tensor(expected).double().view(*at.shape, HEADS, D),
        rtol=1e-6,
        atol=1e-4,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_is_the_product_with_the_offset(dtype: torch.dtype) -> None:
    offset, query = offset_of(), torch.randn(3, 4, D, generator=generator(1)).to(dtype)
    bias = offset.bias(query)
    for position in (0, 1, 77, 4096):
        angle = (bias.frequencies * position).repeat_interleave(2, 0)
        found = (bias.coefficients * torch.cat((angle.cos(), angle.sin()), -1)).sum(-1)
        vector = offset.at(torch.tensor([position]))[0].repeat_interleave(2, 0)
        expected = (query.double() * vector.double()).sum(-1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def stored_without(case: Case, offset: KeyOffset, first: list[int]) -> Case:
    """The same keys without their offset, stored in place of these."""
    kept = [(key.clone(), value.clone()) for key, value in case.keys_and_values()]
    for b, (key, value) in enumerate(kept):
        positions = torch.arange(len(key)) + first[b]
        rest = (key.float() - offset.at(positions)).to(key.dtype)
        ops.store(rest, value, torch.tensor(case.slots[b], dtype=torch.int64), case.kv)
    return Case(case.query, case.kv, case.new, case.stored, case.slots, case.page_size)


@BACKEND
@pytest.mark.parametrize("first", [None, [0, 7, 100_000]], ids=str)
@pytest.mark.parametrize("name", ["causal", "softcap and sinks", "window"])
def test_scores_are_those_of_the_keys_with_their_offset(
    backend: str, first: list[int] | None, name: str
) -> None:
    scores = {
        "causal": Scores(),
        "softcap and sinks": Scores(softcap=3.0, sinks=torch.ones(4)),
        "window": Scores(window=50, is_causal=False),
    }[name]
    offset = offset_of(size=2.0)
    case = make_case([2, 1, 20], [9, 600, 70], head_dim=D)
    whole = [golden(case, scores), plain(case, scores), float32_error(case, scores)]
    rest = stored_without(case, offset, first or [0, 0, 0])
    bias = offset.bias(case.query, None if first is None else torch.tensor(first))
    scores = replace(scores, positional_bias=bias)
    out = ops.attend(rest.query, rest.kv, rest.batch(), scores, backend=backend)
    assert_as_good_as_plain(out, *whole[:2], 4 * whole[2])


@pytest.mark.parametrize("kind", [codes(8, 16), codes(4, 16)], ids=str)
def test_codes_of_the_rest_are_finer(kind: Kind) -> None:
    """What the offset is for: keys of a large mean, whose differences are small."""
    offset = offset_of(size=100.0)
    errors = {}
    for name in ("with", "without"):
        case = make_case([4], [80], kind=PLAIN, head_dim=D)
        key, value = case.keys_and_values()[0]
        positions, slots = torch.arange(80), torch.arange(80)
        key = key + offset.at(positions)
        scores = torch.einsum("qhd,khd->hqk", case.query[:, ::2].double(), key.double())
        kv = make_pool("2 B S H D", kind, blocks=20, block_size=4, heads=2, head_dim=D, value_dim=D).view()
        if name == "with":
            ops.store(key, value, slots, kv)
            found = ops.load(slots, kv, dtype=torch.float32)[0]
        else:
            ops.store(key - offset.at(positions), value, slots, kv)
            found = ops.load(slots, kv, dtype=torch.float32, offset=offset, positions=positions)[0]
        got = torch.einsum("qhd,khd->hqk", case.query[:, ::2].double(), found.double())
        errors[name] = float((got - scores).abs().mean())
    assert errors["without"] < errors["with"] / 10


@BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [PLAIN, Kind(torch.bfloat16), INT8, INT4], ids=str)
@pytest.mark.parametrize("num_repeat", [1, 3])
@pytest.mark.parametrize("is_batch", [False, True])
def test_gathered_keys_have_their_offset(
    backend: str, dtype: torch.dtype, kind: Kind, num_repeat: int, is_batch: bool
) -> None:
    case = make_case([1], [12], kind=kind, head_dim=D)
    offset, slots = offset_of(), torch.tensor(case.slots[0])
    positions = torch.arange(12) + 40
    if is_batch:
        slots, positions = slots.view(3, 4), positions.view(3, 4)
    how = {"dtype": dtype, "num_repeat": num_repeat, "backend": backend}
    key, value = ops.load(slots, case.kv, offset=offset, positions=positions.int(), **how)
    rest, _ = ops.load(slots, case.kv, **how | {"dtype": torch.float32, "num_repeat": 1})
    assert_same_bits(value, ops.load(slots, case.kv, **how)[1], "value")
    added = offset.at(positions)
    rest = rest + (added.transpose(1, 2) if is_batch else added)
    assert_same_bits(key, rest.to(dtype).repeat_interleave(num_repeat, dim=1), "key")


def test_keys_alone_have_their_offset() -> None:
    case = make_case([1], [5], head_dim=D)
    slots, positions = torch.tensor(case.slots[0]), torch.arange(5)
    kv = KVView(case.kv.key, None)
    key, value = ops.load(slots, kv, num_repeat=2, offset=offset_of(), positions=positions)
    expected, _ = ops.load(slots, case.kv, num_repeat=2, offset=offset_of(), positions=positions)
    assert_same_bits(key, expected, "key")
    assert value.shape == (5, 2 * HEADS, 0)


# --- what the kernels treat differently ---------------------------------------------------------------------


def with_waves(pairs: int, rows: int, heads: int = 4) -> Scores:
    return Scores(positional_bias=waves(rows, heads, pairs))


@BACKEND
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pairs", [1, 2, 4, 15, 16, 17, 64])
def test_numbers_of_pairs(backend: str, dtype: torch.dtype, pairs: int) -> None:
    case = make_case([3, 20], [600, 70], kind=codes(8, 32), dtype=dtype, head_dim=64)
    scores = with_waves(pairs, 23)
    out = ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), float32_error(case, scores))


@BACKEND
@pytest.mark.parametrize("first", [[0, 1, 63, 64], [2**20, 2**31, -5, 100]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_positions_that_sequences_begin_at(backend: str, first: list[int], dtype: torch.dtype) -> None:
    case = make_case([1, 2, 18, 3], [70, 5, 200, 9])
    bias = replace(waves(24, 4, 3), first_position=torch.tensor(first).clamp(max=2**31 - 1).to(dtype))
    scores = Scores(positional_bias=bias)
    out = ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), 4 * float32_error(case, scores))


@BACKEND
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("of_frequencies", [torch.float32, torch.float64], ids=str)
def test_dtypes_and_strides_do_not_matter(
    backend: str, dtype: torch.dtype, of_frequencies: torch.dtype
) -> None:
    case = make_case([3, 20], [60, 70])
    bias = waves(23, 4, 3)
    bias = replace(bias, coefficients=bias.coefficients.to(dtype), frequencies=bias.frequencies.float())
    expected = ops.attend(case.query, case.kv, case.batch(), Scores(positional_bias=bias), backend=backend)
    strided = replace(
        bias,
        coefficients=bias.coefficients.float().permute(2, 0, 1).contiguous().permute(1, 2, 0),
        frequencies=bias.frequencies.to(of_frequencies).t().contiguous().t(),
        first_position=torch.zeros(2, dtype=torch.int32),
    )
    out = ops.attend(case.query, case.kv, case.batch(), Scores(positional_bias=strided), backend=backend)
    assert_same_bits(out, expected, "output")


@BACKEND
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_frequency_that_is_not_finite_breaks_the_rows_of_its_head(backend: str, bad: float) -> None:
    case = make_case([3, 20], [60, 70])
    scores = with_waves(3, 23)
    expected = ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)
    bias = scores.positional_bias
    bias = replace(bias, frequencies=bias.frequencies.clone())
    bias.frequencies[1, 2] = bad
    out = ops.attend(case.query, case.kv, case.batch(), Scores(positional_bias=bias), backend=backend)
    assert bool(out[:, 2:].isnan().all())
    assert_same_bits(out[:, :2], expected[:, :2], "the other head")


@BACKEND
def test_values_that_are_not_finite_show_where_their_weight_is_not_0(backend: str) -> None:
    """Rows that are computed once more, slowly, have the same bias."""
    case = make_case([2], [90])
    scores = with_waves(3, 2)
    expected = ops.attend(case.query, case.kv, case.batch(), scores, backend=backend)
    mask = torch.zeros(2, 90)
    mask[:, 40] = -1e4
    key, value = case.keys_and_values()[0]
    value = value.clone()
    value[40, :, 1] = math.inf
    ops.store(key, value, torch.tensor(case.slots[0]), case.kv)
    out = ops.attend(case.query, case.kv, case.batch(), replace(scores, mask=mask), backend=backend)
    assert bool(out.isfinite().all())
    value[40, :, 1] = 0
    ops.store(key, value, torch.tensor(case.slots[0]), case.kv)
    torch.testing.assert_close(
        out, ops.attend(case.query, case.kv, case.batch(), replace(scores, mask=mask), backend=backend)
    )
    assert not torch.equal(out, expected)


# --- refused ------------------------------------------------------------------------------------------------

GOOD = offset_of()


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"mean": torch.zeros(2, 3)}, ShapeError, "mean"),
        ({"mean": torch.zeros(2, 3, 3)}, ShapeError, "mean"),
        ({"mean": torch.zeros(2, 3, 2).double()}, ShapeError, "mean"),
        ({"mean": torch.zeros(2, 0, 2)}, ShapeError, "mean"),
        ({"mean": torch.zeros(2, 65, 2)}, ShapeError, "mean"),
        ({"mean": [0.0]}, ShapeError, "mean"),
        ({"channels": GOOD.channels.int()}, ShapeError, "channels"),
        ({"channels": GOOD.channels[:1]}, ShapeError, "channels"),
        ({"channels": GOOD.channels + 8}, ArgumentError, "channels"),
        ({"channels": GOOD.channels - 9}, ArgumentError, "channels"),
        ({"channels": torch.zeros(2, 3, 2).long()}, ArgumentError, "channels"),
        ({"frequencies": GOOD.frequencies.half()}, ShapeError, "frequencies"),
        ({"frequencies": GOOD.frequencies[:, :2]}, ShapeError, "frequencies"),
        ({"frequencies": GOOD.frequencies.to("meta")}, ShapeError, "frequencies"),
        ({"head_dim": 5}, ArgumentError, "head_dim"),
        ({"head_dim": 16.0}, ArgumentError, "head_dim"),
    ],
    ids=lambda x: None,
)
def test_bad_offset_is_refused_by_name(changes: dict[str, object], error: type[KVError], name: str) -> None:
    with pytest.raises(error, match=rf"^{name}\b.* must be"):
        replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"positions": None}, ArgumentError, "positions"),
        ({"offset": None}, ArgumentError, "positions"),
        ({"positions": torch.arange(4)}, ShapeError, "positions"),
        ({"positions": torch.arange(5)[None]}, ShapeError, "positions"),
        ({"positions": torch.arange(5.0)}, ShapeError, "positions"),
        ({"positions": torch.arange(5, device="meta")}, ShapeError, "positions"),
        ({"positions": [0, 1, 2, 3, 4]}, ShapeError, "positions"),
        ({"offset": torch.zeros(2, 16)}, ArgumentError, "offset"),
        ({"offset": offset_of(heads=3)}, ShapeError, "offset"),
        ({"offset": offset_of(head_dim=32)}, ShapeError, "offset"),
        ({"kv": KVView(Side(torch.zeros(1, 8, 1, 2, 1, 16, dtype=torch.int8)), None)}, ShapeError, "kv"),
    ],
    ids=lambda x: None,
)
def test_bad_load_is_refused_by_name(changes: dict[str, object], error: type[KVError], name: str) -> None:
    case = make_case([1], [5], head_dim=D)
    good: dict[str, object] = {"slots": torch.tensor(case.slots[0]), "kv": case.kv, "dtype": torch.float32,
                               "offset": GOOD, "positions": torch.arange(5)}  # fmt: skip
    ops.load(**good)
    if "kv" in changes:
        good["slots"], good["dtype"] = torch.arange(5), torch.int8
    with pytest.raises(error, match=rf"^{name}\b.* must "):
        ops.load(**good | changes)


@pytest.mark.parametrize(
    "query", [torch.zeros(3, 4, 8), torch.zeros(3, 3, D), torch.zeros(3, 4, D).double(), None]
)
def test_bad_query_is_refused_by_name(query: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"^query must "):
        GOOD.bias(query)
