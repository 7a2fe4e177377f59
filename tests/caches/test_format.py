"""In which order pages are kept, and that nothing but speed depends on it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core.spellings import BAD, ODD
from oracles.bits import assert_same_bits, generator

from kvloom import KVSpec, QuantSpec, ops
from kvloom.caches import CacheFormat, PagedLayer, PrefixCache, Sequences, memory
from kvloom.caches.format import PAGE_LAYOUTS, is_in_rows, kept_as, page_layout
from kvloom.caches.tensors.storage import Storage
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES
from kvloom.errors import ArgumentError, ConfigError

CPU = torch.device("cpu")
HUGE = 2 << 20
INT8, INT4 = QuantSpec(8, 32), QuantSpec(4, 32)
needs_kernels = pytest.mark.skipif(
    ops.cpu_kernels() is None, reason="without compiled kernels every page is kept by rows"
)


def spec(quant: QuantSpec | None = INT8, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> KVSpec:
    return KVSpec(1, 2, head_dim, dtype, quant=quant)


def chosen(name: str, quant: QuantSpec | None, page_size: int = 16, head_dim: int = 64) -> tuple[str, str]:
    form = spec(quant, head_dim)
    return page_layout(name, "key", form, page_size, CPU).axes, page_layout(
        name, "value", form, page_size, CPU
    ).axes


@needs_kernels
@pytest.mark.parametrize(
    ("quant", "page_size", "head_dim"),
    [
        (None, 16, 64),
        (INT8, 8, 64),
        (INT8, 24, 64),
        (QuantSpec(8, 8), 16, 24),
        (QuantSpec(4, 4), 16, 64),
        (QuantSpec(8, 4), 16, 512),
    ],
    ids=["floats", "half blocks", "cut blocks", "rows of 24 bytes", "groups of 2 bytes", "groups of 4"],
)
def test_auto_keeps_heads_apart_where_native_does_not_fit(
    quant: QuantSpec | None, page_size: int, head_dim: int
) -> None:
    assert chosen("auto", quant, page_size, head_dim) == ("B H S D", "B H S D")


@needs_kernels
@pytest.mark.parametrize(
    ("text", "dtype", "quant"),
    [
        ("auto", None, None),
        ("float32", torch.float32, None),
        ("float16", torch.float16, None),
        ("bfloat16", torch.bfloat16, None),
        ("int8", None, QuantSpec(8)),
        ("int4:g32", None, replace(INT4, rotated=True, full_range=True)),
        ("int4:g32,rotate=none", None, replace(INT4, full_range=True)),
        ("int4:g32,rotate=none,range=symmetric", None, INT4),
    ],
)
def test_a_text_says_how_tokens_are_kept(
    text: str, dtype: torch.dtype | None, quant: QuantSpec | None
) -> None:
    assert kept_as("kv", text) == (dtype, quant)


@pytest.mark.parametrize("text", [*BAD, *ODD, None], ids=lambda text: repr(text)[:20])
def test_a_text_that_says_nothing_is_refused(text: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^values must .*, got "):
        kept_as("values", text)


@pytest.mark.parametrize(("quant", "page_size"), [(INT8, 16), (INT4, 48), (QuantSpec(8, 8), 32)])
def test_auto_is_native_for_codes(quant: QuantSpec, page_size: int) -> None:
    assert chosen("auto", quant, page_size) == (NATIVE_KEYS.axes, NATIVE_VALUES.axes)


@needs_kernels
@pytest.mark.parametrize("group", [8, 16, 32, 64])
def test_auto_keeps_short_groups_of_bfloat16_in_rows(group: int) -> None:
    """Where codes are dequantized and not met as integers."""
    form = spec(QuantSpec(8, group), dtype=torch.bfloat16)
    is_native = page_layout("auto", "key", form, 16, CPU) == NATIVE_KEYS
    assert is_native == (group >= 32)
    assert page_layout("native", "key", form, 16, CPU) == NATIVE_KEYS


@pytest.mark.parametrize("quant", [None, INT8], ids=["floats", "int8"])
def test_auto_keeps_heads_apart_on_other_devices(quant: QuantSpec | None) -> None:
    """Scales of adjacent tokens are read at once there."""
    assert page_layout("auto", "key", spec(quant), 16, torch.device("meta")).axes == "B H S D"


@pytest.mark.parametrize("quant", [None, INT8], ids=["floats", "int8"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_keeps_the_tokens_of_a_head_together_for_attention_that_reads_tensors(
    quant: QuantSpec | None, device: str
) -> None:
    found = page_layout("auto", "key", spec(quant), 16, torch.device(device), is_gathered=True)
    assert found.axes == "B H S D" and is_in_rows("auto", is_gathered=True)


def test_named_layouts() -> None:
    assert chosen("NHD", INT8) == ("B S H D", "B S H D")
    assert chosen("HND", INT8) == ("B H S D", "B H S D")
    assert chosen("native", INT8) == (NATIVE_KEYS.axes, NATIVE_VALUES.axes)
    assert chosen("native", None) == chosen("rows", INT8) == ("B H S D", "B H S D")


@pytest.mark.parametrize(("name", "page_size"), [("native", 8), ("NDH", 16), ("", 16)])
def test_what_cannot_be_is_refused(name: str, page_size: int) -> None:
    with pytest.raises(ConfigError, match="layout"):
        page_layout(name, "key", spec(), page_size, CPU)


def test_a_format_refuses_an_unknown_layout() -> None:
    with pytest.raises(ConfigError, match="layout must be one of"):
        CacheFormat(layout="columns")


@pytest.mark.parametrize("quant", [None, INT8, INT4], ids=["floats", "int8", "int4"])
@pytest.mark.parametrize("window", [None, 20])
def test_layers_are_the_same_in_every_layout(quant: QuantSpec | None, window: int | None) -> None:
    """Appends of many sizes, forks and row crops: what is gathered and attended to has the same bits."""
    found = {}
    for layout in PAGE_LAYOUTS:
        rng = generator(7)
        form = CacheFormat(None, quant, layout=layout)
        layer = PagedLayer(form, Sequences(form, window))
        outs = []
        for count in (37, 1, 1, 16, 5):
            key, value = (torch.randn(2, 2, count, 64, generator=rng) for _ in range(2))
            stored = layer.append(key, value)
            query = torch.randn(2 * count, 4, 64, generator=rng)
            outs += stored.gather(torch.float32)
            outs.append(ops.attend(query, stored.view, stored.index.batch(count)))
        found[layout] = outs
    for layout, outs in found.items():
        for i, (x, expected) in enumerate(zip(outs, found["NHD"], strict=True)):
            assert_same_bits(x, expected, f"{layout} {i}")


def test_a_paged_cache_takes_a_layout() -> None:
    outs = []
    for layout in ("NHD", "native"):
        rng = generator(3)
        form = CacheFormat(quant=INT8, max_tokens=128, layout=layout)
        cache = PrefixCache(form, num_layers=1, heads=2, head_dim=64, dtype=torch.float32)
        sequence = cache.begin(list(range(40)))
        key, value, query = (torch.randn(40, heads, 64, generator=rng) for heads in (2, 2, 4))
        cache.append(sequence, 0, key, value)
        cache.commit(sequence)
        outs.append(cache.attend(query, [sequence], 0))
    assert_same_bits(outs[1], outs[0], "attention")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such advice")
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_pools_ask_for_huge_pages_in_time(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their memory is in small pages when they ask, even if the process has used it before."""
    asked = {}

    def ask(name: str, first: int, last: int) -> bool:
        is_taken = advise(name, first, last)
        if name == "MADV_HUGEPAGE":
            asked[first] = "hg" in flags_at(first), resident_pages(first, last)
        return is_taken

    advise = memory.advise
    monkeypatch.setattr(memory, "advise", ask)
    if used:  # malloc keeps what is freed after the first, which raised its limit, and gives it to the next
        for size in (31 << 20, 30 << 20):
            torch.ones(size, dtype=torch.uint8)
    form = spec(QuantSpec(8, 8))
    storage = Storage(form, form, 16, CPU)
    storage.reserve(1, 16384)
    for x in storage.tensors:
        assert x is not None and x.nbytes >= 2 * HUGE
        assert asked[-(-x.data_ptr() // HUGE) * HUGE] == (True, 0)
        assert not x.any()


def flags_at(address: int) -> list[str]:
    """What the system says of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest
    pytest.skip("/proc/self/smaps has no VmFlags here, which tell what was asked for")


def resident_pages(first: int, last: int) -> int:
    """Pages from one address to another that are in memory."""
    pages = (ctypes.c_ubyte * ((last - first) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), pages) == 0
    return sum(page & 1 for page in pages)
