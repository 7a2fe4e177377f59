"""Pages of a small pool that wait in a store in memory, within its limit, and come back bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import text
from integrations.pool.test_pool_store import PAGE, commit, finish, make_pool, opened
from oracles.language_models import make_model
from oracles.watched_store import Watched, watched_store
from torch import Tensor

LENGTH, NUM_TEXTS = 42, 5
WHOLE = LENGTH // PAGE * PAGE
KV = "int8:g16"


@pytest.fixture
def tier() -> Iterator[tuple[str, Watched]]:
    with watched_store("host-memory") as made:
        yield made


def texts() -> list[Tensor]:
    return [text(LENGTH, seed=seed) for seed in range(NUM_TEXTS)]


def small_pool(model: Any, store: Any, kv: str = KV) -> Any:
    """Room for one text and a half."""
    return make_pool(model, store, kv, max_tokens=LENGTH * 3 // 2)


def one_text_bytes() -> int:
    """Bytes of the pages of a text, and of the probe of the model."""
    model = make_model()
    with watched_store("one") as (url, backend), opened(url) as store:
        commit(model, small_pool(model, store), text(LENGTH))
        return backend.nbytes


@pytest.mark.parametrize("kv", ["auto", KV, "int4:g16,recent=0"])
def test_pages_that_a_pool_evicts_come_back(kv: str, tier: tuple[str, Watched]) -> None:
    """Two pools share the store; what one evicted the other begins with, too."""
    model, more = make_model("kvloom"), text(3, seed=99)
    with opened(tier[0], max_bytes=1 << 40) as store:
        pool, other = small_pool(model, store, kv), small_pool(model, store, kv)
        for tokens in texts():
            commit(model, pool, tokens)
        for tokens in texts():
            turn = torch.cat([tokens, more], 1)
            expected = finish(model, make_pool(model, None, kv).begin(turn), turn)[:, -3:]
            for own in (pool, other):
                cache = own.begin(turn)
                assert cache.get_seq_length() == WHOLE
                found = finish(model, cache, turn)[:, -3:]
                torch.testing.assert_close(found, expected, rtol=0.0, atol=0.05 * float(expected.abs().max()))
                del cache
                own.check()
            same = [finish(model, own.begin(turn), turn) for own in (pool, other)]
            assert torch.equal(*same)
        assert store.counts["tokens_read"] == 2 * NUM_TEXTS * WHOLE


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.5, 1e9])
def test_limits_hold_whenever_something_is_written(
    share: float, tier: tuple[str, Watched], caplog: pytest.LogCaptureFixture
) -> None:
    """And what they leave out is computed; with room for nothing a WARNING says so once."""
    url, backend = tier
    model, limit = make_model(), int(share * one_text_bytes())
    with opened(url, max_bytes=limit) as store, caplog.at_level(logging.WARNING, "kvloom"):
        pool, other = small_pool(model, store), small_pool(model, store, "auto")
        for tokens in texts():
            for own in (pool, other):
                commit(model, own, tokens)
        assert backend.most <= limit
        assert (backend.nbytes == 0) == (limit == 0)
        said = [x.getMessage() for x in caplog.records]
        assert len(said) == (limit == 0) and all("may hold less than one run of" in x for x in said)
        assert bool(store.tiers[0].counts["runs_too_large"]) == (limit == 0)
        last = torch.cat([texts()[-1], text(3, seed=99)], 1)
        begun = [int(small_pool(model, store, kv).begin(last).get_seq_length()) for kv in (KV, "auto")]
        if share > 1e6:
            assert begun == [WHOLE] * 2
        if share >= 2.0:  # the first pages of the newest text, at least
            assert max(begun) > 0


def test_only_the_same_model_under_the_same_salt_finds_pages(tier: tuple[str, Watched]) -> None:
    model = make_model()
    with opened(tier[0], max_bytes=1 << 30) as store:
        pool = small_pool(model, store)
        for tokens in texts():
            commit(model, pool, tokens, "one")
        first = torch.cat([texts()[0], text(3, seed=99)], 1)
        assert pool.begin(first, "two").get_seq_length() == 0
        assert pool.begin(first, "one").get_seq_length() == WHOLE
        with torch.no_grad():
            next(model.parameters()).mul_(2.0)
        assert pool.begin(first, "one").get_seq_length() == 0
        with torch.no_grad():
            next(model.parameters()).div_(2.0)
        assert pool.begin(first, "one").get_seq_length() == WHOLE
