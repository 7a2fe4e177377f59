"""``generate`` with several rows for each prompt of a pool, and what is committed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations.pool.test_pool import make_pool, text
from oracles.language_models import make_model
from torch import Tensor

from kvloom.caches import CacheFormat, PrefixCache
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.pool.fed_tokens import FedTokens
from kvloom.integrations.transformers.versions import IS_4
from kvloom.store.digests import salt_digest

MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "the best of beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}


def generated(model: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    torch.manual_seed(3)
    out: Tensor = model.generate(ids, **{CACHE_ARGUMENT: cache}, **(OPTIONS | options))
    return out


def expect_right(model: Any, pool: KVPool, ids: Tensor) -> None:
    """What a pool finds of a text has the logits of a cache that shares nothing."""
    cache = pool.begin(ids)
    found = int(cache.get_seq_length())
    with torch.no_grad():
        logits = model(ids[:, found:], **{CACHE_ARGUMENT: cache}).logits
        own = model(ids, **{CACHE_ARGUMENT: KVCache.for_model(model, page_size=4)}).logits[:, found:]
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("mode", list(MODES))
def test_every_row_of_a_prompt_is_shared_under_its_own_tokens(mode: str, prompts: int) -> None:
    model = make_model()
    pool, ids = make_pool(model), text(22 * prompts).view(prompts, 22)
    expected = generated(model, ids, KVCache.for_model(model, page_size=4), **MODES[mode])
    for found in (0, 20):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        out = generated(model, ids, cache, **MODES[mode])
        assert torch.equal(out, expected)
        pool.commit(cache, out)
        for row in out:
            assert pool.begin(row[None]).get_seq_length() == 28
            expect_right(model, pool, row[None])
    pool.check()


def test_padded_prompts_have_several_rows_each() -> None:
    model = make_model()
    pool, ids = make_pool(model), text(44).view(2, 22)
    mask = torch.ones_like(ids)
    ids[1, :5] = mask[1, :5] = 0
    options = {"attention_mask": mask, "do_sample": True, "num_return_sequences": 2}
    expected = generated(model, ids, KVCache.for_model(model, page_size=4), **options)
    for found in (0, 20):
        cache = pool.begin(ids, attention_mask=mask)
        assert cache.get_seq_length() == found
        out = generated(model, ids, cache, **options)
        assert torch.equal(out, expected)
        pool.commit(cache, out)
    for row, begin in zip(out, (0, 0, 5, 5), strict=True):
        assert pool.begin(row[None, begin:]).get_seq_length() == (30 - begin) // 4 * 4
        expect_right(model, pool, row[None, begin:])


@pytest.mark.parametrize("rows", [3, 5])
def test_rows_that_are_no_multiple_are_refused(rows: int) -> None:
    model = make_model()
    pool, ids = make_pool(model), text(44).view(2, 22)
    cache = pool.begin(ids)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=rf"^input_ids must have the 2 rows .* got {rows}$"),
    ):
        model(ids[:1].expand(rows, -1), **{CACHE_ARGUMENT: cache})
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    pool.commit(cache, ids)
    assert pool.begin(ids).get_seq_length() == 20


@pytest.mark.parametrize("at", [0, 13, 21])
def test_other_tokens_than_the_cache_has_are_refused(at: int) -> None:
    model = make_model()
    pool, ids = make_pool(model), text(22)
    for found in (0, 20):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        with torch.no_grad():
            model(ids[:, found:], **{CACHE_ARGUMENT: cache})
        other = ids.clone()
        other[0, at] += 1
        with pytest.raises(
            ArgumentError, match=rf"^input_ids must be the tokens of the cache, .* token {at} of"
        ):
            pool.commit(cache, other)
        assert pool.begin(other).get_seq_length() == (0 if not found else at // 4 * 4)
        pool.commit(cache, ids)


def test_tokens_of_crops_and_forks_are_known() -> None:
    model = make_model()
    pool, ids, more = make_pool(model), text(22), text(10, 5)
    cache = pool.begin(ids)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
        fork = cache.fork()
        fork.crop(-6)
        model(more, **{CACHE_ARGUMENT: fork})
    whole = torch.cat((ids[:, :16], more), 1)
    with pytest.raises(ArgumentError, match="token 16 of row 0"):
        pool.commit(fork, torch.cat((ids, more[:, :4]), 1))
    pool.commit(fork, whole)
    pool.commit(cache, ids)
    assert [pool.begin(x).get_seq_length() for x in (ids, whole)] == [20, 24]
    expect_right(model, pool, whole)


@pytest.mark.skipif(IS_4, reason="version 4 feeds what the cache lacks")
def test_prompt_lookup_after_found_tokens_says_what_is_wrong() -> None:
    """transformers feeds the whole text again, with positions from 0, also to its own caches."""
    model = make_model()
    pool, ids = make_pool(model), text(22)
    cache = pool.begin(ids)
    pool.commit(cache, generated(model, ids, cache, prompt_lookup_num_tokens=2))
    match = r"^position_ids must count on from the 20 tokens that the cache holds, .* got 0 to \d+: in prompt"
    with pytest.raises(ArgumentError, match=match):
        generated(model, ids, pool.begin(ids), prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("salt", [1, True, None, b"tenant", ("tenant",), ["tenant"]])
def test_a_salt_that_is_no_string_is_refused_by_name(salt: Any) -> None:
    model = make_model()
    pool, ids = make_pool(model), text(12)
    pool.record()
    own = PrefixCache(CacheFormat(max_tokens=64), num_layers=1, heads=1, head_dim=8)
    doors: list[Callable[[], Any]] = [
        lambda: pool.begin(ids, salt=salt),
        lambda: pool.why(ids, salt=salt),
        lambda: own.begin([1, 2], salt),
        lambda: salt_digest(salt),  # of all calls of a store
    ]
    for ask in doors:
        with pytest.raises(ArgumentError, match=r"^salt must be a string, got "):
            ask()
    cache = pool.begin(ids)
    out = generated(model, ids, cache)
    if salt is not None:
        with pytest.raises(ArgumentError, match=r"^salt must be that with which the cache began, '', got "):
            pool.commit(cache, out, salt=salt)
    pool.commit(cache, out)


def test_tokens_of_a_long_answer_are_known() -> None:
    """Each is fed alone; parts are merged, and removed again."""
    fed = FedTokens(torch.tensor([[1, 2, 3], [7, 8, 9]]), 2)
    tokens = torch.arange(1400).view(2, 700)
    for i in range(700):
        fed.add(tokens[:, i : i + 1], 3 + i)
    expected = torch.cat((torch.tensor([[1, 2], [7, 8]]), tokens), 1)
    assert fed.rows([0, 0]) == expected.tolist()
    fed.truncate(500)
    fed.select([1, 0, 1])
    fed.add(torch.full((3, 4), 5), 504)
    assert fed.rows([0, 1, 0]) == [
        [*expected[row, begin:500].tolist(), 5, 5, 5, 5] for row, begin in ((1, 0), (0, 1), (1, 0))
    ]
    assert fed.is_known
    fed.add(None, 505)
    assert not fed.is_known
