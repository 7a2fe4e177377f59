"""Views of one layer: the right layer, the right side, the right scale; and errors that name the argument."""

from __future__ import annotations

import pytest
import torch
from core.addresses import address_table
from torch import Tensor

from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView, Side, slot_stride
from kvloom.errors import ArgumentError, ConfigError, KVError, ShapeError

JOINT = CacheLayout("L 2 T H D")
SPLIT = CacheLayout("B S H D")
SIZES = {"L": 3, "B": 2, "S": 4, "T": 8, "H": 2, "D": 8}


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every element is its own offset."""
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def flat(view: Tensor) -> Tensor:
    """A canonical view as ``[slots, H, D]``."""
    return view.flatten(0, 2).flatten(2)


# --- what is viewed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes", ["L 2 T H D", "T L 2 H D", "2 L H T D", "B L 2 S H D", "L B 2 H S D", "B (L 2 H) S/2 D S%2"]
)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_joint_views_the_keys_and_values_of_its_layer(axes: str, layer: int) -> None:
    layout = CacheLayout(axes)
    raw = numbered(*layout.shape(**SIZES))
    kv = KVView.joint(layout, raw, layer=layer, heads=SIZES["H"])
    assert torch.equal(flat(kv.key.cache), address_table(axes, SIZES, layer, 0).float())
    assert kv.value is not None
    assert torch.equal(flat(kv.value.cache), address_table(axes, SIZES, layer, 1).float())
    assert kv.key.scale is kv.value.scale is None


@pytest.mark.parametrize("axes", ["L 2 T H D", "T L 2 H D", "L H T 2 D", "B L 2 S H D"])
@pytest.mark.parametrize("layer", [0, 2])
def test_joint_views_the_codes_and_scales_of_its_layer(axes: str, layer: int) -> None:
    layout = CacheLayout(axes)
    cache = numbered(*layout.shape(**SIZES), dtype=torch.int8)
    scale = numbered(*layout.shape(**{**SIZES, "D": 4}))
    kv = KVView.joint(layout, cache, scale, layer=layer)
    for i, side in enumerate(kv.sides):
        assert side.scale is not None
        assert torch.equal(flat(side.cache), address_table(axes, SIZES, layer, i).to(torch.int8))
        assert torch.equal(flat(side.scale), address_table(axes, {**SIZES, "D": 4}, layer, i).float())


def test_split_views_layer_of_two_tensors() -> None:
    layout = CacheLayout("L B H S D")
    key, value = numbered(3, 2, 2, 4, 8), -numbered(3, 2, 2, 4, 6)
    kv = KVView.split(layout, key, value, layer=2)
    assert kv.value is not None
    assert torch.equal(flat(kv.key.cache), address_table("L B H S D", SIZES, 2).float())
    assert torch.equal(flat(kv.value.cache), -address_table("L B H S D", {**SIZES, "D": 6}, 2).float())


def test_split_takes_sides_of_different_width_dtype_and_bits() -> None:
    key, value = torch.zeros(2, 4, 2, 8, dtype=torch.int8), torch.zeros(2, 4, 2, 8, dtype=torch.uint8)
    kv = KVView.split(
        SPLIT, key, value, torch.zeros(2, 4, 2, 2), torch.zeros(2, 4, 2, 4, dtype=torch.float16)
    )
    assert kv.value is not None
    assert (kv.key.bits, kv.key.group, kv.key.head_dim) == (8, 4, 8)
    assert (kv.value.bits, kv.value.group, kv.value.head_dim) == (4, 4, 16)


def test_split_takes_one_quantized_side() -> None:
    kv = KVView.split(
        SPLIT,
        torch.zeros(2, 4, 2, 8),
        torch.zeros(2, 4, 2, 8, dtype=torch.int8),
        None,
        torch.zeros(2, 4, 2, 1),
    )
    assert kv.key.scale is None and (kv.key.bits, kv.key.group) == (0, 0)
    assert kv.value is not None and kv.value.scale is not None


def test_split_takes_keys_only() -> None:
    kv = KVView.split(SPLIT, torch.zeros(2, 4, 2, 8), None)
    assert kv.value is None
    assert kv.sides == (kv.key,)
    assert kv.tensors == (kv.key.cache, None, None, None)


def test_a_view_is_printed_without_its_elements() -> None:
    codes, scale = torch.zeros(3, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2, 2)
    view = KVView.split(SPLIT, torch.zeros(3, 4, 2, 8), codes, value_scale=scale)
    assert repr(view) == (
        "KVView(key=Side(B=3, S=4, H=2, D=8, torch.float32, on cpu), "
        "value=Side(B=3, S=4, H=2, D=8, codes of 8 bits in groups of 4, on cpu))"
    )


def test_view_says_its_sizes() -> None:
    kv = KVView.joint(CacheLayout("2 B S/2 H S%2 D"), torch.zeros(2, 5, 3, 7, 2, 8))
    assert (kv.num_slots, kv.block_size, kv.num_heads, kv.device.type) == (30, 6, 7, "cpu")


@pytest.mark.parametrize(
    "quant", [None, QuantSpec(8, 4), QuantSpec(4, 2, torch.float32)], ids=["plain", "int8", "int4"]
)
@pytest.mark.parametrize("axes", ["L 2 T H D", "2 B H S D", "2 B (H D/4) S D%4", "2 B S (H D)"])
def test_views_what_a_spec_allocates(axes: str, quant: QuantSpec | None) -> None:
    spec = KVSpec(1, 3, 16, torch.float16, axes, quant)
    cache, scale = spec.empty(8, None if "T" in axes else 4)
    kv = KVView.joint(spec.axes, cache, scale, heads=3)
    assert kv.num_slots == 8
    assert kv.num_heads == 3
    assert kv.key.head_dim == 16
    kv.key.cache.fill_(1)
    assert int(cache.sum()) == cache.numel() // 2


@pytest.mark.parametrize(
    "axes",
    ["B S H D", "B H S D", "B H S/2 D S%2", "B S/2 H S%2 D", "S B H D", "S/2 B S%2 H D", "B H D/4 S D%4"],
)
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_one_stride_is_found_where_it_serves_all_slots(axes: str, blocks: int, size: int) -> None:
    cache = numbered(*CacheLayout(axes).shape(B=blocks, S=size, H=2, D=8))
    x = CacheLayout(axes).canonical(cache)[0, 0]
    first = x[:, :, :, 0, 0, 0].flatten().long()
    steps = set((first[1:] - first[:-1]).tolist())
    assert slot_stride(x) == (steps.pop() if len(steps) == 1 else None)


def test_a_view_lies_apart_from_what_is_before_and_behind_it() -> None:
    room = torch.zeros(64)
    kv = KVView.split("B S H D", room[16:32].view(1, 2, 1, 8), room[32:40].view(1, 2, 1, 4))
    assert kv.lies_apart_from(room[:16], room[40:], torch.zeros(4))
    assert not kv.lies_apart_from(room[:16], room[:17])
    assert not kv.lies_apart_from(room[39:])
    assert not kv.lies_apart_from(room[8:48:39])  # around it: no byte in common, but one may be


def test_a_view_follows_its_memory() -> None:
    """Where a storage moves, the addresses of the view are new ones."""
    cache = torch.zeros(2, 8, 2, 8)
    kv = KVView.joint("2 T H D", cache)
    cache.untyped_storage().resize_(1 << 22)
    assert not kv.lies_apart_from(cache[1, 3:5])


# --- refused ------------------------------------------------------------------------------------------------

CACHE = torch.zeros(3, 2, 8, 2, 8)
CODES = torch.zeros(3, 2, 8, 2, 8, dtype=torch.int8)
PACKED = torch.zeros(3, 2, 8, 2, 4, dtype=torch.uint8)
SCALE = torch.zeros(3, 2, 8, 2, 2)


def scales(groups: int) -> Tensor:
    """Scales of ``groups`` groups in a head vector of 8."""
    return torch.zeros(3, 2, 8, 2, groups)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": SPLIT}, ArgumentError, "layout must have the axis 2"),
        ({"cache": CACHE[0]}, ShapeError, "cache must have the axes"),
        ({"cache": CACHE[:, :1]}, ShapeError, "cache must have 2 for axis '2'"),
        ({"layout": "L 2 T H"}, ConfigError, "^layout's axes must name H, D"),
        ({"layout": 2}, ConfigError, "^layout must be a CacheLayout or its axes, got 2"),
        ({"layer": 3}, ArgumentError, r"^layer must be in \[0, 3\), got 3"),
        ({"layer": -1}, ArgumentError, r"^layer must be in \[0, 3\), got -1"),
        ({"layer": True}, ArgumentError, "^layer must be an int, got True"),
        ({"layer": 1.0}, ArgumentError, "^layer must be an int, got 1.0"),
        ({"heads": 3}, ShapeError, "cache must have 3 for axis 'H'"),
        ({"scale": SCALE}, ShapeError, "cache must be int8 .* where it has a scale, got torch.float32"),
        ({"cache": CODES, "scale": SCALE.double()}, ShapeError, "scale must be one of"),
        ({"cache": CODES, "scale": SCALE.to("meta")}, ShapeError, "scale must be on cpu as cache, got meta"),
        ({"cache": CODES, "scale": SCALE[0]}, ShapeError, "scale must have the axes"),
        ({"cache": CODES, "scale": SCALE[:2]}, ShapeError, "scale must have the axes of cache"),
        ({"cache": CODES, "scale": SCALE[:, :, :7]}, ShapeError, "scale must have the axes of cache"),
        ({"cache": CODES, "scale": SCALE[:, :, :, :1]}, ShapeError, "scale must have the axes of cache"),
        ({"cache": CODES, "scale": SCALE[..., :0]}, ShapeError, "scale must have the axes of cache"),
        ({"cache": CODES, "scale": scales(3)}, ShapeError, "scale must have the axes of cache"),
        ({"cache": CODES, "scale": scales(16)}, ShapeError, "scale must have the axes of cache"),
        (
            {"cache": PACKED, "scale": scales(8)},
            ShapeError,
            "scale must have a group of a multiple of 2 for 4 bits, got 1",
        ),
    ],
)
def test_joint_refuses_what_does_not_fit_by_name(
    arguments: dict[str, object], error: type[KVError], message: str
) -> None:
    with pytest.raises(error, match=message):
        KVView.joint(**{"layout": JOINT, "cache": CACHE, **arguments})  # type: ignore[arg-type]


KEY = torch.zeros(2, 4, 2, 8)
INT8_KEY = KEY.to(torch.int8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": JOINT}, ArgumentError, "layout must not have the axis 2"),
        ({"key": KEY[0]}, ShapeError, "^key must have the axes"),
        ({"value": KEY[0]}, ShapeError, "^value must have the axes"),
        ({"value": KEY[:1]}, ShapeError, "value must have key's blocks, slots, heads and device"),
        ({"value": KEY[:, :3]}, ShapeError, "value must have key's blocks, slots, heads and device"),
        ({"value": KEY[:, :, :1]}, ShapeError, "value must have key's blocks, slots, heads and device"),
        ({"value": KEY.to("meta")}, ShapeError, "value must have key's blocks, slots, heads and device"),
        ({"layer": 1}, ArgumentError, r"^layer must be in \[0, 1\), got 1"),
        ({"value_layout": JOINT}, ArgumentError, "^value_layout must not have the axis 2"),
        ({"value_layout": "B S H"}, ConfigError, "^value_layout's axes must name H, D"),
        ({"key_scale": KEY}, ShapeError, "^key must be int8 "),
        ({"value_scale": KEY}, ShapeError, "^value must be int8 "),
        ({"key": INT8_KEY, "key_scale": KEY[0]}, ShapeError, "^key_scale must have the axes"),
        ({"value": INT8_KEY, "value_scale": KEY[:1]}, ShapeError, "^value_scale must have the axes of value"),
        ({"value": INT8_KEY, "value_scale": KEY.to(torch.int8)}, ShapeError, "^value_scale must be one of"),
        ({"value": None, "value_scale": KEY}, ArgumentError, "value_scale must be None where value is None"),
    ],
)
def test_split_refuses_what_does_not_fit_by_name(
    arguments: dict[str, object], error: type[KVError], message: str
) -> None:
    with pytest.raises(error, match=message):
        KVView.split(**{"layout": SPLIT, "key": KEY, "value": KEY, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (KEY, None, "^key must be a Side, got Tensor"),
        (Side(torch.zeros(2, 4, 1, 2, 1, 8)), KEY, "^value must be a Side, got Tensor"),
        (
            Side(torch.zeros(2, 4, 1, 2, 1, 8)),
            Side(torch.zeros(2, 4, 1, 3, 1, 8)),
            r"^value must have key's blocks, slots, heads and device: \(2, 4, 2\) on cpu, got \(2, 4, 3\)",
        ),
    ],
)
def test_a_view_is_of_sides_that_fit(key: Side, value: Side, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        KVView(key, value)


@pytest.mark.parametrize(
    ("cache", "scale", "message"),
    [
        (KEY, None, "^cache must be \\[B, S/s, s, H, D/d, d\\]"),
        (None, None, "^cache must be a tensor"),
        (KEY[None, None], KEY, "^scale must be \\[B, S/s, s, H, D/d, d\\]"),
        (KEY[None, None], KEY[None, None], "^cache must be int8 "),
        (INT8_KEY[None, None], KEY[None, None, :1], "^scale must have the axes of cache"),
    ],
)
def test_a_side_is_of_tensors_that_fit(cache: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Side(cache, scale)


def test_layouts_may_be_spelled_out() -> None:
    joint, split = KVView.joint("L 2 T H D", CACHE), KVView.split("B S H D", KEY, KEY, value_layout="B S H D")
    assert joint.key.cache.shape == KVView.joint(JOINT, CACHE).key.cache.shape
    assert split.value is not None and split.value.cache.shape == split.key.cache.shape


def test_merged_heads_must_be_said() -> None:
    with pytest.raises(ArgumentError, match="heads must be given to take cache"):
        KVView.joint(CacheLayout("2 B S (H D)"), torch.zeros(2, 3, 4, 16))
