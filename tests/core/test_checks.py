"""The tensor matcher: what it accepts, what it returns, and how it says no."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.core.checks import can_read, debug, debugging, expect, expect_range
from kvloom.core.memory import expect_writable
from kvloom.errors import ArgumentError, ShapeError

# --- expect -------------------------------------------------------------------------------------------------


def test_expect_returns_the_size_of_each_letter() -> None:
    assert expect("x", torch.zeros(3, 4, 5), "T H D") == {"T": 3, "H": 4, "D": 5}


def test_expect_keeps_sizes_that_were_given() -> None:
    assert expect("x", torch.zeros(3, 4), "T H", H=4, L=9) == {"T": 3, "H": 4, "L": 9}


def test_expect_carries_sizes_from_one_argument_to_the_next() -> None:
    sizes = expect("key", torch.zeros(3, 4, 5), "T H D")
    with pytest.raises(ShapeError, match=r"value must be \[T, H, D\] with T=3, H=4, D=5, got \[3, 4, 6\]"):
        expect("value", torch.zeros(3, 4, 6), "T H D", **sizes)


def test_expect_takes_a_number_for_an_axis() -> None:
    assert expect("x", torch.zeros(3, 2), "T 2")["T"] == 3
    with pytest.raises(ShapeError, match="x must be"):
        expect("x", torch.zeros(3, 3), "T 2")


@pytest.mark.parametrize("shape", [(), (3,), (3, 4, 5, 1)])
def test_expect_refuses_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"x must be \[T, H, D\], got"):
        expect("x", torch.zeros(shape), "T H D")


@pytest.mark.parametrize("x", [None, 3, [1.0], "x"])
def test_expect_refuses_what_is_no_tensor(x: object) -> None:
    with pytest.raises(ShapeError, match=f"x must be a tensor, got {type(x).__name__}"):
        expect("x", x, "T")  # type: ignore[arg-type]


def test_expect_refuses_another_dtype() -> None:
    with pytest.raises(ShapeError, match=r"x must be torch\.float16, got torch\.float32"):
        expect("x", torch.zeros(3), "T", dtype=torch.float16)
    with pytest.raises(ShapeError, match=r"x must be torch\.float16 or torch\.int8, got torch\.float32"):
        expect("x", torch.zeros(3), "T", dtype=(torch.float16, torch.int8))


def test_expect_takes_any_of_several_dtypes() -> None:
    assert expect("x", torch.zeros(3), "T", dtype=(torch.float16, torch.float32)) == {"T": 3}


def test_expect_refuses_another_device() -> None:
    with pytest.raises(ShapeError, match="x must be on cpu, got meta"):
        expect("x", torch.zeros(3, device="meta"), "T", device=torch.device("cpu"))


def test_a_shape_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="x must be"):
        expect("x", torch.zeros(3), "T H")


# --- expect_range -------------------------------------------------------------------------------------------


@given(st.integers(-5, 5), st.integers(-3, 3), st.one_of(st.none(), st.integers(-3, 3)))
def test_range_is_half_open(value: int, low: int, high: int | None) -> None:
    if low <= value and (high is None or value < high):
        assert expect_range("n", value, low, high) == value
        return
    bound = f"at least {low}" if high is None else rf"in \[{low}, {high}\)"
    with pytest.raises(ArgumentError, match=rf"^n must be {bound}, got {value}$"):
        expect_range("n", value, low, high)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, torch.tensor(1)])
def test_range_refuses_what_is_no_int(value: object) -> None:
    with pytest.raises(ArgumentError, match="n must be an int, got"):
        expect_range("n", value, 0)  # type: ignore[arg-type]


# --- expect_writable --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4))
def test_overlapping_elements_are_always_refused(axes: list[tuple[int, int]]) -> None:
    shape, strides = zip(*axes, strict=True)
    offsets = torch.zeros((), dtype=torch.int64)
    for extent, stride in axes:
        offsets = offsets.unsqueeze(-1) + torch.arange(extent) * stride
    overlaps = len(set(offsets.flatten().tolist())) < offsets.numel()
    x = torch.empty(int(offsets.max()) + 1).as_strided(shape, strides)
    if overlaps:
        with pytest.raises(ShapeError, match="x must not overlap itself"):
            expect_writable("x", x)
    else:
        assert x.numel() == offsets.numel()


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 4, 5),
        torch.zeros(3, 4, 5).permute(2, 0, 1),
        torch.zeros(6, 8)[::2, 1::3],
        torch.zeros(4, 1).expand(4, 1),
        torch.zeros(1).expand(1, 1, 1),
        torch.zeros(()),
        torch.zeros(0, 5),
        torch.zeros(2, 6).unfold(1, 2, 2),
    ],
    ids=["contiguous", "permuted", "steps", "expanded to 1", "all ones", "0-D", "empty", "unfolded"],
)
def test_tensor_without_overlap_is_accepted(x: torch.Tensor) -> None:
    assert expect_writable("x", x) is None


@pytest.mark.parametrize(
    "x",
    [torch.zeros(1, 4).expand(3, 4), torch.zeros(2, 6).unfold(1, 3, 1), torch.zeros(()).expand(2)],
    ids=["expanded", "sliding window", "scalar expanded"],
)
def test_tensor_that_overlaps_is_refused_by_name(x: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"^cache must not overlap itself, got shape .* strides"):
        expect_writable("cache", x)


# --- debug --------------------------------------------------------------------------------------------------


def test_debug_holds_within_its_context_only() -> None:
    assert not debugging()
    with debug():
        assert debugging()
        with debug():
            assert debugging()
        assert debugging()
    assert not debugging()


def test_debug_ends_when_an_error_leaves_it() -> None:
    with pytest.raises(RuntimeError), debug():
        raise RuntimeError
    assert not debugging()


def test_values_are_read_on_the_cpu_and_elsewhere_only_if_asked_for() -> None:
    assert can_read(torch.zeros(1))
    assert not can_read(torch.zeros(1, device="meta"))
    with debug():
        assert can_read(torch.zeros(1, device="meta"))
