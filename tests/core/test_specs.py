"""Shapes, bytes and fingerprints of cache specifications."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from core.addresses import extents

from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.errors import ArgumentError, ConfigError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTS = [None, *(QuantSpec(b, g, t) for b, g, t in itertools.product((8, 4), (2, 8, 16), FLOATS))]
TOKEN_AXES = ["L 2 T H D", "T L 2 H D", "2 L H T D", "L 2 T/4 H D T%4"]
BLOCK_AXES = ["B L 2 S H D", "B 2 H S D", "B H D/8 S D%8", "B (H D/8) S D%8", "B H S/2 D S%2", "B S (H D)"]


def stored_bytes(spec: KVSpec, num_tokens: int, block_size: int | None) -> int:
    """Bytes of storage behind what ``empty`` returns."""
    return sum(x.untyped_storage().nbytes() for x in spec.empty(num_tokens, block_size) if x is not None)


@pytest.mark.parametrize("axes", [*TOKEN_AXES, *BLOCK_AXES])
def test_nbytes_is_what_empty_allocates(axes: str) -> None:
    block_size = 4 if "B" in axes else None
    for quant, dtype, heads, head_dim in itertools.product(QUANTS, FLOATS, (1, 3), (16, 64)):
        for num_tokens in (0, 4, 24):
            spec = KVSpec(2 if "L" in axes else 1, heads, head_dim, dtype, axes, quant)
            assert spec.nbytes(num_tokens, block_size) == stored_bytes(spec, num_tokens, block_size), spec


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64, torch.uint16])
def test_nbytes_counts_any_dtype(dtype: torch.dtype) -> None:
    spec = KVSpec(1, 2, 16, dtype)
    assert spec.nbytes(3) == 3 * 2 * 2 * 16 * dtype.itemsize == stored_bytes(spec, 3, None)


@pytest.mark.parametrize(
    ("bits", "group", "scale_dtype", "bytes_per_element"),
    [(8, 64, torch.float16, 1.03125), (8, 8, torch.float16, 1.25), (8, 8, torch.float32, 1.5),
     (4, 8, torch.float16, 0.75), (4, 32, torch.bfloat16, 0.5625),
     (2, 64, torch.float16, 0.28125)],
)  # fmt: skip
def test_bytes_of_an_element_are_as_documented(
    bits: int, group: int, scale_dtype: torch.dtype, bytes_per_element: float
) -> None:
    spec = KVSpec(1, 1, 64, quant=QuantSpec(bits, group, scale_dtype))
    assert spec.nbytes(100) == 2 * 64 * 100 * bytes_per_element


@pytest.mark.parametrize("axes", [*TOKEN_AXES, *BLOCK_AXES])
@pytest.mark.parametrize(
    "quant",
    [None, QuantSpec(8, 4, torch.float32), QuantSpec(4, 4), QuantSpec(2, 4)],
    ids=["plain", "int8", "int4", "int2"],
)
def test_empty_is_zero_and_has_shape_and_dtype(axes: str, quant: QuantSpec | None) -> None:
    layers, block_size = (2 if "L" in axes else 1), (4 if "B" in axes else None)
    head_dim = 32 if quant and quant.bits == 2 else 16  # at least the 8 stored elements of a chunk
    spec = KVSpec(layers, 3, head_dim, torch.bfloat16, axes, quant)
    cache, scale = spec.empty(12, block_size)
    sizes = {
        "L": layers,
        "H": 3,
        "T": 12,
        "B": 3,
        "S": 4,
        "D": head_dim * quant.bits // 8 if quant else head_dim,
    }
    assert spec.shapes(12, block_size) == (tuple(cache.shape), None if scale is None else tuple(scale.shape))
    assert list(cache.shape) == extents(axes, sizes)
    assert cache.dtype == spec.cache_dtype
    dtypes = {None: torch.bfloat16, 8: torch.int8, 4: torch.uint8, 2: torch.bits2x4}
    assert cache.dtype == dtypes[quant and quant.bits]
    assert not cache.view(torch.uint8).any()
    if quant is None:
        assert scale is None
        return
    assert scale is not None
    assert list(scale.shape) == extents(str(spec.axes.for_scale()), {**sizes, "D": head_dim // 4})
    assert scale.dtype == quant.scale_dtype
    assert not scale.any()


def test_empty_uses_the_device() -> None:
    cache, scale = KVSpec(1, 2, 16, quant=QuantSpec(8, 8)).empty(4, device="meta")
    assert scale is not None
    assert cache.device.type == scale.device.type == "meta"


def test_layout_may_be_axes() -> None:
    assert KVSpec(1, 2, 16, layout="B S H D") == KVSpec(1, 2, 16, layout=CacheLayout("B S H D"))
    assert KVSpec(1, 2, 16, layout="B S H D").axes == CacheLayout("B S H D")


# --- fingerprint --------------------------------------------------------------------------------------------

BASE = KVSpec(2, 4, 64, torch.float16, "L 2 T H D", QuantSpec(8, 32, torch.float16))
OTHER = {
    "layers": 3,
    "heads": 8,
    "head_dim": 32,
    "dtype": torch.bfloat16,
    "layout": "L 2 H T D",
    "quant": None,
    "bits": 4,
    "group": 64,
    "scale_dtype": torch.float32,
    "rotated": True,
    "full_range": True,
}


@pytest.mark.parametrize("name", [f.name for kind in (KVSpec, QuantSpec) for f in dataclasses.fields(kind)])
def test_every_field_is_in_the_fingerprint(name: str) -> None:
    base = dataclasses.replace(BASE, quant=QuantSpec(4, 32)) if name == "full_range" else BASE
    if name in {f.name for f in dataclasses.fields(KVSpec)}:
        changed = dataclasses.replace(base, **{name: OTHER[name]})
    else:
        changed = dataclasses.replace(base, quant=dataclasses.replace(base.quant, **{name: OTHER[name]}))
    assert changed != base
    assert changed.fingerprint() != base.fingerprint()


def test_equal_specs_have_one_fingerprint_of_64_hex_digits() -> None:
    same = KVSpec(2, 4, 64, torch.float16, CacheLayout("L 2 T H D"), QuantSpec(8, 32, torch.float16))
    assert same.fingerprint() == BASE.fingerprint()
    assert len(bytes.fromhex(BASE.fingerprint())) == 32


def test_fingerprint_is_stable() -> None:
    """What is written to disk today must be found tomorrow."""
    plain = KVSpec(1, 1, 1, torch.float32, "T H D")
    assert plain.fingerprint() == "1f57884e1750c2d8fbf1c1bf7b334fb1944a973cc7624621be75c73d6e9ab016"
    assert BASE.fingerprint() == "a2086438d23bb13cbea3bca98d1045165c73d4018053979e31d0fa769c3b2020"


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be 8, .*, got 5"),
        ({"bits": 0}, "bits must be"),
        ({"bits": None}, "bits must be"),
        ({"group": 0}, "group must be a positive int, got 0"),
        ({"group": -8}, "group must be a positive int"),
        ({"group": 8.0}, "group must be a positive int"),
        ({"group": True}, "group must be a positive int"),
        ({"bits": 2, "group": 6}, "group must be a multiple of 4 for 2 bits, got 6"),
        ({"bits": 4, "group": 7}, "group must be a multiple of 2 for 4 bits, got 7"),
        ({"scale_dtype": torch.float64}, "scale_dtype must be one of"),
        ({"scale_dtype": torch.int8}, "scale_dtype must be one of"),
        ({"rotated": 1}, "rotated must be a bool, got 1"),
    ],
    ids=str,
)
def test_bad_quantization_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantSpec(**{"bits": 8, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: value}, f"{name} must be a positive int") for name in ("layers", "heads", "head_dim")
          for value in (0, -1, 1.0, True, None, "2")),
        ({"layers": 2, "layout": "B S H D"}, "layers must be 1 for layout 'B S H D', got 2"),
        ({"layout": "B S H"}, "layout's axes must name H, D"),
        ({"layout": 3}, "layout must be a CacheLayout or its axes, got 3"),
        ({"head_dim": 60, "layout": "B H D/8 S D%8"},
         "head_dim must be a multiple of 8 for layout 'B H D/8 S D%8', got 60"),
        ({"head_dim": 24, "layout": "B H D/8 S D%8", "quant": QuantSpec(4, 8)},
         "head_dim must be a multiple of 16 for layout 'B H D/8 S D%8', got 24"),
        ({"head_dim": 60, "quant": QuantSpec(8, 8)}, "head_dim must be a multiple of group 8, got 60"),
        ({"head_dim": 7, "quant": QuantSpec(8, 7, rotated=True)}, "head_dim must be even to be rotated, got"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_spec_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVSpec(**{"layers": 1, "heads": 2, "head_dim": 64, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axes", "num_tokens", "block_size", "message"),
    [
        ("L 2 T H D", -1, None, "num_tokens must be at least 0, got -1"),
        ("L 2 T H D", 8, 4, "block_size must be None for layout 'L 2 T H D', got 4"),
        ("B S H D", 8, None, "block_size must divide num_tokens 8, got None"),
        ("B S H D", 8, 3, "block_size must divide num_tokens 8, got 3"),
        ("B S H D", 8, 0, "block_size must divide"),
        ("B S H D", 8, -4, "block_size must divide"),
        ("B S/4 S%4 H D", 6, 3, "^block_size must be a multiple of 4 for layout 'B S/4 S%4 H D', got 3"),
        ("T/4 T%4 H D", 6, None, "^num_tokens must be a multiple of 4 for layout 'T/4 T%4 H D', got 6"),
    ],
)
def test_token_count_that_does_not_fit_is_refused_by_name(
    axes: str, num_tokens: int, block_size: int | None, message: str
) -> None:
    spec = KVSpec(1, 2, 16, layout=axes)
    for call in (spec.shapes, spec.nbytes, spec.empty):
        with pytest.raises(ArgumentError, match=message):
            call(num_tokens, block_size)
