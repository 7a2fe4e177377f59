"""Pages become the bytes that the document says, from any layout, and any layout's pages again."""

from __future__ import annotations

import warnings
from itertools import combinations

import pytest
import torch
from store.reading import read_states

from kvloom import ops
from kvloom.caches import CacheFormat, Pages
from kvloom.caches.format import kept_as
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
from kvloom.core.memory import shares_memory
from kvloom.paging import PageTable, PrefixTree
from kvloom.store import Fingerprint, KVStore
from kvloom.store.below import StoreBelow
from kvloom.store.format import page_bytes
from kvloom.store.transfer import entries_of, pack_pages, tensor_of, views

TOKENS = list(range(100, 136))
SIZE = 4


def make_pages(kv: str, layout: str, page_size: int = SIZE, heads: tuple[int, ...] = (2, 2)) -> Pages:
    """A pool with two layers of random tokens, the values of another dtype or quantization than the keys.

    ``kv`` may begin with the dtype that the model computes in.
    """
    whole, _, kv = kv.rpartition(" ")
    computed = getattr(torch, whole or "float32")
    dtype, quant = kept_as("kv", kv)
    pages = Pages(CacheFormat(dtype, quant, page_size, 40 * page_size, layout=layout), is_kept=True)
    for i, count in enumerate(heads):
        key = pages.format.spec(count, 16, computed)
        value = CacheFormat(torch.float16).spec(count, 6, torch.float32)
        pages.storages[i] = storage = Storage(key, value, page_size, torch.device("cpu"), layout)
        pages.fit(storage)
        slots = torch.arange(len(TOKENS))[None]
        ops.store(
            torch.randn(1, count, len(TOKENS), 16), torch.randn(1, count, len(TOKENS), 6), slots, storage.view
        )
    return pages


def whose(pages: Pages) -> Fingerprint:
    return Fingerprint("c", "w", "float32", "{}", "full", "none", entries_of(pages.storages))


KINDS = pytest.mark.parametrize(
    "kv",
    [
        "float32",
        "bfloat16",
        "int8:g8",
        "int4:g16,rotate=none",
        "bfloat16 int8:g8",
        "bfloat16 int4:g16,rotate=none",
    ],
)


@KINDS
@pytest.mark.parametrize("heads", [(2, 2), (2, 3)])
@pytest.mark.parametrize("layout", ["rows", "NHD", "HND"])
def test_a_reader_written_from_the_document_reads_what_attention_reads(
    layout: str, heads: tuple[int, ...], kv: str
) -> None:
    pages = make_pages(kv, layout, heads=heads)
    with KVStore("memory://") as store:
        store.save(whose(pages), "salt", TOKENS, 8, SIZE, pack_pages(pages, range(2, 9), whose(pages)))
        store.flush()
        backend = store.tiers[0].connected()
        ((name, size, _),) = backend.list_stored()
        tokens, states = read_states(bytes(*backend.get_ranges(name, [(0, size)])), "salt", TOKENS[:8])
    assert tokens == TOKENS[8:]
    for (key, value), storage in zip(states, pages.storages.values(), strict=True):
        for side, (found, spec) in enumerate(zip((key, value), storage.specs, strict=True)):
            expected = ops.load(torch.arange(8, 36)[None], storage.view, dtype=spec.dtype)[side][0]
            assert torch.equal(found, expected.float())


def held_by(pages: Pages) -> Row:
    """A table of all pages."""
    table = PageTable(pages.pool, pages.format.page_size)
    table.adopt(pages.pool.take(9))
    return Row(table)


@KINDS
@pytest.mark.parametrize("page_size", [1, 2, 4, 6])
@pytest.mark.parametrize("layout", ["rows", "NHD", "HND"])
def test_another_layout_and_page_size_has_the_same_codes(layout: str, page_size: int, kv: str) -> None:
    pages = make_pages(kv, "HND")
    other = make_pages(kv, layout, page_size)
    for storage in other.storages.values():
        for tensor in storage.tensors:
            if tensor is not None:
                tensor.zero_()
    with KVStore("memory://", read="always") as store:
        first, second = (
            StoreBelow(store, x, PrefixTree(x.pool, x.format.page_size), whose(x), {}, 1.0)
            for x in (pages, other)
        )
        first.keep(TOKENS, held_by(pages), "")
        store.flush()
        refs = second.fetch(TOKENS, [], "")
    num_tokens = len(TOKENS) // page_size * page_size
    assert len(refs) == num_tokens // page_size
    for a, b in zip(pages.storages.values(), other.storages.values(), strict=True):
        # Packed in one order both are the same bytes.
        mine, theirs = (
            pack_tokens(x, slots[:num_tokens])
            for x, slots in ((a, torch.arange(36)), (b, other.slots([ref.id for ref in refs], b)))
        )
        assert mine == theirs


def test_what_is_read_may_begin_within_a_page_of_the_store() -> None:
    pages, other = make_pages("float32", "HND"), make_pages("float32", "NHD", 2)
    with KVStore("memory://", read="always") as store:
        first, second = (
            StoreBelow(store, x, PrefixTree(x.pool, x.format.page_size), whose(x), {}, 1.0)
            for x in (pages, other)
        )
        first.keep(TOKENS, held_by(pages), "")
        store.flush()
        held = other.pool.take(1)
        for a, b in zip(pages.storages.values(), other.storages.values(), strict=True):
            ops.copy(a.view, torch.arange(2), b.view, other.slots([held[0].id], b))
        refs = second.fetch(TOKENS, held, "")
    assert len(refs) == len(TOKENS) // 2
    for a, b in zip(pages.storages.values(), other.storages.values(), strict=True):
        slots = other.slots([ref.id for ref in refs], b)
        assert pack_tokens(a, torch.arange(36)) == pack_tokens(b, slots)


def pack_tokens(storage: Storage, slots: torch.Tensor) -> list[bytes]:
    held = Storage(*storage.specs, 1, storage.device, "NHD")
    held.reserve(1, len(slots))
    ops.copy(storage.view, slots, held.view, torch.arange(len(slots)))
    return [x.view(torch.uint8).numpy().tobytes() for x in held.tensors if x is not None]


def test_a_shard_reads_the_heads_it_has() -> None:
    pages = make_pages("int8:g8", "HND", heads=(4, 4))
    mine = whose(pages)
    with KVStore("memory://") as store:
        store.save(mine, "", TOKENS, 0, SIZE, pack_pages(pages, range(9), mine))
        store.flush()
        (whole,) = store.load(mine, "", TOKENS)
        before = store.tiers[0].counts["bytes_read"]
        (part,) = store.load(mine, "", TOKENS, heads=range(1, 3))
        read = store.tiers[0].counts["bytes_read"] - before
    assert read == len(whole.run.head()) + len(whole.data) // 2
    row = len(whole.data) // 4
    assert part.data == whole.data[row : 3 * row]


@KINDS
def test_parts_of_packed_pages_share_no_byte(kv: str) -> None:
    pages = make_pages(kv, "HND")
    form = whose(pages)
    data = torch.zeros(form.num_heads * 3 * page_bytes(form, SIZE), dtype=torch.uint8)
    parts = [x for view in views(data, form, SIZE, 3) for x in view.tensors if x is not None]
    assert all(view.is_writable for view in views(data, form, SIZE, 3))
    assert not any(shares_memory(x, y) for x, y in combinations(parts, 2))


def test_bytes_of_a_store_in_memory_are_not_copied_to_be_read() -> None:
    """And a part of them, of which torch cannot get a view that is read-only, is no way to change them."""
    stored = bytearray(b"0123456789")
    whole, part = memoryview(stored).toreadonly(), memoryview(stored).toreadonly()[2:6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tensor_of(whole).data_ptr() == torch.frombuffer(stored, dtype=torch.uint8).data_ptr()
        tensor_of(part).zero_()
        tensor_of(memoryview(b"bytes")).zero_()
    assert stored == b"0123456789"


def test_the_earlier_name_of_entries_works() -> None:
    from kvloom import store

    assert store.layers_of is store.entries_of
