"""Axis strings, operator numbers, shapes and the layout of scales."""

from __future__ import annotations

import pytest
import torch

from kvloom.core.layouts import OPERATOR_LAYOUTS, CacheLayout, ascend_fractal_nz
from kvloom.errors import ArgumentError, ConfigError, ShapeError

SIZES = {"L": 3, "B": 5, "S": 4, "T": 20, "H": 2, "D": 16}

# The numbers of each operator's document, spelled out once more.
NUMBERS = {
    "pmx.KeyValueCache": ["B L 2 S H D", "L B 2 H S D"],
    "pmx.dynamic_batching.KeyValueCache": ["T L 2 H D", "L T 2 H D", "L 2 T H D", "L 2 H T D"],
    "pmx.dynamic_batching.MultiHeadCacheAttention": ["T L 2 H D", "L T 2 H D", "L H T 2 D", "2 L H T D"],
    "opmx.KeyValueCache": ["B L 2 S H D", "L B 2 H S D"],
    "opmx.dynamic_batching.KeyValueCache": ["T L 2 H D", "L T 2 H D", "L 2 T H D", "L 2 H T D"],
    "opmx.dynamic_batching.MultiHeadCacheAttention": ["T L 2 H D", "L T 2 H D", "L 2 T H D", "L 2 H T D"],
}

BAD_AXES = {
    "empty": "",
    "no D": "B S H",
    "no H": "B S D",
    "no slots": "L 2 H D",
    "B without S": "B H D",
    "S without B": "S H D",
    "T and S": "T S H D",
    "T and B": "B T H D",
    "T, B and S": "T B S H D",
    "H twice": "B S H H D",
    "D twice": "B S H D D",
    "2 twice": "2 B 2 S H D",
    "T twice": "T T H D",
    "unknown letter": "B S H D X",
    "lower case": "b s h d",
    "a number": "3 B S H D",
    "no spaces": "BSHD",
    "commas": "B,S,H,D",
    "outer part only": "B S H D/4",
    "inner part only": "B S H D%4",
    "chunks differ": "B S H D/4 D%8",
    "outer part twice": "B S H D/4 D/4 D%4",
    "inner part twice": "B S H D/4 D%4 D%4",
    "whole and split": "B S H D D/4 D%4",
    "H split": "B S H/2 D H%2",
    "B split": "B/2 S B%2 H D",
    "L split": "L/2 T H D L%2",
    "2 split": "2/1 2%1 T H D",
    "chunk of 0": "B S H D/0 D%0",
    "chunk with sign": "B S H D/-4 D%-4",
    "chunk missing": "B S H D/ D%",
    "chunk no integer": "B S H D/4.0 D%4.0",
    "minus": "B S H -D",
    "bracket never closed": "B (H D/4 S D%4",
    "bracket never opened": "B H D/4) S D%4",
    "bracket in a bracket": "B ((H D/4)) S D%4",
    "brackets of nothing": "B () S H D",
    "bracket beside a letter": "B S(H D)",
}


@pytest.mark.parametrize("axes", BAD_AXES.values(), ids=BAD_AXES)
def test_bad_axes_are_refused_and_quoted(axes: str) -> None:
    with pytest.raises(ConfigError, match=r"^axes must ") as raised:
        CacheLayout(axes)
    assert repr(axes) in str(raised.value)


def test_layouts_are_equal_when_their_axes_are() -> None:
    assert CacheLayout("B S H D") == CacheLayout("B S H D")
    assert hash(CacheLayout("B S H D")) == hash(CacheLayout("B S H D"))
    assert CacheLayout("B S H D") != CacheLayout("B H S D")
    assert str(CacheLayout("B (H D/4) S D%4")) == "B (H D/4) S D%4"


def test_names_are_the_letters() -> None:
    assert CacheLayout("L 2 T H D").names == {"L", "2", "T", "H", "D"}
    assert CacheLayout("B (H D/4) S/2 D%4 S%2").names == {"B", "H", "S", "D"}


def test_a_layout_cannot_be_changed() -> None:
    layout = CacheLayout("B S H D")
    with pytest.raises(AttributeError):
        layout.axes = "B H S D"  # type: ignore[misc]
    assert layout.axes == "B S H D"


# --- operator numbers ---------------------------------------------------------------------------------------


def test_every_operator_with_numbers_is_in_the_table_above() -> None:
    assert set(OPERATOR_LAYOUTS) == set(NUMBERS)


@pytest.mark.parametrize(
    ("operator", "number", "axes"),
    [(op, n, axes) for op, all_axes in NUMBERS.items() for n, axes in enumerate(all_axes)],
)
def test_operator_number_names_the_axes_of_its_document(operator: str, number: int, axes: str) -> None:
    assert CacheLayout.of(operator, number) == CacheLayout(axes)


@pytest.mark.parametrize("operator", NUMBERS)
@pytest.mark.parametrize("beyond", [-1, 0, 1, 100])
def test_operator_number_out_of_range_is_refused(operator: str, beyond: int) -> None:
    number = -1 if beyond < 0 else len(NUMBERS[operator]) + beyond
    with pytest.raises(
        ArgumentError, match=rf"^cache_layout must be in \[0, {len(NUMBERS[operator])}\).*got {number}"
    ):
        CacheLayout.of(operator, number)


@pytest.mark.parametrize("number", [True, False, 1.0, "0", None])
def test_operator_number_must_be_an_int(number: object) -> None:
    with pytest.raises(ArgumentError, match="cache_layout must be"):
        CacheLayout.of("pmx.KeyValueCache", number)  # type: ignore[arg-type]


def test_unknown_operator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"operator must be one of.*pmx\.KeyValueCache.*got 'pmx\.Cache'"):
        CacheLayout.of("pmx.Cache", 0)


# --- shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("L 2 T H D", (3, 2, 20, 2, 16)),
        ("T L 2 H D", (20, 3, 2, 2, 16)),
        ("B H S D", (5, 2, 4, 16)),
        ("2 B S H D", (2, 5, 4, 2, 16)),
        ("B H D/8 S D%8", (5, 2, 2, 4, 8)),
        ("B (H D/4) S D%4", (5, 8, 4, 4)),
        ("B S (H D)", (5, 4, 32)),
        ("B H S/2 D S%2", (5, 2, 2, 16, 2)),
        ("(L 2) T/5 H T%5 D", (6, 4, 2, 5, 16)),
    ],
)
def test_shape_has_the_extents_of_the_axes(axes: str, shape: tuple[int, ...]) -> None:
    assert CacheLayout(axes).shape(**SIZES) == shape


def test_shape_takes_an_empty_cache() -> None:
    assert CacheLayout("L 2 T H D").shape(L=1, T=0, H=2, D=8) == (1, 2, 0, 2, 8)


@pytest.mark.parametrize("missing", ["L", "T", "H", "D"])
def test_shape_names_a_missing_size(missing: str) -> None:
    sizes = {axis: n for axis, n in SIZES.items() if axis != missing}
    with pytest.raises(ArgumentError, match=rf"sizes must give \['{missing}'\]"):
        CacheLayout("L 2 T H D").shape(**sizes)


@pytest.mark.parametrize(
    ("axes", "axis"), [("B H D/5 S D%5", "D"), ("B H S/3 D S%3", "S"), ("2 T/7 T%7 H D", "T")]
)
def test_shape_refuses_an_axis_that_its_chunk_does_not_divide(axes: str, axis: str) -> None:
    with pytest.raises(ShapeError, match=rf"axis {axis} must be a multiple of"):
        CacheLayout(axes).shape(**SIZES)


# --- scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "scale_axes"),
    [
        ("L 2 T H D", "L 2 T H D"),
        ("B H S D", "B H S D"),
        ("B H D/8 S D%8", "B H S D"),
        ("B H D%8 S D/8", "B H D S"),
        ("B (H D/4) S D%4", "B H S D"),
        ("B S (H D)", "B S (H D)"),
        ("B S (H D/4 D%4)", "B S (H D)"),
        ("B H S/2 D S%2", "B H S/2 D S%2"),
        ("T/2 2 (D/4 H) D%4 T%2", "T/2 2 H D T%2"),
    ],
)
def test_scale_has_the_axes_of_its_cache_with_d_whole(axes: str, scale_axes: str) -> None:
    assert CacheLayout(axes).for_scale() == CacheLayout(scale_axes)


@pytest.mark.parametrize(("last", "element"), [(8, torch.float32), (16, torch.float16), (32, torch.int8)])
def test_fractal_nz_chunks_are_32_bytes(last: int, element: torch.dtype) -> None:
    assert last * element.itemsize == 32
    assert ascend_fractal_nz(last).shape(B=5, S=4, H=2, D=64) == (5, 2 * 64 // last, 4, last)
    assert ascend_fractal_nz(last, merged=False).shape(B=5, S=4, H=2, D=64) == (5, 2, 64 // last, 4, last)


# --- tensors that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        ("B S H D", (5, 4, 2), r"pool must have the axes \[B S H D\], got shape \[5, 4, 2\]"),
        ("B S H D", (5, 4, 2, 16, 1), "pool must have the axes"),
        ("2 B S H D", (3, 5, 4, 2, 16), "pool must have 2 for axis '2'"),
        ("B (2 H) S D", (5, 3, 4, 16), "pool must have 4 for axis '2 H'"),
        ("B H D/8 S D%8", (5, 2, 2, 4, 4), "pool must have 8 for axis 'D%8'"),
        ("B S (H D)", (5, 4, 31), "pool must have a multiple of 2 for axis 'H D'"),
        ("B S H D", (5, 4, 3, 16), "pool must have 2 for axis 'H'"),
    ],
)
def test_tensor_that_does_not_fit_is_refused_by_name(axes: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        CacheLayout(axes).canonical(torch.zeros(shape), name="pool", heads=2)


def test_merged_heads_need_their_number() -> None:
    with pytest.raises(ArgumentError, match=r"heads must be given to take pool"):
        CacheLayout("B S (H D)").canonical(torch.zeros(5, 4, 32), name="pool")
