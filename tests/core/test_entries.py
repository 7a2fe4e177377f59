"""What is kept of a token: its tensors and bytes are those that are allocated, under one name everywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvloom.caches.format import CacheFormat, kept_as
from kvloom.caches.tensors.storage import Storage
from kvloom.core.entries import CODES, FLOATS, Codes, Entry, SideFormat
from kvloom.core.specs import CODE_DTYPE, KVSpec, QuantSpec, dtype_name, entry_of
from kvloom.core.spelling import STORAGE, parse_kind
from kvloom.errors import ConfigError

PLAIN = SideFormat(64, "bfloat16")
FULL, SYMMETRIC = (SideFormat(8, "float32", bits, 8, "float16", full_range=bits == 4) for bits in (4, 2))
KINDS = ["auto", "float32", "float16", "int8", "int8:g16", "int4", "int4:g32,rotate=none", "int2", "int2:g4"]


def kept(keys: str, values: str) -> CacheFormat:
    key = CacheFormat(*kept_as("keys", keys, "keys"))
    return CacheFormat(key.dtype, key.quant, values=CacheFormat(*kept_as("values", values, "values")))


@pytest.mark.parametrize(("keys", "values"), list(itertools.product(KINDS, repeat=2)))
def test_bytes_of_an_entry_are_those_of_its_tensors(keys: str, values: str) -> None:
    format = kept(keys, values)
    key, value = torch.empty(1, 3, 0, 64, dtype=torch.bfloat16), torch.empty(1, 3, 0, 128)
    entry = format.entry(entry_of(key, value.bfloat16()))
    storage = Storage.of(format, key, value.bfloat16(), page_size=1)
    storage.reserve(1, 5)
    assert storage.entry == entry
    tensors = [x for x in storage.tensors if x is not None]
    assert [x.untyped_storage().nbytes() for x in tensors] == [x.nbytes for x in tensors]
    assert 5 * entry.nbytes == sum(x.nbytes for x in tensors) == storage.nbytes
    assert 5 * entry.nbytes_scales == sum(x.nbytes for x in tensors[2:] if entry.has_codes)
    codes, scales = storage.tensors[:2], storage.tensors[2:]
    for side, cache, scale in zip(entry.sides, codes, scales, strict=True):
        parts = [x for x in (cache, scale) if x is not None]
        assert [(part.dtype, part.itemsize, part.nbytes) for part in side.parts] == [
            (dtype_name(x.dtype), x.itemsize, x.nbytes // 15) for x in parts
        ]


@pytest.mark.parametrize("codes", list(CODES.values()), ids=list(CODES))
def test_a_kind_of_codes_has_one_name_dtype_and_size(codes: Codes) -> None:
    assert parse_kind("kv", codes.name).bits == codes.bits
    assert str(QuantSpec(codes.bits, 32)).startswith(f"{codes.name}:g32")
    assert QuantSpec(codes.bits, 32).side(64, "float32").kind == f"{codes.name}:g32"
    assert CODE_DTYPE[codes.bits].itemsize == 1
    cache, scale = KVSpec(1, 1, 64, layout="T H D", quant=QuantSpec(codes.bits, 32)).empty(1)
    assert (cache.dtype, cache.shape[-1] * codes.per_byte) == (CODE_DTYPE[codes.bits], 64)
    assert scale is not None
    assert scale.shape[-1] == 2


def test_no_two_kinds_of_codes_have_a_name_a_dtype_or_bits_in_common() -> None:
    for field in ("name", "dtype", "bits"):
        assert len({getattr(codes, field) for codes in CODES.values()}) == len(CODES)
    assert STORAGE == ("auto", *FLOATS, *CODES)
    assert all(getattr(torch, name).itemsize == size for name, size in FLOATS.items())


def test_a_cache_of_keys_only_has_no_bytes_of_values() -> None:
    keys = kept("int8", "float32").entry(Entry(2, PLAIN, None))
    assert keys.sides == (SideFormat(64, "bfloat16", 8, 64, "float16"),)
    assert (keys.nbytes, keys.nbytes_scales) == (2 * (64 + 2), 2 * 2)


@pytest.mark.parametrize("rotation", ["none", "keys", "values", "both"])
def test_codes_alone_are_rotated(rotation: str) -> None:
    codes = SideFormat(64, "bfloat16", 4, 32, "float16")
    rotated = Entry(2, codes, codes).rotated_as(rotation)
    assert [side.rotated for side in rotated.sides] == [rotation in (x, "both") for x in ("keys", "values")]
    assert Entry(2, PLAIN, PLAIN).rotated_as(rotation) == Entry(2, PLAIN, PLAIN)
    assert Entry(2, codes, None).rotated_as(rotation).value is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SideFormat(True, "float32"), "head_dim must be a positive int, got True"),
        (lambda: SideFormat(2**31, "float32"), "head_dim must be a positive int, got 2147483648"),
        (lambda: SideFormat(4, "int4"), "dtype must be one of .*, got 'int4'"),
        (lambda: SideFormat(4, "float32", True), "bits must be 0, 8, .*, got True"),
        (lambda: SideFormat(4, "float32", rotated=True), "group must be 0 without codes, .*, got 0 '' True"),
        (lambda: SideFormat(4, "float32", 8, 2, "float16", 1), "rotated must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: SideFormat(4, "float32", 4, 1, "float16"), "group must divide head_dim 4 in bytes, got 1"),
        (lambda: SideFormat(4, "float32", 8, 2), "scale_dtype must be one of .*, got ''"),
        (lambda: Entry(1, None, PLAIN), "key must be a SideFormat, got None"),  # type: ignore[arg-type]
        (lambda: Entry(1, PLAIN, 0), "value must be a SideFormat, got 0"),  # type: ignore[arg-type]
        (lambda: Entry(1, FULL, SYMMETRIC), "full_range must be that of the keys, True, for values, too"),
        (lambda: Entry(1, SYMMETRIC, FULL), "full_range must be that of the keys, False, for values, too"),
        (lambda: KVSpec(1, 1, 4, torch.float64).side, "dtype must be one of .*, got 'float64'"),
    ],
)
def test_what_is_no_entry_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make()
