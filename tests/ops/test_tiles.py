"""Attention in AMX tiles: emulated ones have the bits of the hardware, and what only prompts in tiles do."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from ops.attention import Case, float32_error, make_case, normal, plain
from ops.cases import codes, golden, options
from ops.pools import Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.ops import Scores
from kvloom.ops.impl import cpu

BF16 = torch.bfloat16
KINDS = [Kind(BF16), codes(8, 8), codes(8, 64), codes(4, 32)]


def why_not_emulated() -> str | None:
    if cpu._HANDLE is None:
        return cpu.WHY_NOT
    reason = cpu._HANDLE.kvloom_why_not(b"amx-emulated")
    return None if reason is None else reason.decode()


in_tiles = pytest.mark.skipif(
    cpu.ISA not in ("amx", "amx-emulated"), reason=f"kernels of {cpu.ISA}, which has no tiles"
)
beside_hardware = pytest.mark.skipif(
    cpu.ISA != "amx" or why_not_emulated() is not None,
    reason=f"no tiles to compare: {cpu.WHY_NO_AMX or why_not_emulated()}",
)


@pytest.fixture
def emulate() -> Iterator[Callable[[], int]]:
    """Emulated tiles instead of the hardware's."""
    path = os.environ.get("KVLOOM_LIBRARY") or cpu.find_library(ops.impl.__path__)
    library = ctypes.CDLL(str(path))
    yield lambda: library.kvloom_choose_isa(b"amx-emulated")
    library.kvloom_choose_isa(b"amx")


def attend(case: Case, scores: Scores | None = None) -> Tensor:
    return ops.attend(case.query, case.kv, case.batch(), scores or Scores())


def assert_right(case: Case, scores: Scores | None = None) -> Tensor:
    out, scores = attend(case, scores), scores or Scores()
    assert_as_good_as_plain(out, golden(case, scores), plain(case, scores), float32_error(case, scores))
    return out


@beside_hardware
@pytest.mark.parametrize("size", [1.0, 1e-19, 1e-38, 1e18, 1e30])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_emulated_tiles_have_the_bits_of_the_hardware(
    kind: Kind, size: float, emulate: Callable[[], int]
) -> None:
    """Also of products and sums that are subnormal, or infinite."""
    queries = 1.0 if kind.bits else size  # scales are float16, whose range is small

    def fill(shape: tuple[int, ...], seed: int) -> Tensor:
        return normal(shape, seed) * (queries if kind.bits == 0 or seed % 10 == 3 else 1.0)

    case = make_case([40, 1], [300, 70], kind=kind, dtype=BF16, head_dim=64, fill=fill)
    on_hardware = attend(case)
    assert emulate() == 0
    assert_same_bits(attend(case), on_hardware, "emulated")


@in_tiles
@pytest.mark.parametrize("name", options(4, 1, 1))
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_prompts_of_several_chunks(kind: Kind, head_dim: int, name: str) -> None:
    case = make_case([70], [600], kind=kind, dtype=BF16, head_dim=head_dim, page_size=16, block_size=16)
    assert_right(case, options(4, 70, 600)[name])


@in_tiles
@pytest.mark.parametrize("slope", [3.0, -3.0])
def test_scores_that_rise_by_thousands_of_bits(slope: float) -> None:
    """The first tokens say nothing of how large later scores are."""

    def fill(shape: tuple[int, ...], seed: int) -> Tensor:
        x = normal(shape, seed)
        if seed % 10 == 3:
            return x.abs()
        return x if seed % 10 == 2 else x.abs() * slope * torch.arange(shape[0])[:, None, None] / 4

    assert_right(make_case([70], [600], kind=Kind(BF16), dtype=BF16, head_dim=64, fill=fill))


@in_tiles
def test_a_row_shows_nothing_of_its_neighbors() -> None:
    """A row with NaN, or one that is weighed again, changes no bit of the others."""
    case = make_case([70], [600], kind=Kind(BF16), dtype=BF16, head_dim=64)
    expected = attend(case)
    case.query[3] = math.nan
    case.query[50, 1] *= 1e4
    out = attend(case)
    assert bool(out[3].isnan().all())
    others = [row for row in range(70) if row not in (3, 50)]
    assert_same_bits(out[others], expected[others], "other rows")
    assert_same_bits(out[50, [0, 2, 3]], expected[50, [0, 2, 3]], "other heads")


@in_tiles
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(BF16).min, -1e31])
def test_rows_that_see_nothing_and_rows_whose_scores_are_lowest(hidden: float) -> None:
    """What is hidden from all counts for nothing; what is as low for all counts alike."""
    case = make_case([40], [300], kind=Kind(BF16), dtype=BF16, head_dim=64)
    mask = torch.zeros(40, 300)
    mask[7] = hidden
    out = attend(case, Scores(mask=mask))
    values = case.keys_and_values()[0][1][:268].double()
    seen = torch.zeros(2, 64) if hidden == -math.inf else values.mean(0)
    torch.testing.assert_close(out[7].double(), seen.double().repeat_interleave(2, 0), rtol=0.02, atol=0.01)


@in_tiles
def test_scores_below_any_bound() -> None:
    """Products of queries and keys that are lower than the score by which kernels hide a token."""

    def fill(shape: tuple[int, ...], seed: int) -> Tensor:
        constant = {1: -1e16, 3: 1e16}.get(seed % 10)
        return normal(shape, seed) if constant is None else torch.full(shape, constant, dtype=torch.float64)

    case = make_case([40], [300], kind=Kind(BF16), dtype=BF16, head_dim=64, fill=fill)
    values = case.keys_and_values()[0][1].double()
    for row, out in enumerate(attend(case)):
        seen = values[: 261 + row].mean(0).repeat_interleave(2, 0)
        torch.testing.assert_close(out.double(), seen, rtol=0.02, atol=0.01)
