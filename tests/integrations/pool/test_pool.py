"""``KVPool``: a cache begins with what earlier ones computed for the same tokens, and with nothing else."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from oracles.asked import Asked
from oracles.language_models import make_model
from oracles.pairs import in_turn
from torch import Tensor

from kvloom.errors import ArgumentError, OutOfPages
from kvloom.integrations.transformers import KVCache, KVPool

ALL_KINDS = ["auto", "int8:g16", "int4:g16,recent=0", "int4:g16,rotate=both,recent=0", "int2:g16,recent=0"]
KINDS = pytest.mark.parametrize("kv", ALL_KINDS)


def make_pool(model: Any, kv: str = "auto", max_tokens: int = 400) -> KVPool:
    return KVPool.for_model(model, kv=kv, page_size=4, max_tokens=max_tokens)


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 199, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, tokens: Tensor, cache: Any, new: int = 12) -> Tensor:
    return model.generate(
        tokens, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False
    )


def ask(pool: KVPool, model: Any, tokens: Tensor, salt: str = "") -> tuple[Tensor, int]:
    """The answer, and how many tokens of the prompt were there already."""
    cache = pool.begin(tokens, salt)
    found = cache.get_seq_length()
    output = generate(model, tokens, cache)
    pool.commit(cache, output, salt)
    pool.check()
    return output, found


@pytest.mark.parametrize(("kv", "attention"), in_turn(ALL_KINDS, ["sdpa", "kvloom"]))
def test_a_known_prefix_is_found_and_changes_no_token(kv: str, attention: str) -> None:
    model = make_model(attention)
    pool = make_pool(model, kv)
    system = text(22)
    for seed, expected_found in ((1, 0), (2, 20), (3, 20), (1, 28)):
        tokens = torch.cat([system, text(8, seed)], dim=1)
        alone = generate(model, tokens, KVCache.for_model(model, kv=kv, page_size=4))
        output, found = ask(pool, model, tokens)
        assert torch.equal(output, alone)
        assert found == expected_found


@pytest.mark.parametrize("rows", [1, 2])
def test_a_text_that_broke_off_before_its_first_forward_is_committed_as_nothing(rows: int) -> None:
    class Broken:
        def put(self, value: Tensor) -> None:
            raise KeyboardInterrupt

        def end(self) -> None: ...

    model, tokens = make_model(), text(20, rows=rows)
    pool = make_pool(model)
    cache = pool.begin(tokens)
    if rows == 1:  # that a streamer can have
        with pytest.raises(KeyboardInterrupt):
            model.generate(tokens, past_key_values=cache, max_new_tokens=2, streamer=Broken())
    pool.commit(cache)
    pool.commit(cache, tokens[:, :1])  # one more token than it has
    with pytest.raises(ArgumentError, match=r"^input_ids must be the 0 tokens of the cache, .* got 20"):
        pool.commit(cache, tokens)
    pool.check()
    assert ask(pool, model, tokens)[1] == 0


def test_the_answer_is_found_too() -> None:
    """A conversation: the next question follows what was asked and answered."""
    model = make_model()
    pool = make_pool(model)
    output, _ = ask(pool, model, text(10))
    _, found = ask(pool, model, torch.cat([output, text(5, 1)], dim=1))
    assert found == 20  # of 10 + 12 tokens the last was not computed


def test_salts_do_not_share() -> None:
    model = make_model()
    pool = make_pool(model)
    ask(pool, model, text(20), "a")
    assert ask(pool, model, text(20), "b")[1] == 0
    assert ask(pool, model, text(20), "a")[1] == 16


def test_rows_begin_with_what_all_of_them_have() -> None:
    model = make_model()
    pool = make_pool(model)
    rows = text(18, rows=3)
    ask(pool, model, rows)
    rows[1, 9] = 3 if rows[1, 9] != 3 else 4
    alone = generate(model, rows, None)
    output, found = ask(pool, model, rows)
    assert found == 8
    assert torch.equal(output, alone)


def test_caches_of_one_prefix_share_its_pages() -> None:
    model = make_model()
    pool = make_pool(model)
    ask(pool, model, text(81))
    caches = [pool.begin(text(81)) for _ in range(10)]
    assert pool.report()["active"] == 20
    for seed, cache in enumerate(caches):
        generate(model, torch.cat([text(81), text(2, seed)], dim=1), cache, new=2)
    assert pool.report()["active"] == 20 + 10 * 1
    pool.check()


def test_pages_that_nobody_holds_make_room() -> None:
    model = make_model()
    pool = make_pool(model, max_tokens=64)
    for seed in range(6):
        _, found = ask(pool, model, text(20, seed))
        assert found == 0
    assert ask(pool, model, text(20, 5))[1] == 16
    assert ask(pool, model, text(20, 0))[1] == 0
    report = pool.report()
    assert report["active"] == 0
    assert report["free"] + report["evictable"] == report["num_pages"] == 16


@pytest.mark.parametrize("kv", ["auto", "int4:g16,recent=0"])
def test_the_policy_of_a_full_pool_changes_no_token(kv: str) -> None:
    model = make_model()
    pool = KVPool.for_model(model, kv=kv, page_size=4, max_tokens=64, policy="ours")
    texts = [text(20, seed) for seed in range(7)]
    alone = [generate(model, tokens, make_pool(model, kv).begin(tokens)) for tokens in texts]
    found = 0
    for seed in (0, 1, 0, 2, 3, 0, 4, 5, 6, 0):
        output, there = ask(pool, model, texts[seed])
        found += there
        assert torch.equal(output, alone[seed])
    assert 0 < found <= 3 * 16
    saved = pickle.loads(pickle.dumps(pool)).bind(model)  # noqa: S301
    saved.check()
    assert ask(saved, model, texts[0])[1] == 16
    report = saved.report()
    assert report["active"] == 0 and report["free"] + report["evictable"] == report["num_pages"] == 16


def test_a_policy_that_is_none_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^policy must be one of lru, ours, got 'fifo'"):
        KVPool.for_model(make_model(), max_tokens=64, policy="fifo")


def test_a_full_pool_refuses_and_loses_nothing() -> None:
    model = make_model()
    pool = make_pool(model, max_tokens=32)
    held = pool.begin(text(20))
    generate(model, text(20), held, new=4)
    keys = held.layers[0].keys
    with pytest.raises(
        OutOfPages, match=r"max_tokens must be at least .* to hold 20 more tokens of 1 sequence"
    ):
        generate(model, text(20, 1), pool.begin(text(20, 1)))
    assert torch.equal(held.layers[0].keys, keys)
    pool.check()


def test_report_counts_what_was_found() -> None:
    model = make_model()
    pool = make_pool(model)
    ask(pool, model, text(20))
    ask(pool, model, text(20))
    assert pool.report()["tokens_asked"] == 40
    assert pool.report()["tokens_found"] == 16


def test_a_cache_of_another_pool_is_refused() -> None:
    model = make_model()
    pool, other = make_pool(model), make_pool(model)
    cache = pool.begin(text(9))
    output = generate(model, text(9), cache)
    with pytest.raises(ArgumentError, match="cache must be one that this pool began"):
        other.commit(cache, output)
    with pytest.raises(
        ArgumentError, match="input_ids must be the 20 tokens of the cache, or one more, got 22"
    ):
        pool.commit(cache, torch.cat([output, output[:, :1]], dim=1))
    with pytest.raises(ArgumentError, match="input_ids"):
        pool.commit(cache, output.repeat(2, 1))


def test_cropped_rows_are_not_found_again() -> None:
    model = make_model()
    pool = make_pool(model)
    tokens = text(12, rows=2)
    cache = pool.begin(tokens)
    generate(model, tokens, cache, new=1)
    cache.crop([-3, 0])
    with pytest.raises(ArgumentError, match="whole sequences of one length"):
        pool.commit(cache, tokens)


def test_a_committed_prefix_is_not_renamed() -> None:
    """Pages of one text are never found under another."""
    model = make_model()
    pool = make_pool(model)
    tokens = text(12)
    cache = pool.begin(tokens)
    generate(model, tokens, cache, new=1)
    pool.commit(cache, tokens)
    with pytest.raises(
        ArgumentError, match=r"^input_ids must be the tokens of the cache, row by row, got \d+ as"
    ):
        pool.commit(cache, text(12, 1))
    assert pool.begin(text(12, 1)).get_seq_length() == 0
    pool.check()


def test_a_cache_whose_pages_another_one_had_first_reads_those() -> None:
    """Both computed the same; after the second commit its own pages are free, and others write there."""
    model = make_model()
    pool = make_pool(model, max_tokens=32)
    first, second = pool.begin(text(12)), pool.begin(text(12))
    for cache in (first, second):
        generate(model, text(12), cache, new=1)
        keys = cache.layers[2].keys
        pool.commit(cache, text(12))
    assert pool.report()["active"] == 3
    others = [pool.begin(text(20, 1))]
    generate(model, text(20, 1), others[0], new=1)
    assert torch.equal(second.layers[2].keys, keys)
    assert torch.equal(first.layers[2].keys, keys)
    pool.check()


@pytest.mark.parametrize(
    "tokens", [torch.zeros(0, 3).long(), torch.zeros(2, 0).long(), torch.zeros(3).long()]
)
def test_no_tokens_are_refused(tokens: Tensor) -> None:
    with pytest.raises(ArgumentError, match="input_ids"):
        make_pool(make_model()).begin(tokens)


@pytest.mark.parametrize("kv", ["auto", "int4:g16"])
def test_each_page_of_a_text_is_asked_once_in_each_group(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("kvloom"), text(41)
    pool = make_pool(model, kv)
    ask(pool, model, tokens)
    asked = Asked(monkeypatch)
    assert pool.begin(tokens).get_seq_length() == 40
    assert asked.walks == [10] * len(pool._prefixes.groups)
