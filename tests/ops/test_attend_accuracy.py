"""Attention against float64: at most twice the error of plain torch in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops.attention import Case, exact, float32_error, make_case, normal, plain
from ops.pools import INT4, INT8, PLAIN, Kind
from oracles.attention import assert_as_good_as_plain
from oracles.bits import FLOATS, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.ops import Scores

pytestmark = pytest.mark.usefixtures("each_backend")

Shape = tuple[int, ...]


def one_hot(shape: Shape, seed: int) -> Tensor:
    """Rows with a single large element: the softmax picks one key."""
    place = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator(seed))
    return torch.zeros(shape, dtype=torch.float64).scatter(-1, place, 12.0)


def all_equal(shape: Shape, seed: int) -> Tensor:
    return torch.full(shape, 0.7, dtype=torch.float64)


def growing(shape: Shape, seed: int) -> Tensor:
    """Later tokens are larger, from 1e-3 to 30."""
    magnitude = torch.logspace(-3, 1.5, max(shape[0], 1), dtype=torch.float64)[: shape[0]]
    return normal(shape, seed) * magnitude.view(-1, 1, 1)


def outliers(shape: Shape, seed: int) -> Tensor:
    """A few elements of 1e4 among small ones, in keys and values (queries have seeds that end with 3)."""
    x = 0.01 * normal(shape, seed)
    chosen = torch.rand(shape, generator=generator(seed)) < (0.0 if seed % 10 == 3 else 0.02)
    return torch.where(chosen, 1e4 * x.sign(), x)


def masked_case(dtype: torch.dtype, kind: Kind, seed: int) -> tuple[Case, Scores]:
    """A mask of -inf that leaves some rows nothing to see."""
    case = make_case([5, 3], [9, 6], dtype=dtype, kind=kind, seed=seed)
    mask = torch.zeros(8, 15).masked_fill(torch.rand(8, 15, generator=generator(seed)) < 0.5, float("-inf"))
    mask[2] = float("-inf")
    return case, Scores(mask=mask.to(dtype))


NEW, STORED = [3, 1, 6], [7, 12, 11]
FAMILIES = {
    "normal": lambda dtype, kind, seed: (make_case(NEW, STORED, dtype=dtype, kind=kind, seed=seed), Scores()),
    "one-hot rows": lambda dtype, kind, seed: (
        make_case(NEW, STORED, dtype=dtype, kind=kind, seed=seed, fill=one_hot), Scores()),
    "all equal": lambda dtype, kind, seed: (
        make_case(NEW, STORED, dtype=dtype, kind=kind, seed=seed, fill=all_equal), Scores()),
    "growing magnitude": lambda dtype, kind, seed: (
        make_case(NEW, STORED, dtype=dtype, kind=kind, seed=seed, fill=growing), Scores()),
    "outliers": lambda dtype, kind, seed: (
        make_case(NEW, STORED, dtype=dtype, kind=kind, seed=seed, fill=outliers), Scores(scale=0.01)),
    "masked": masked_case,
    "length 1": lambda dtype, kind, seed: (
        make_case([1, 1], [1, 1], dtype=dtype, kind=kind, seed=seed), Scores()),
    "empty": lambda dtype, kind, seed: (
        make_case([0, 2, 0], [0, 2, 3], dtype=dtype, kind=kind, seed=seed), Scores()),
}  # fmt: skip


def worst_ratio(actual: Tensor, golden: Tensor, reference: Tensor) -> float:
    """Error over (error of plain torch + rounding of the largest result); 2 is allowed."""
    if not golden.numel():
        return 0.0
    error, plain_error = (float((x.double() - golden).abs().max()) for x in (actual, reference))
    allowed = plain_error + torch.finfo(actual.dtype).eps * float(golden.abs().max())
    return error / allowed if error else 0.0


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    pairwise([*FAMILIES], [PLAIN, Kind(torch.float16), Kind(torch.bfloat16), INT8, INT4], FLOATS),
    ids=str,
)
def test_error_is_at_most_twice_that_of_plain_torch(
    dtype: torch.dtype, kind: Kind, family: str, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(4):
        case, scores = FAMILIES[family](dtype, kind, seed)
        actual = ops.attend(case.query, case.kv, case.batch(), scores)
        golden, reference = exact(case, scores), plain(case, scores)
        assert bool(reference.isfinite().all()), "the plain computation overflows: no error to compare with"
        record_property("worst attend ratio", (str(dtype), worst_ratio(actual, golden, reference)))
        assert_as_good_as_plain(actual, golden, reference, float32_error(case, scores))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_sequences(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    case = make_case([40, 1], [90, 300], dtype=dtype, head_dim=32, page_size=16, block_size=16, ratio=4)
    actual = ops.attend(case.query, case.kv, case.batch())
    wide = Case(case.query.double(), case.kv, case.new, case.stored, case.slots)
    wide.loaded = [(key.double(), value.double()) for key, value in case.keys_and_values()]
    golden, reference = plain(wide, Scores()), plain(case, Scores())
    record_property("worst attend ratio", (str(dtype), worst_ratio(actual, golden, reference)))
    assert_as_good_as_plain(actual, golden, reference, float32_error(case, Scores()))


def test_plain_torch_in_float64_is_the_loop() -> None:
    """The two judges agree, so that long sequences may use the fast one."""
    case = make_case(NEW, STORED)
    wide = Case(case.query.double(), case.kv, case.new, case.stored, case.slots)
    wide.loaded = [(key.double(), value.double()) for key, value in case.keys_and_values()]
    torch.testing.assert_close(plain(wide, Scores()), exact(case, Scores()), rtol=1e-12, atol=1e-13)
