"""A store below a prefix cache: what one cache committed another begins with, bit for bit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from caches.test_prefix_cache import DIM, HEADS, INT8, LAYERS, PAGE, assert_own, write
from integrations.pool.test_pool_store import commit as compute_in_pool
from integrations.pool.test_pool_store import make_pool, text
from oracles.language_models import make_model
from store.runs import fingerprint

from kvloom import QuantSpec, ops
from kvloom.caches import CacheFormat, PrefixCache
from kvloom.caches.rows.pages import Pages
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.integrations.transformers.smoothing import smoothing_for
from kvloom.store import Fingerprint, KVStore, below, digests, entries_of, put_below

TOKENS = list(range(20, 36))


def make(quant: QuantSpec | None = None, page_size: int = PAGE, **options: Any) -> PrefixCache:
    form = CacheFormat(quant=quant, page_size=page_size, max_tokens=128, **options)
    return PrefixCache(form, num_layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.float32)


def whose(cache: PrefixCache, **changes: str) -> Fingerprint:
    named = fingerprint(**changes)
    return Fingerprint(**(vars(named) | {"layers": entries_of(cache.pages.storages)}))


def store_over(cache: PrefixCache, url: str, **changes: str) -> KVStore:
    return put_below(cache, KVStore(url), whose(cache, **changes)).store


@pytest.mark.parametrize("quant", [None, INT8], ids=["plain", "int8"])
def test_what_is_read_is_what_was_committed(quant: QuantSpec | None, tmp_path: Path) -> None:
    for length in range(1, 3 * PAGE + 2):
        tokens, salt = TOKENS[:length], str(length)
        first = make(quant)
        with store_over(first, f"file://{tmp_path}"):
            write(first, first.begin(tokens, salt))
        for page_size, layout in ((PAGE, "HND"), (2, "NHD"), (8, "NHD")):
            second = make(quant, page_size, layout=layout)
            store_over(second, f"file://{tmp_path}")
            sequence = second.begin([*tokens, 1], salt)
            assert sequence.num_cached == length // PAGE * PAGE // page_size * page_size
            second.check()
            write(second, sequence)
            if page_size == PAGE:
                assert_own(second, sequence, quant)


def test_the_last_token_is_left_to_compute_and_others_find_nothing(tmp_path: Path) -> None:
    url, cache = f"file://{tmp_path}", make()
    with store_over(cache, url):
        write(cache, cache.begin(TOKENS, "mine"))
    for tokens, salt, changes, expected in (
        (TOKENS, "mine", {}, len(TOKENS) - PAGE),
        (TOKENS, "theirs", {}, 0),
        (TOKENS, "mine", {"weights": "other"}, 0),
        ([*TOKENS[:9], 0, 0, 0], "mine", {}, 8),
    ):
        other = make()
        store_over(other, url, **changes)
        assert other.begin(tokens, salt).num_cached == expected


def test_each_run_that_is_read_takes_time_for_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below, "RUN_BYTES", 1)  # a run of each page
    with KVStore("memory://", read="always") as store:
        first, second = make(), make()
        put_below(first, store, whose(first))
        write(first, first.begin(TOKENS))
        assert store.flush(10)
        put_below(second, store, whose(second))
        slots, asked = Pages.slots, list[int]()
        monkeypatch.setattr(Pages, "slots", lambda self, ids, x: asked.extend(ids) or slots(self, ids, x))
        sequence = second.begin([*TOKENS, 1])
    assert sequence.num_cached == len(TOKENS)
    assert asked == [ref.id for ref in sequence.table.pages]


def test_a_run_may_begin_within_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below, "RUN_BYTES", 1)  # a run of each page
    first, second = make(page_size=PAGE // 2), make()
    with KVStore("memory://", read="always") as store:
        put_below(first, store, whose(first))
        write(first, first.begin(TOKENS))
        assert store.flush(10)
        put_below(second, store, whose(second))
        sequence = second.begin([*TOKENS, 1])
    assert sequence.num_cached == len(TOKENS)
    write(second, sequence)
    assert_own(second, sequence)


def test_a_cache_goes_on_in_memory_when_it_is_saved(tmp_path: Path) -> None:
    cache = make()
    store_over(cache, f"file://{tmp_path}")
    write(cache, cache.begin(TOKENS))
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301 (our own)
    assert again.below is None
    assert again.begin(TOKENS).num_cached == len(TOKENS) - PAGE


def test_a_fingerprint_of_other_layers_is_refused(tmp_path: Path) -> None:
    cache = make()
    with pytest.raises(ArgumentError, match=r"fingerprint must have layers .*bits=0.*, got .*bits=8"):
        put_below(cache, f"file://{tmp_path}", whose(make(INT8)))
    assert cache.below is None


@pytest.mark.parametrize(("rotated", "other"), [(True, "none"), (True, "keys"), (False, "keys")])
def test_a_fingerprint_of_another_rotation_is_refused(rotated: bool, other: str, tmp_path: Path) -> None:
    cache, plain = make(QuantSpec(8, 4, rotated=rotated)), make(QuantSpec(8, 4))
    with pytest.raises(ArgumentError, match=r"fingerprint must have layers .*rotated=.*, got .*rotated="):
        put_below(cache, f"file://{tmp_path}", whose(plain, rotation=other))
    assert cache.below is None
    put_below(cache, f"file://{tmp_path}", whose(cache, rotation="both" if rotated else "none"))


def test_a_fingerprint_with_a_rotation_of_a_cache_without_codes_is_refused(tmp_path: Path) -> None:
    cache = make()
    with pytest.raises(ArgumentError, match="fingerprint must have rotation 'none', got 'keys'"):
        put_below(cache, f"file://{tmp_path}", whose(cache, rotation="keys"))
    assert cache.below is None


def test_a_pool_of_a_model_and_a_cache_share_a_store(tmp_path: Path) -> None:
    """What ``KVPool`` wrote a loop of one's own begins with."""
    model, tokens = make_model("kvloom"), text(12)
    with KVStore(f"file://{tmp_path}", read="always") as store:
        pool = make_pool(model, store, "int8:g16")
        compute_in_pool(model, pool, tokens)
    identity = fingerprint_of(model, "int8:g16")
    layer = identity.layers[0]
    form = cache_format(model.config, "int8:g16", PAGE, 64, smoothing=smoothing_for(model, "int8:g16"))
    cache = PrefixCache(
        form,
        num_layers=len(identity.layers),
        heads=layer.heads,
        head_dim=layer.key.head_dim,
        dtype=model.dtype,
    )
    put_below(cache, f"file://{tmp_path}", identity)
    sequence = cache.begin([*tokens[0].tolist(), 0])
    assert sequence.num_cached == 12
    found = pool.begin(torch.cat([tokens, text(1)], dim=1))
    for i, storage in enumerate(cache.layers):
        theirs = pool._prefixes.main.pages.storages[i]
        mine_at = cache.pages.slots([x.id for x in sequence.table.pages], storage)
        theirs_at = pool._prefixes.main.pages.slots(
            [x.id for x in found.sequences[0].tables[0].pages], theirs
        )
        expected = ops.load(theirs_at, theirs.view, dtype=torch.float32)
        for mine, other in zip(ops.load(mine_at, storage.view, dtype=torch.float32), expected, strict=True):
            assert torch.equal(mine, other)


def test_what_a_store_of_other_pages_knows_of_a_text_is_asked_with_its_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page was asked for by the tokens up to it, which is quadratic."""
    first, tokens = make(), list(range(100, 164))
    with store_over(first, f"file://{tmp_path}"):
        write(first, first.begin(tokens))
    second, num_packed = make(page_size=2), 0
    below = put_below(second, KVStore(f"file://{tmp_path}"), whose(second))
    pack = digests.token_bytes

    def count(some: Any) -> bytes:
        nonlocal num_packed
        num_packed += len(some)
        return pack(some)

    monkeypatch.setattr(digests, "token_bytes", count)
    assert below.known([*tokens, 1, 1], "") == [True] * 32 + [False]
    assert num_packed == 66


@pytest.mark.parametrize("how", ["written at once", "written in turns", "read"])
def test_of_a_text_that_does_not_fit_the_first_pages_stay(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since without them nothing behind them is found."""
    monkeypatch.setattr(below, "RUN_BYTES", 1)  # a run of each page
    with KVStore("memory://") as store:
        commit_to(store, TOKENS)
        size = sum(x.size for x in store.tiers[0].connected().list_stored())
    others = [100 + token for token in TOKENS]
    with KVStore("memory://", read="always", max_bytes=size * 3 // 2) as store:
        if how == "written in turns":
            for end in range(PAGE, len(TOKENS) + 1, PAGE):
                commit_to(store, TOKENS[:end], TOKENS[: end - PAGE])
        else:
            commit_to(store, TOKENS)
        if how == "read":
            commit_to(store, [200])
            assert len(store.load(whose(make()), "", TOKENS)) == len(TOKENS) // PAGE
        commit_to(store, others)
        found = [store.find(whose(make()), "", text) for text in (TOKENS, others)]
    assert 0 < found[0] < len(TOKENS) and found[1] == len(TOKENS)


def commit_to(store: KVStore, tokens: list[int], known: list[int] | None = None) -> None:
    """Commit a text to a store, of which a cache may know the first tokens."""
    cache = make()
    put_below(cache, store, whose(cache))
    for own in [known] * bool(known) + [tokens]:
        write(cache, cache.begin(own))
    assert store.flush(10)
