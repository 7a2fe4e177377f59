"""Any layout to any other: the way back gives the same bytes, and each element is where its layout says."""

from __future__ import annotations

import itertools

import pytest
import torch
from core.addresses import address_table
from core.test_layout_addresses import random_axes
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import assert_same_bits, generator, poison
from torch import Tensor

import kvloom
from kvloom import KVTensors, Placement, convert
from kvloom.core.layouts import CacheLayout
from kvloom.errors import ArgumentError, ConfigError, ShapeError
from kvloom.layouts import LAYOUTS, find_layout
from kvloom.layouts.conversion import plan

LAYERS, SLOTS, HEADS, DIM = 2, 64, 8, 64
KINDS = ("float16", "float32", "int8", "int4", "float8")
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "int4": torch.uint8,
    "float8": torch.float8_e4m3fn,
}


def made(kind: str, layout: str = "L 2 T H D", groups: int = 4) -> KVTensors:
    """Random bytes in a joint layout of all tokens."""
    rng = generator(hash_of(kind))
    dim = DIM // 2 if kind == "int4" else DIM
    tensors = {"cache": poison((LAYERS, 2, SLOTS, HEADS, dim), DTYPES[kind], rng)}
    if kind.startswith("int"):
        tensors["scale"] = poison((LAYERS, 2, SLOTS, HEADS, groups), torch.float16, rng)
    return KVTensors(tensors, layout)


def hash_of(kind: str) -> int:
    return KINDS.index(kind)


def placement(name: str, page_size: int, shards: int) -> Placement:
    paged = "B" in find_layout("layout", name).of("key", 1).names
    return Placement(name, page_size if paged else None, shards)


def assert_same(x: KVTensors, y: KVTensors) -> None:
    assert x.tensors.keys() == y.tensors.keys()
    for name in x.tensors:
        assert_same_bits(x.tensors[name], y.tensors[name], name)


def test_there_are_at_least_14_named_layouts() -> None:
    assert len(LAYOUTS) >= 14 and len({layout.axes for layout in LAYOUTS.values()}) >= 14


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_ordered_pair_goes_there_and_back(name: str, kind: str) -> None:
    first = convert(made(kind), placement(name, 16, 1))
    for other in LAYOUTS:
        there = convert(first, placement(other, 32, 2))
        assert_same(convert(there, placement(name, 16, 1)), first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "shards"), [(16, 1), (32, 2), (64, 4), (16, 8)])
def test_page_sizes_and_shards_go_there_and_back(kind: str, page_size: int, shards: int) -> None:
    first = made(kind)
    for name in ("vllm", "ascend_nz", "vllm_paged", "pmx_static_1", "kvloom_native"):
        there = convert(first, placement(name, page_size, shards))
        assert (there.num_shards, there.page_size) == (shards, page_size)
        onward = convert(there, placement("flashinfer_hnd", 256 // page_size, 2))
        assert_same(convert(onward, "L 2 T H D"), first)


def test_pages_need_not_nest() -> None:
    rng = generator(3)
    first = KVTensors({"cache": poison((2, 3, 16, HEADS, 32), torch.float16, rng)}, "vllm")
    there = convert(first, Placement("ascend", 24))
    assert there.tensors["key"].shape == (2, 24, HEADS, 32)
    assert_same_bits(there.tensors["key"].flatten(0, 1), first.tensors["cache"][0].flatten(0, 1), "key")
    assert_same(convert(there, Placement("vllm", 16)), first)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_is_at_the_address_of_plain_counting(name: str) -> None:
    source = made("float16")
    target = convert(source, placement(name, 16, 1))
    layout = LAYOUTS[name]
    sizes = {"L": LAYERS, "B": SLOTS // 16, "S": 16, "T": SLOTS, "H": HEADS, "D": DIM}
    for layer, side in itertools.product(range(LAYERS), range(2)):
        role = "cache" if layout.is_joint else ("key", "value")[side]
        axes = layout.of(role, 2)
        front = "" if "L" in axes.names else f"layers.{layer}."
        where = address_table(axes.axes, sizes, layer, side)
        got = target.tensors[front + role].flatten()[where]
        assert_same_bits(got, source.tensors["cache"][layer, side], f"{layer} {side}")


@given(random_axes(), random_axes(), st.sampled_from([4, 8, 12]), st.sampled_from([1, 2]))
def test_layouts_that_nobody_named_go_there_and_back(a: str, b: str, page_size: int, shards: int) -> None:
    rng = generator(len(a) * 31 + len(b))
    key, value = (poison((24, 2, 8), torch.float32, rng) for _ in range(2))
    first = KVTensors({"key": key, "value": value}, "T H D")
    there = convert(first, placement(a, page_size, 1))
    onward = convert(there, placement(b, 24 // page_size * 4, shards))
    assert_same(convert(onward, "T H D"), first)


@given(random_axes())
def test_given_tensors_with_any_strides_are_written_and_nothing_beside_them(axes: str) -> None:
    layout = CacheLayout(axes)
    sizes = {"L": 1, "T": 24, "B": 3, "S": 8, "H": 2, "D": 8}
    shape = layout.shape(**sizes)
    wide = torch.full([n + 2 for n in shape], 7.0)
    hole = wide[tuple(slice(1, n + 1) for n in shape)]
    role = "cache" if "2" in layout.names else "key"
    lead = (2, 24, 2, 8) if role == "cache" else (24, 2, 8)
    source = KVTensors({role: torch.randn(lead)}, "2 T H D" if role == "cache" else "T H D")
    target = KVTensors({role: hole}, axes, heads=2)
    assert convert(source, target) is target
    assert_same(convert(target, source.layout), source)
    hole.fill_(7.0)
    assert bool((wide == 7.0).all())


def test_keys_alone_are_converted() -> None:
    source = KVTensors({"key": torch.randn(4, 16, 1, 576)}, "ascend")
    target = convert(source, Placement("ascend_nz", 32))
    assert target.tensors["key"].shape == (2, 72, 32, 8)
    assert_same(convert(target, Placement("ascend", 16)), source)


def test_the_plan_has_one_copy_for_each_layer_and_pair_of_shards_that_meet() -> None:
    first = convert(made("float16"), Placement("vllm", 16, 2))
    assert len(plan(first, convert(first, Placement("vllm", 16, 8)))) == LAYERS * 8
    assert len(plan(first, convert(first, Placement("vllm", 16, 1)))) == LAYERS * 2


def test_public_names_are_these() -> None:
    assert kvloom.convert is convert and kvloom.Placement is Placement


def cache(**tensors: Tensor) -> KVTensors:
    return KVTensors(tensors, "ascend")


HALF, CODES = torch.zeros(2, 16, 4, 32).half(), torch.zeros(2, 16, 4, 32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (cache(key=HALF, value=CODES), "vllm", "must be alike: a key has 32 float16, a value 32 int8"),
        (cache(key=HALF, value=HALF[..., :16]), "vllm", "a key has 32 float16, a value 16 float16"),
        (cache(key=HALF), "vllm", "a key has 32 float16, a value nothing"),
        (cache(key=HALF), Placement("ascend", 24), "page_size must divide the 32 slots of source"),
        (cache(key=HALF), Placement("ascend", 16, 8), "shards must divide the 4 heads of source, got 8"),
        (cache(key=HALF), Placement("T H D", 16), "page_size must be None for layout 'T H D'"),
        (cache(key=HALF[..., :24]), "ascend_nz", "D must be a multiple of 16, got 24"),
        (cache(key=HALF), Placement("kvloom_native", 8), "S must be a multiple of 16, got 8"),
        (KVTensors({"key": HALF[0]}, "T H D"), "ascend", "page_size must be given for layout 'ascend'"),
        (
            KVTensors({"layers.0.key": HALF, "layers.1.key": CODES}, "ascend"),
            "L B S H D",
            "holds all layers in one tensor, so they must be alike: layer 1 has 32 int8, layer 0 32 float16",
        ),
        (
            cache(key=HALF),
            cache(key=CODES),
            "each key in layer 0 of target must have 32 float16, as in source, got 32 int8",
        ),
        (cache(key=HALF), cache(key=torch.zeros(3, 16, 4, 32).half()), "the slots of source, 32, got 48"),
        (cache(key=HALF), cache(key=HALF), "target's key must not overlap source's key"),
        (
            cache(**{"shards.0.key": HALF, "shards.1.key": CODES}),
            Placement("ascend", shards=2),
            "each key in layer 0 of target must have 32 int8, as in source, got 32 float16",
        ),
        (cache(key=HALF), "nowhere", "target must be axes such as"),
    ],
)
def test_what_cannot_be_lossless_is_refused(
    source: KVTensors, target: KVTensors | Placement | str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        convert(source, target)


@pytest.mark.parametrize(
    ("tensors", "layout", "message"),
    [
        ({}, "ascend", "tensors must hold at least one"),
        ({"keys": HALF}, "ascend", r"named \[layers.N.\]\[shards.N.\] and key, value.* got 'keys'"),
        ({"cache": HALF}, "ascend", "got 'cache'"),
        ({"layers.0.cache": HALF}, "L 2 T H D", "got 'layers.0.cache'"),
        ({"value": HALF}, "ascend", "tensors must have key in layout 'ascend'"),
        ({"layers.1.key": HALF}, "ascend", r"got 2 layers, 1 shards without layers.0.\*"),
        ({"layers.00.key": HALF}, "ascend", "got 'layers.00.key'"),
        ({"key": HALF, "layers.0.key": HALF}, "ascend", "one name each"),
        ({"key": HALF, "value": HALF[:1]}, "ascend", "value must have key's blocks"),
        ({"shards.0.key": HALF, "shards.1.key": HALF[:, :, :2]}, "ascend", "the same pages, slots, heads"),
        ({"key": HALF, "key_scale": HALF}, "ascend", "must be int8 "),
        ({"key": [1]}, "ascend", "key must be a tensor"),
        ({"key": HALF.flatten(2)}, "onnx", "heads must be given"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Tensor], layout: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVTensors(tensors, layout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vllm", 0), "page_size must be at least 1, got 0"),
        (("vllm", True), "page_size must be an int, got True"),
        (("vllm", 16, 9), r"shards must be in \[1, 9\), got 9"),
        ((3,), "layout must be axes"),
        (("2 B S H D | B S H D",), "must not have the axis 2"),
    ],
)
def test_bad_placements_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Placement(*arguments)  # type: ignore[arg-type]


def test_axes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="axes must be made of"):
        find_layout("layout", "A B C")


def test_a_source_that_is_a_plain_dictionary_is_refused() -> None:
    with pytest.raises(ArgumentError, match="source must be KVTensors, got dict"):
        convert({"key": HALF}, "vllm")  # type: ignore[arg-type]


def test_a_target_that_overlaps_is_left_as_it_was() -> None:
    pages = torch.randn(2, 16, 4, 32)
    before = pages.clone()
    with pytest.raises(ShapeError):
        convert(cache(key=pages), cache(key=pages.flip(0).flip(0)[:1]))
    assert torch.equal(pages, before)


def test_latents_and_rope_keys_are_keys_and_values_of_one_head() -> None:
    ckv, kpe = torch.randn(3, 16, 512), torch.randn(3, 16, 64)
    source = KVTensors({"key": ckv, "value": kpe}, "flashinfer_mla", heads=1)
    target = convert(source, "hugging_face").tensors
    assert torch.equal(target["key"], ckv.unsqueeze(1)) and torch.equal(target["value"], kpe.unsqueeze(1))
    back = convert(KVTensors(target, "hugging_face"), "flashinfer_mla").tensors
    assert torch.equal(back["key"], ckv) and torch.equal(back["value"], kpe)
