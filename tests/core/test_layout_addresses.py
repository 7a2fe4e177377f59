"""Every layout puts every element where its document says: canonical views against plain index arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from core.addresses import address_table, extents
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import bits
from torch import Tensor

from kvloom.core import layouts
from kvloom.core.layouts import CacheLayout

L, B, S, H, D = 2, 3, 4, 2, 8
SIZES = {"L": L, "B": B, "S": S, "T": B * S, "H": H, "D": D}
Index = Callable[[int, int, int, int, int, int], "int | tuple[int, ...]"]


def fractal_nz(blk: int, off: int, h: int, d: int, last: int) -> int:
    """Offset of one element in ``[blocks, H * D / last, S, last]``."""
    j = h * D + d
    return blk * S * (H * D) + (j // last) * S * last + off * last + j % last


# Layout, and the index into the raw tensor of (layer, key|value, block, slot in block, head, element).
NAMED: dict[str, tuple[CacheLayout, Index]] = {
    "pmx static 0": (layouts.PMX_STATIC[0], lambda la, c, b, s, h, d: (b, la, c, s, h, d)),
    "pmx static 1": (layouts.PMX_STATIC[1], lambda la, c, b, s, h, d: (la, b, c, h, s, d)),
    "pmx dynamic 0": (layouts.PMX_DYNAMIC[0], lambda la, c, b, s, h, d: (b * S + s, la, c, h, d)),
    "pmx dynamic 1": (layouts.PMX_DYNAMIC[1], lambda la, c, b, s, h, d: (la, b * S + s, c, h, d)),
    "pmx dynamic 2": (layouts.PMX_DYNAMIC[2], lambda la, c, b, s, h, d: (la, c, b * S + s, h, d)),
    "pmx dynamic 3": (layouts.PMX_DYNAMIC[3], lambda la, c, b, s, h, d: (la, c, h, b * S + s, d)),
    "pmx attention 0": (layouts.PMX_ATTENTION[0], lambda la, c, b, s, h, d: (b * S + s, la, c, h, d)),
    "pmx attention 1": (layouts.PMX_ATTENTION[1], lambda la, c, b, s, h, d: (la, b * S + s, c, h, d)),
    "pmx attention 2": (layouts.PMX_ATTENTION[2], lambda la, c, b, s, h, d: (la, h, b * S + s, c, d)),
    "pmx attention 3": (layouts.PMX_ATTENTION[3], lambda la, c, b, s, h, d: (c, la, h, b * S + s, d)),
    "hugging face": (layouts.HUGGING_FACE, lambda la, c, b, s, h, d: (b, h, s, d)),
    "vllm": (CacheLayout("2 B S H D"), lambda la, c, b, s, h, d: (c, b, s, h, d)),
    "vllm, heads first": (CacheLayout("2 B H S D"), lambda la, c, b, s, h, d: (c, b, h, s, d)),
    "vllm old keys": (CacheLayout("B H D/8 S D%8"), lambda la, c, b, s, h, d: (b, h, d // 8, s, d % 8)),
    "vllm on GPUs": (CacheLayout("B S H 2 D"), lambda la, c, b, s, h, d: (b, s, h, c, d)),
    "vllm on CPUs, tiles of keys": (
        CacheLayout("B H S/2 D/2 S%2 D%2"),
        lambda la, c, b, s, h, d: (b, h, s // 2, d // 2, s % 2, d % 2),
    ),
    "vllm on CPUs, tiles of values": (
        CacheLayout("B H D/4 S/2 D%4 S%2"),
        lambda la, c, b, s, h, d: (b, h, d // 4, s // 2, d % 4, s % 2),
    ),
    "flashinfer NHD": (layouts.FLASHINFER_NHD, lambda la, c, b, s, h, d: (b, c, s, h, d)),
    "flashinfer HND": (layouts.FLASHINFER_HND, lambda la, c, b, s, h, d: (b, c, h, s, d)),
    "ascend norm": (layouts.ASCEND_NORM, lambda la, c, b, s, h, d: (b, s, h, d)),
    "fractal nz 8": (layouts.ascend_fractal_nz(8), lambda la, c, b, s, h, d: fractal_nz(b, s, h, d, 8)),
    "fractal nz 4": (layouts.ascend_fractal_nz(4), lambda la, c, b, s, h, d: fractal_nz(b, s, h, d, 4)),
    "fractal nz 2": (layouts.ascend_fractal_nz(2), lambda la, c, b, s, h, d: fractal_nz(b, s, h, d, 2)),
    "fractal nz 5-D": (
        layouts.ascend_fractal_nz(4, merged=False),
        lambda la, c, b, s, h, d: fractal_nz(b, s, h, d, 4),
    ),
    "split D": (CacheLayout("B H D/4 S D%4"), lambda la, c, b, s, h, d: (b, h, d // 4, s, d % 4)),
    "split S": (CacheLayout("B H S/4 D S%4"), lambda la, c, b, s, h, d: (b, h, s // 4, d, s % 4)),
    "split S in two": (CacheLayout("B H S/2 D S%2"), lambda la, c, b, s, h, d: (b, h, s // 2, d, s % 2)),
    "split S and D": (
        CacheLayout("B S%2 H D%4 S/2 D/4"),
        lambda la, c, b, s, h, d: (b, s % 2, h, d % 4, s // 2, d // 4),
    ),
    "split T": (
        CacheLayout("2 T/2 L H T%2 D"),
        lambda la, c, b, s, h, d: (c, (b * S + s) // 2, la, h, (b * S + s) % 2, d),
    ),
    "merged tokens": (CacheLayout("L 2 B S (H D)"), lambda la, c, b, s, h, d: (la, c, b, s, h * D + d)),
    "merged swapped": (CacheLayout("B S (D H)"), lambda la, c, b, s, h, d: (b, s, d * H + h)),
    "merged sides": (CacheLayout("B (2 H) S D"), lambda la, c, b, s, h, d: (b, c * H + h, s, d)),
}


def by_element(view: Tensor) -> Tensor:
    """A copy of a canonical view as ``[L, 2, B, S, H, D]``."""
    return view.flatten(3, 4).flatten(5, 6)


def positions(layout: CacheLayout) -> list[tuple[int, int, int, int, int, int]]:
    """Every (layer, side, block, slot, head, element) that ``layout`` holds."""
    wanted = (L if "L" in layout.names else 1, 2 if "2" in layout.names else 1, B, S, H, D)
    return [tuple(at) for at in torch.cartesian_prod(*map(torch.arange, wanted)).tolist()]


def numbered(layout: CacheLayout) -> Tensor:
    """A raw tensor in which every element is its own row-major offset."""
    shape = layout.shape(**SIZES)
    return torch.arange(torch.Size(shape).numel()).view(shape)


def at_canonical(layout: CacheLayout, la: int, c: int, b: int, s: int, h: int, d: int) -> tuple[int, ...]:
    """(layer, side, block, slot, head, element) as an index into the canonical view of ``layout``."""
    if "T" in layout.names:
        b, s = 0, b * S + s
    chunk = {term.axis: term.chunk for dim in layout.dims for term in dim if term.part == "%"}
    inner_s, inner_d = chunk.get("S", chunk.get("T", 1)), chunk.get("D", D)
    return la, c, b, s // inner_s, s % inner_s, h, d // inner_d, d % inner_d


@pytest.mark.parametrize("name", NAMED)
def test_each_element_of_the_view_is_at_its_documented_address(name: str) -> None:
    layout, index = NAMED[name]
    raw = numbered(layout)
    view = layout.canonical(raw, heads=H)
    for at in positions(layout):
        place = index(*at)
        expected = place if isinstance(place, int) else int(raw[place])
        assert int(view[at_canonical(layout, *at)]) == expected, f"{at}"


@pytest.mark.parametrize("name", NAMED)
def test_a_write_reaches_its_documented_address_and_no_other(name: str) -> None:
    layout, index = NAMED[name]
    for at in positions(layout)[::13]:
        raw = numbered(layout)
        layout.canonical(raw, heads=H)[at_canonical(layout, *at)] = -1
        place = index(*at)
        offset = place if isinstance(place, int) else int(numbered(layout)[place])
        assert (raw.flatten() != numbered(layout).flatten()).nonzero().tolist() == [[offset]]


@pytest.mark.parametrize("name", NAMED)
def test_view_has_eight_axes_and_shares_memory(name: str) -> None:
    layout, _ = NAMED[name]
    raw = numbered(layout)
    view = layout.canonical(raw, heads=H)
    assert view.ndim == 8
    assert view.numel() == raw.numel()
    assert view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()


def test_axis_without_a_split_is_one_chunk() -> None:
    assert CacheLayout("B H S D").canonical(torch.zeros(B, H, S, D)).shape == (1, 1, B, S, 1, H, 1, D)


def test_axis_with_a_split_is_chunks() -> None:
    view = CacheLayout("B H S/2 D/4 S%2 D%4").canonical(torch.zeros(B, H, S // 2, D // 4, 2, 4))
    assert view.shape == (1, 1, B, S // 2, 2, H, D // 4, 4)


def test_token_layout_is_one_block() -> None:
    assert CacheLayout("L 2 T H D").canonical(torch.zeros(L, 2, 12, H, D)).shape == (L, 2, 1, 12, 1, H, 1, D)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("how", ["slice", "step", "transpose"])
def test_non_contiguous_tensor_is_viewed_with_its_own_strides(name: str, how: str) -> None:
    layout, _ = NAMED[name]
    values = numbered(layout)
    if how == "slice":
        raw = torch.full([n + 3 for n in values.shape], -1)[tuple(slice(1, n + 1) for n in values.shape)]
    elif how == "step":
        raw = torch.full([2 * n for n in values.shape], -1)[tuple(slice(None, None, 2) for _ in values.shape)]
    else:
        raw = torch.full(values.shape[::-1], -1).permute(*reversed(range(values.ndim)))
    raw.copy_(values)
    view = layout.canonical(raw, heads=H)
    assert view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    assert torch.equal(by_element(view), by_element(layout.canonical(values, heads=H)))


@st.composite
def random_axes(draw: st.DrawFn) -> str:
    """Axes in any order, some split, some neighbors merged into one dimension."""
    words = [a for a in ("L", "2") if draw(st.booleans())]
    words += draw(
        st.sampled_from([["T"], ["B", "S"], ["T/2", "T%2"], ["B", "S/2", "S%2"], ["B", "S/4", "S%4"]])
    )
    words += ["H", *draw(st.sampled_from([["D"], ["D/2", "D%2"], ["D/4", "D%4"], ["D/8", "D%8"]]))]
    words = draw(st.permutations(words))
    dims: list[list[str]] = []
    for word in words:
        free = [w for w in (dims[-1] if dims else []) if w not in "2H" and "%" not in w]
        unknown = word not in "2H" and "%" not in word
        if dims and draw(st.booleans()) and not (free and unknown):
            dims[-1].append(word)
        else:
            dims.append([word])
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


@given(random_axes())
def test_any_axis_order_gives_the_addresses_of_plain_counting(axes: str) -> None:
    layout = CacheLayout(axes)
    assert list(layout.shape(**SIZES)) == extents(axes, SIZES)
    view = layout.canonical(numbered(layout), heads=H)
    num_layers, num_sides = (extent if axis in layout.names else 1 for axis, extent in (("L", L), ("2", 2)))
    for layer in range(num_layers):
        for side in range(num_sides):
            got = by_element(view)[layer, side].flatten(0, 1)
            assert torch.equal(got, address_table(axes, SIZES, layer, side)), f"layer {layer} side {side}"


@given(random_axes())
def test_any_axis_order_keeps_every_byte(axes: str) -> None:
    layout = CacheLayout(axes)
    raw = torch.randint(0, 256, layout.shape(**SIZES), dtype=torch.uint8)
    ordered = bits(by_element(layout.canonical(raw, heads=H))).flatten().sort().values
    assert torch.equal(ordered, raw.flatten().sort().values)
