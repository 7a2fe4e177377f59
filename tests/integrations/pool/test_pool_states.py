"""Pools and stores of models with recurrent states: a prefix that is found goes on as it does cold."""

from __future__ import annotations

import copy
import functools
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.pairs import pairs_in_turn
from oracles.stateful_models import CACHES_SEE_STATES, WRONG, folders, small_model, stateful_model
from torch import Tensor

import kvloom
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.cache import trial
from kvloom.integrations.transformers.cache.trial import try_states
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.integrations.transformers.states.grid import Grid
from kvloom.ops.impl import cpu
from kvloom.store import KVStore

FAMILIES = folders()
pytestmark = [
    pytest.mark.skipif(
        StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
    ),
    pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size"),
]
GRID = 32
KINDS = ["auto", "int8", "int4:g8"]


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


@functools.cache
def kept_model(name: str) -> Any:
    """One that no test changes, so that it is tried once."""
    return stateful_model(name)


def pool_of(model: Any, kv: str = "auto", **options: Any) -> KVPool:
    options = {"page_size": 8, "max_tokens": 2000, "state_interval": GRID} | options
    return KVPool.for_model(model, kv, **options)


@torch.no_grad()
def logits_of(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    """Of the tokens that a cache lacks."""
    found: Tensor = model(ids[:, cache.get_seq_length() :], past_key_values=cache, **options).logits
    return found


@torch.no_grad()
def asked(model: Any, pool: KVPool, ids: Tensor, **begin: Any) -> tuple[int, Tensor]:
    """Tokens that are found, and the logits of the others; the text is committed."""
    cache = pool.begin(ids, **begin)
    found = int(cache.get_seq_length())
    logits = logits_of(model, cache, ids)
    pool.commit(cache, ids)
    pool.check()
    return found, logits


def cold(model: Any, ids: Tensor, kv: str = "auto", **options: Any) -> Tensor:
    return logits_of(model, pool_of(model, kv, **options).begin(ids), ids)


@pytest.mark.parametrize(
    ("name", "kv", "rows", "attention", "dtype"),
    pairs_in_turn(FAMILIES, KINDS, [1, 2], ["stock", "kvloom"], ["float32", "bfloat16"]),
)
def test_what_follows_a_prefix_has_the_bits_that_it_has_cold(
    name: str, kv: str, rows: int, attention: str, dtype: str
) -> None:
    model = small_model(name)
    if name != "inkling2":  # which computes in float32 alone
        model.to(getattr(torch, dtype))
    if attention == "kvloom" and name != "inkling2":  # which gives attention sinks of each query
        model.set_attn_implementation("kvloom")
    pool, ids = pool_of(model, kv), text(3 * GRID + 9, 1, rows)
    empty = pool_of(model, kv)
    wanted = logits_of(model, empty.begin(ids), ids)
    assert asked(model, pool, ids)[0] == 0
    found, logits = asked(model, pool, ids)
    assert found == 3 * GRID
    assert torch.equal(logits, wanted[:, found:])
    longer = torch.cat([ids[:, : 3 * GRID + 3], text(2 * GRID, 2, rows)], 1)
    found, logits = asked(model, pool, longer)
    assert found == 3 * GRID
    assert torch.equal(logits, logits_of(model, empty.begin(longer), longer)[:, found:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_generated_tokens_follow_a_prefix_as_they_follow_it_cold(name: str) -> None:
    """Prompt by prompt; tokens that were generated one by one are not on the grid, and computed anew."""
    model, ids, before = kept_model(name), text(2 * GRID + 5), 0
    pool = pool_of(model)
    options: dict[str, Any] = {"max_new_tokens": GRID, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None}
    for turn in range(3):
        fresh = model.generate(ids, past_key_values=pool_of(model).begin(ids), **options)
        cache = pool.begin(ids)
        assert cache.get_seq_length() == before // GRID * GRID
        warm = model.generate(ids, past_key_values=cache, **options)
        assert torch.equal(torch.stack(warm.logits), torch.stack(fresh.logits))
        pool.commit(cache, warm.sequences)
        pool.check()
        before, ids = ids.shape[1], torch.cat([warm.sequences, text(7, turn)], 1)


def test_a_third_text_is_found_where_two_parted() -> None:
    model = kept_model("falcon_h1")
    pool, common = pool_of(model), text(2 * GRID + 10)
    texts = [torch.cat([common, text(2 * GRID, seed)], 1) for seed in (1, 2, 3)]
    assert [asked(model, pool, ids)[0] for ids in texts] == [0, 0, 2 * GRID]


def test_a_text_whose_end_is_on_the_grid_is_found_but_for_its_last_piece() -> None:
    model = kept_model("falcon_h1")
    pool, ids = pool_of(model), text(3 * GRID)
    assert [asked(model, pool, ids)[0] for _ in range(2)] == [0, 2 * GRID]
    assert asked(model, pool, torch.cat([ids, text(1)], 1))[0] == 3 * GRID


def test_states_that_a_text_went_on_from_are_evicted_first() -> None:
    """Room for three: of a conversation of five turns the last states are there, and those of another."""
    model = kept_model("lfm2")
    nbytes = pool_of(model).report()["states"]["nbytes"]
    pool, other, ids = pool_of(model, max_state_bytes=3 * nbytes + 1), text(GRID + 1, 7), text(GRID + 1)
    asked(model, pool, other)
    for turn in range(5):
        ids = torch.cat([ids, text(GRID, turn)], 1)
        assert asked(model, pool, ids)[0] == (turn + 1) * GRID * (turn > 0)
    assert asked(model, pool, other)[0] == GRID
    states = pool.report()["states"]
    assert states["num_pages"] == 3 and states["interval"] == GRID and states["max_bytes"] == 3 * nbytes + 1


@pytest.mark.parametrize("name", WRONG)
def test_a_family_that_is_wrong_in_pieces_is_refused_with_what_was_measured(name: str) -> None:
    model = stateful_model(name)
    with pytest.raises(
        UnsupportedError, match=r"^model must (go on from its recurrent states|compute a text)"
    ):
        pool_of(model)
    whole = model(text(60)).logits
    with torch.no_grad():  # as it says, with transformers' own cache, too
        first = model(text(60)[:, :40], use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        pieces = model(text(60)[:, 40:], past_key_values=cache).logits
    assert (pieces - whole[:, 40:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_few_bits_whose_states_hardly_count_is_taken(name: str) -> None:
    """Qwen3-Next's here gives the same logits in bfloat16 with states of zeros."""
    dtype = torch.float32 if name == "inkling2" else torch.bfloat16  # which computes in float32 alone
    assert trial.why_wrong_in_pieces(small_model(name).to(dtype)) == ""


def test_a_model_is_tried_without_the_callers_autocast() -> None:
    model, ids = stateful_model("qwen3_next"), text(40)  # whose rounding would be that of bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = asked(model, pool_of(model), ids)
    assert not found


def test_a_model_is_tried_once_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pools of every kind, sessions and drafts together; a model that was changed is tried anew."""
    model, tried = stateful_model("lfm2"), list[Any]()
    monkeypatch.setattr(trial, "try_states", lambda x: (tried.append(x), try_states(x))[1])
    pool_of(model)
    pool_of(model, "bfloat16", page_size=16)
    assert trial.why_wrong_in_pieces(model) == ""
    assert tried == [model]
    weight = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"^model must compute a text in two pieces as in one"):
            pool_of(model)
    assert tried == [model] * 2
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
    pool_of(model)
    pool_of(model.to(torch.bfloat16))
    twin = copy.deepcopy(model)
    pool_of(twin)
    assert tried == [*[model] * 4, twin]


@pytest.mark.parametrize("name", FAMILIES)
def test_states_may_take_what_keys_and_values_of_all_tokens_take(name: str) -> None:
    model, num_tokens = kept_model(name), 100_000
    for kv in KINDS:
        cache = KVCache.for_model(model, kv)
        logits_of(model, cache, text(5))
        report = pool_of(model, kv, max_tokens=num_tokens).report()
        assert report["states"]["max_bytes"] == cache.nbytes_per_token * num_tokens


def test_padded_rows_are_computed_and_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = kept_model("falcon_h1"), text(2 * GRID, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    pool = pool_of(model)
    cache = pool.begin(ids, attention_mask=mask)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    out = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(out, model.generate(ids, **options))
    with caplog.at_level(logging.WARNING, "kvloom"):
        pool.commit(cache, out)
    assert "recurrent states depend on the padding of their row" in caplog.text
    assert pool.begin(ids).get_seq_length() == 0


@torch.no_grad()
def test_outputs_of_pieces_are_those_of_one_forward() -> None:
    model, ids = kept_model("falcon_h1"), text(3 * GRID + 5, rows=2)
    whole = model(ids).logits
    for keep in (0, 1, 3, GRID + 20, 3 * GRID + 5):
        kept = logits_of(model, pool_of(model).begin(ids), ids, logits_to_keep=keep)
        assert kept.shape == whole[:, -keep:].shape
        torch.testing.assert_close(kept, whole[:, -keep:], rtol=1e-4, atol=1e-4)
    base = model.model(ids, past_key_values=pool_of(model).begin(ids)).last_hidden_state
    torch.testing.assert_close(base, model.model(ids).last_hidden_state, rtol=1e-4, atol=1e-4)
    embeds = model.get_input_embeddings()(ids)
    cache = pool_of(model).begin(ids, content="embeddings")
    logits = model(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), past_key_values=cache).logits
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("given", [{"output_hidden_states": True}, {"return_dict": False}])
def test_what_cannot_be_cut_is_computed_whole_and_not_shared(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = kept_model("falcon_h1"), text(2 * GRID + 5)
    pool = pool_of(model)
    cache = pool.begin(ids)
    output = model(ids, past_key_values=cache, **given)
    assert torch.equal(output[0], model(ids, past_key_values=None, **given)[0])
    with caplog.at_level(logging.WARNING, "kvloom"):
        pool.commit(cache, ids)
    [name] = given
    assert f"into which {name} cannot be cut" in caplog.text
    assert pool.begin(ids).get_seq_length() == 0


@torch.no_grad()
def test_what_was_fed_beside_the_grid_is_not_shared() -> None:
    """Only whole pieces from the start are found; the cache itself holds all."""
    model, ids = kept_model("falcon_h1"), text(4 * GRID)
    pool = pool_of(model)
    cache = pool.begin(ids)
    for end in (GRID, GRID + 7, 4 * GRID):
        logits_of(model, cache, ids[:, :end])
    pool.commit(cache, ids)
    pool.check()
    assert pool.begin(ids).get_seq_length() == GRID


@torch.no_grad()
def test_a_fork_or_a_removal_changes_what_is_committed() -> None:
    """A grid that is cut forgets the pieces behind; a fork commits what it holds."""
    grid = Grid(GRID, 3 * GRID)
    grid.copies = {GRID: "first", 3 * GRID: "last"}
    grid.truncate(2 * GRID + 5)
    assert (grid.end, grid.copies) == (2 * GRID, {GRID: "first"})
    model, ids = kept_model("falcon_h1"), text(2 * GRID + 5, rows=2)
    pool = pool_of(model)
    cache = pool.begin(ids)
    logits_of(model, cache, ids)
    fork = cache.fork()
    fork.reorder_cache(torch.tensor([1, 0]))
    longer = torch.cat([ids.flip(0), text(GRID, rows=2)], 1)
    logits_of(model, fork, longer)
    pool.commit(fork, longer)
    for row in range(2):
        found, logits = asked(model, pool, ids[row : row + 1])
        assert found == 2 * GRID
        wanted = cold(model, ids[row : row + 1])[:, found:]  # in a batch of another size
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("is_new", [False, True])
def test_states_that_the_caller_changed_are_not_shared(
    is_new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = kept_model("falcon_h1"), text(2 * GRID + 5)
    pool = pool_of(model)
    for end in (GRID, 2 * GRID):  # the states are the model's own in between
        cache = pool.begin(ids)
        logits_of(model, cache, ids[:, :end])
        states = cache.layers[1].recurrent_states
        if is_new:
            states[0] = states[0] * 2
        else:
            states[0].mul_(2)
        logits_of(model, cache, ids)
        with caplog.at_level(logging.WARNING, "kvloom"):
            pool.commit(cache, ids)
        assert "keys, values or states were assigned, or changed in place" in caplog.text
        assert pool.begin(ids).get_seq_length() == 0


def test_another_state_of_the_model_finds_nothing() -> None:
    model, ids = stateful_model("qwen3_next" if "qwen3_next" in FAMILIES else "lfm2"), text(GRID + 5)
    pool = pool_of(model)
    asked(model, pool, ids)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    assert asked(model, pool, ids)[0] == 0
    assert asked(model, pool, ids, salt="other")[0] == 0
    assert asked(model, pool, ids)[0] == GRID


def test_why_names_states_that_nobody_kept() -> None:
    model, ids = kept_model("falcon_h1"), text(4 * GRID + 5)
    pool = pool_of(model)
    pool.record()
    asked(model, pool, ids)
    assert pool.why(ids) == []
    [miss] = pool.why(torch.cat([ids[:, : 2 * GRID + 3], text(GRID, 9)], 1))[:1]
    assert (miss.cause, miss.first, miss.num_pages) == ("no states", 0, 2 * GRID // 8)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_states_are_planned(name: str) -> None:
    model = kept_model(name)
    if name == "nemotron_h" and not CACHES_SEE_STATES:  # whose configuration names no layer that keeps them
        with pytest.raises(UnsupportedError, match=r"^config must be of a model that keeps recurrent"):
            kvloom.plan(model.config, context=64, page_size=8)
        return
    planned = kvloom.plan(model.config, context=64, page_size=8)
    states = pool_of(model, max_tokens=100_000).report()["states"]
    assert planned.state_page == states["nbytes"]
    assert planned.state_tokens == -(-states["nbytes"] * 100_000 // states["max_bytes"])


def test_bad_arguments_are_named() -> None:
    model = kept_model("falcon_h1")
    with pytest.raises(
        ArgumentError, match=r"^state_interval must be a positive multiple of page_size 8, got 12$"
    ):
        pool_of(model, state_interval=12)
    with pytest.raises(ArgumentError, match=r"^state_interval must be at least 1, got 0$"):
        pool_of(model, state_interval=0)
    nbytes = pool_of(model).report()["states"]["nbytes"]
    with pytest.raises(ArgumentError, match=rf"^max_state_bytes must be at least {nbytes} for"):
        pool_of(model, max_state_bytes=nbytes - 1)
    assert pool_of(model, page_size=24, state_interval=None).report()["states"]["interval"] == 264
    assert pool_of(family("Llama"), state_interval=12).report()["states"] is None


def _second(name: str, kv: str, url: str, path: Path) -> None:
    torch.set_num_threads(1)  # as here: sums of other threads differ in their last bits
    with KVStore(url, read="always") as store:
        model, ids = stateful_model(name), text(3 * GRID + 5)
        torch.save(asked(model, pool_of(model, kv, store=store), ids), path)


@pytest.mark.process
@pytest.mark.parametrize(("name", "kv"), [(x, "int8") for x in FAMILIES if x == "falcon_h1"])
def test_another_process_finds_a_prefix_in_a_store(name: str, kv: str, tmp_path: Path) -> None:
    model, ids, url = kept_model(name), text(3 * GRID + 5), f"file://{tmp_path}"
    with KVStore(url, read="always") as store:
        asked(model, pool := pool_of(model, kv, store=store), ids)
        assert pool.flush()
    args = name, kv, url, tmp_path / "result"
    (process := multiprocessing.get_context("spawn").Process(target=_second, args=args)).start()
    process.join()
    found, logits = torch.load(tmp_path / "result")
    assert found == 3 * GRID
    assert torch.equal(logits, cold(model, ids, kv)[:, found:])


def test_a_store_gives_states_of_the_same_grid_and_kind_only(tmp_path: Path) -> None:
    model, ids = kept_model("falcon_h1"), text(4 * GRID + 5)
    options: dict[str, Any]
    with KVStore(f"file://{tmp_path}", read="always") as store:
        asked(model, pool := pool_of(model, store=store), ids)
        assert pool.flush()
        assert pool_of(model, store=store).begin(ids).get_seq_length() == 4 * GRID
        for options in ({"state_interval": 2 * GRID}, {"kv": "int8"}, {"page_size": 16}):
            pool = pool_of(model, store=store, **options)
            assert asked(model, pool, ids)[0] == 0
            assert pool.flush()
            found, logits = asked(model, pool_of(model, store=store, **options), ids)
            assert found == 4 * GRID
            assert torch.equal(logits, cold(model, ids, **options)[:, found:])
