"""Models that choose what they attend to by keys of an index, which go wherever keys and values go."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.attention.test_latents import FAMILIES, family, generated
from oracles.pairs import in_turn
from oracles.round_trips import every_way
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache, cache_utils

import kvloom
from kvloom.errors import ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.attention import latents
from kvloom.integrations.transformers.attention.in_place import attention
from kvloom.integrations.transformers.exchange import exchange
from kvloom.integrations.transformers.session import continuous_batching
from kvloom.planning.model import ModelShape
from kvloom.store import KVStore

INDEXED = [
    name
    for name in FAMILIES
    if "update_indexer(" in Path(transformers.__path__[0], f"models/{name}/modeling_{name}.py").read_text()
]
pytestmark = pytest.mark.skipif(not INDEXED, reason="this version of transformers has no index keys")
MANY = 24
"""Heads of an index that hardly ever score two tokens alike; of those it chooses by their columns."""
ATTENTIONS = pytest.mark.parametrize("name", ["sdpa", "kvloom"])


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def num_chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """K of each call of attention to chosen tokens."""
    counts: list[int] = []
    module = importlib.import_module("kvloom.integrations.transformers.attention.in_place")
    attend = module.attend_chosen

    def counted(tokens: Any, query: Tensor, chosen: Tensor, *more: Any) -> Tensor:
        counts.append(chosen.shape[2])
        return attend(tokens, query, chosen, *more)

    monkeypatch.setattr(module, "attend_chosen", counted)
    # Some other test's model may still want it.
    monkeypatch.setattr(latents, "is_batch_invariant", lambda: False)
    return counts


def text(length: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(1))


def continued(model: Any, cache: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model(tokens, past_key_values=cache, **options).logits


@pytest.mark.parametrize(("name", "topk"), in_turn(INDEXED, [6, 64]))
def test_stock_attention_gives_the_stock_tokens(name: str, topk: int) -> None:
    model = family(name, index_topk=topk)
    stock = generated(model, num_beams=2)
    ours = generated(model, num_beams=2, past_key_values=KVCache.for_model(model, page_size=4))
    assert torch.equal(ours.sequences, stock.sequences)


@pytest.mark.parametrize("name", INDEXED)
def test_where_all_tokens_are_chosen_they_are_attended_to_as_ever(name: str, num_chosen: list[int]) -> None:
    model = family(name, index_topk=64)
    stock = generated(model)
    enable(model)
    assert torch.equal(generated(model).sequences, stock.sequences)
    assert not num_chosen


@pytest.mark.parametrize(("topk", "is_prompt_chosen"), [(6, True), (40, False)])
def test_a_prompt_reads_what_it_chooses_where_that_is_less(
    topk: int, is_prompt_chosen: bool, num_chosen: list[int]
) -> None:
    model = family("deepseek_v32", index_n_heads=MANY, index_topk=topk)
    expected = continued(model, DynamicCache(config=model.config), text(60))
    model.set_attn_implementation("kvloom")
    cache = KVCache.for_model(model)
    parts = [continued(model, cache, text(60)[:, :50])]
    assert num_chosen == [topk] * 2 * is_prompt_chosen
    num_chosen.clear()
    parts += [continued(model, cache, x) for x in text(60)[:, 50:].split([1, 4, 5], 1)]
    assert num_chosen == [topk] * 6
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kv", ["float16", "int8", "int4", "int4,recent=0", "int2"])
@pytest.mark.parametrize("name", [x for x in INDEXED if x in ("deepseek_v32", "mistral_large4")])
def test_chosen_latents_of_every_kind_are_read_in_place(name: str, kv: str, num_chosen: list[int]) -> None:
    """As the stock attention computes with the cache's own latents; of one layer, with rope keys or none."""
    options = {"kv_source_layers": [0], "no_rope_layers": [0], "indexer_types": ["full"]}
    model = family(name, kv_lora_rank=64, num_hidden_layers=1, **options)
    logits = []
    for own in ("kvloom", "eager"):
        model.set_attn_implementation(own)
        cache = KVCache.for_model(model, kv)
        continued(model, cache, text(80, 2))
        logits.append(continued(model, cache, text(81, 2)[:, 80:]))
    assert num_chosen == [6, 6]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_expanded_latents_are_masked_where_they_are_not_chosen(num_chosen: list[int]) -> None:
    model = family("deepseek_v32")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    stock = generated(model)
    enable(model)
    assert torch.equal(generated(model).sequences, stock.sequences)
    assert not num_chosen


def test_tensors_have_chosen_keys_too() -> None:
    x, indices = torch.randn(2, 4, 5, 8), torch.tensor([4, 0, 2, -1]).int().expand(2, 5, -1)
    hidden = torch.tensor([1, 3])  # the first query sees itself alone
    mask = torch.ones(5, 5).tril().bool()
    mask[:, hidden] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2)
    for given in (None, torch.ones(5, 5).tril().bool()[None, None]):
        found = attention(torch.nn.Module(), x, x, x, given, indices=indices)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@ATTENTIONS
@pytest.mark.parametrize("is_static", [False, True])
def test_index_keys_follow_every_change(name: str, is_static: bool) -> None:
    model = family("deepseek_v32", index_n_heads=MANY)

    def changed(cache: Any) -> list[Tensor]:
        ids = text(40, 2)
        found = [continued(model, cache, ids[:, :20])]
        cache.crop(-4)
        found.append(continued(model, cache, ids[:, 16:24]))
        cache.reorder_cache(torch.tensor([1, 0]))
        found.append(continued(model, cache, ids[:, 24:25]))
        if not is_static:
            cache.batch_repeat_interleave(2)
            found.append(continued(model, cache, ids[[0, 0, 1, 1], 25:26]))
            cache.batch_select_indices(torch.tensor([0, 3, 2]))
            found.append(continued(model, cache, ids[[0, 1, 1], 26:30]))
        cache.reset()
        return [*found, continued(model, cache, ids[:, 30:])]

    stock = changed(DynamicCache(config=model.config))
    model.set_attn_implementation(name)
    ours = changed(KVCache.for_model(model, page_size=4, static=is_static, max_tokens=120))
    for actual, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@ATTENTIONS
def test_rows_that_were_cropped_apart_go_on(name: str) -> None:
    model, ids = family("deepseek_v32", index_n_heads=MANY), text(25, 2)
    wanted = [model(x).logits[:, -5:] for x in (torch.cat((ids[:1, :17], ids[:1, 20:]), 1), ids[1:])]
    model.set_attn_implementation(name)
    cache = KVCache.for_model(model, page_size=4)
    continued(model, cache, ids[:, :20])
    cache.crop([-3, 0])
    mask = torch.ones(2, 25, dtype=torch.int64)
    mask[0, :3] = 0
    found = continued(model, cache, ids[:, 20:], attention_mask=mask, position_ids=mask.cumsum(1)[:, 20:] - 1)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("name", "is_in_place"), in_turn(INDEXED, [True, False]))
def test_two_turns_are_those_of_the_stock_cache(name: str, is_in_place: bool) -> None:
    model = family(name)

    def turns(cache: Any) -> Tensor:
        first = generated(model, input_ids=text(14), attention_mask=None, past_key_values=cache).sequences
        second = torch.cat((first, text(9)), 1)
        return generated(model, input_ids=second, attention_mask=None, past_key_values=cache).sequences

    stock = turns(DynamicCache(config=model.config))
    if is_in_place:
        model.set_attn_implementation("kvloom")
    assert torch.equal(turns(KVCache.for_model(model, page_size=4)), stock)


@pytest.mark.parametrize("is_static", [False, True])
def test_a_fork_continues_alone(is_static: bool) -> None:
    model, ids = family("deepseek_v32"), text(30, 2)
    cache = KVCache.for_model(model, page_size=4, static=is_static, max_tokens=120)
    continued(model, cache, ids[:, :18])
    fork = cache.fork()
    expected = continued(model, cache, ids[:, 18:])
    continued(model, fork, ids[:, 5:9])
    fork.crop(-4)
    assert torch.equal(continued(model, fork, ids[:, 18:]), expected)


@every_way
@pytest.mark.parametrize("name", [x for x in INDEXED if x in ("deepseek_v32", "mistral_large4")])
def test_a_saved_cache_goes_on(name: str, again: Callable[[Any], Any]) -> None:
    model, ids = family(name), text(30, 2)
    cache = KVCache.for_model(model, page_size=4)
    continued(model, cache, ids[:, :18])
    loaded = again(cache)
    expected = continued(model, cache, ids[:, 18:])
    assert torch.equal(continued(model, loaded, ids[:, 18:]), expected)


@ATTENTIONS
def test_a_static_cache_gives_the_stock_tokens(name: str) -> None:
    model = family("deepseek_v32")
    stock = generated(model, past_key_values=StaticCache(config=model.config, max_cache_len=40))
    model.set_attn_implementation(name)
    ours = generated(model, past_key_values=KVCache.for_model(model, static=True, max_tokens=40))
    assert torch.equal(ours.sequences, stock.sequences)


# Seconds for each layer. glm5_next gathers its keys to read their shape, which Dynamo does not trace.
@pytest.mark.compile
@pytest.mark.parametrize("name", [x for x in INDEXED if x in ("deepseek_v32", "hy_v4", "mistral_large4")])
def test_every_step_over_a_static_cache_is_one_graph(name: str) -> None:
    shared = {"indexer_types": ["full", "shared"], "kv_source_layers": [0, 0], "no_rope_layers": [1, 1]}
    num_layers = 1 if name == "deepseek_v32" else 2  # none of which share anything
    model, ids, counter = family(name, num_hidden_layers=num_layers, **shared), text(16), CompileCounter()
    model.set_attn_implementation("kvloom")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    plain, ours = (KVCache.for_model(model, static=True, max_tokens=40) for _ in range(2))
    for cache in (plain, ours):
        model(ids[:, :9], past_key_values=cache)
    for i in range(9, 16):
        step, position = ids[:, i : i + 1], {"position_ids": torch.tensor([[i]])}
        expected = continued(model, plain, step, **position)
        torch.testing.assert_close(continued(compiled, ours, step, **position), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kv", ["auto", "int4"])
@pytest.mark.parametrize("name", [x for x in INDEXED if x in ("deepseek_v32", "hy_v4", "mistral_large4")])
def test_a_pool_finds_index_keys_with_the_others(name: str, kv: str) -> None:
    model, ids = family(name), text(40)
    model.set_attn_implementation("kvloom")
    pool = KVPool.for_model(model, kv, max_tokens=512, page_size=8)
    logits = []
    for _ in range(2):
        cache = pool.begin(ids)
        logits.append(continued(model, cache, ids[:, cache.get_seq_length() :])[:, -1])
        pool.commit(cache, ids)
        pool.check()
    assert pool.report()["tokens_found"] == 32
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", ["auto", "int4,recent=0"])
@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4"])
def test_a_store_has_index_keys_with_the_others(name: str, kv: str, tmp_path: Path) -> None:
    model, ids, logits = family(name), text(40), []
    model.set_attn_implementation("kvloom")
    for num_found in (0, 32):
        store = KVStore(f"file://{tmp_path}", read="always")
        with store, KVPool.for_model(model, kv, max_tokens=512, page_size=8, store=store) as pool:
            cache = pool.begin(ids)
            found = cache.get_seq_length()
            assert found == num_found
            logits.append(continued(model, cache, ids[:, found:])[:, -1])
            pool.commit(cache, ids)
            pool.flush()
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_batch_invariance_a_token_has_the_same_bits_in_any_forward(dtype: torch.dtype) -> None:
    model, ids = family("deepseek_v32", index_n_heads=MANY).to(dtype), text(30, 3)
    enable(model, batch_invariant=True)
    whole = model(ids, use_cache=True).logits
    for cuts in ([30], [1] * 30, [7, 20, 3]):
        cache = KVCache.for_model(model)
        rows = [continued(model, cache, x) for x in ids[1:2].split(cuts, 1)]
        assert torch.equal(torch.cat(rows, 1), whole[1:2])
    disable(model)


@pytest.mark.parametrize(
    ("name", "kv"),
    in_turn([x for x in INDEXED if x != "glm5_next"], ["auto", "int4"]),  # which shows its data
)
def test_index_keys_are_planned(name: str, kv: str) -> None:
    model = family(name)
    cache = KVCache.for_model(model, kv, page_size=4)
    continued(model, cache, text(29, 2))
    planned = kvloom.plan(ModelShape.of(model.config), kv, context=29, batch=2, page_size=4)
    assert planned.cache + planned.scales == cache.nbytes


def test_another_number_of_keys_cannot_be_assigned() -> None:
    model = family("deepseek_v32")
    cache = KVCache.for_model(model)
    continued(model, cache, text(20))
    with pytest.raises(ShapeError, match="20 columns, those that have index keys, got 5"):
        cache.layers[1].keys = cache.layers[1].keys[:, :, :5]


def test_tokens_without_index_keys_are_refused() -> None:
    model = family("deepseek_v32")
    pairs = [(torch.zeros(1, 1, 5, 16), torch.zeros(1, 1, 5, 8)) for _ in range(2)]
    cache = KVCache.from_legacy_cache(pairs, model)
    with pytest.raises(StateError, match=r"one length, got \[0, 5\]"):
        continued(model, cache, text(3))
    with pytest.raises(StateError, match="index keys must be of all 5 tokens of the cache, got 0 and 3 new"):
        cache.update_indexer(torch.zeros(1, 3, 16), 0)
    shared = KVCache.for_model(family("hy_v4", num_hidden_layers=4))
    with pytest.raises(UnsupportedError, match="has an index by the configuration"):
        shared.update_indexer(torch.zeros(1, 3, 16), 3)


def test_a_broken_step_of_an_index_is_noticed() -> None:
    model = family("deepseek_v32")
    cache = KVCache.for_model(model)
    continued(model, cache, text(10))
    handle = model.model.layers[1].self_attn.indexer.register_forward_pre_hook(_broken)
    with pytest.raises(RuntimeError, match="broken"):
        continued(model, cache, text(1))
    handle.remove()
    with pytest.raises(StateError, match=r"one length, got \[10, 11\]"):
        continued(model, cache, text(1))
    cache.crop(-1)
    stock = DynamicCache(config=model.config)
    continued(model, stock, text(10))
    assert torch.equal(continued(model, cache, text(1)), continued(model, stock, text(1)))


def _broken(*args: Any) -> None:
    raise RuntimeError("broken")


def test_files_of_pairs_and_sessions_are_refused(tmp_path: Path) -> None:
    model = family("deepseek_v32")
    with pytest.raises(UnsupportedError, match="got index keys of DeepseekV32ForCausalLM"):
        exchange(str(tmp_path / "store"), str(tmp_path / "x.safetensors"), model, [1, 2, 3])
    with pytest.raises(UnsupportedError, match="indexed_attention"):
        continuous_batching(model)


def test_a_cache_warns_of_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvloom"):
        for name in INDEXED:
            KVCache.for_model(family(name))
    assert not [record for record in caplog.records if record.name.startswith("kvloom")]


KEEPS_POSITIONS = pytest.mark.skipif(
    "indexer_position_ids" not in inspect.getsource(cache_utils),
    reason="layers of this version keep no positions of an index",
)


@KEEPS_POSITIONS
@pytest.mark.skipif(not hasattr(transformers, "Qwen4ExpTextConfig"), reason="not in this version")
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
def test_positions_of_an_index_follow(options: dict[str, Any]) -> None:
    """A family without latents, whose index also keeps positions."""
    model = family("qwen4_exp")
    stock = generated(model, **options)
    enable(model)
    ours = generated(model, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    layer = ours.past_key_values.layers[3]
    fork = ours.past_key_values.fork().layers[3]
    rows, num_tokens = layer.keys.shape[0], layer.get_seq_length()
    assert layer.indexer_position_ids.shape[1:] == (rows, num_tokens)
    assert torch.equal(fork.indexer_position_ids, layer.indexer_position_ids)
    assert layer.indexer_keys.shape[:2] == (rows, num_tokens)


@KEEPS_POSITIONS
def test_positions_that_were_not_kept_are_missed() -> None:
    cache = KVCache.for_model(family("deepseek_v32"))
    layer = cache.layers[0]
    assert layer.indexer_position_ids is None
    assert layer.indexer_keys is None
    positions = torch.arange(20).expand(3, 2, -1)
    layer.indexer_position_ids = positions
    cache.update(torch.ones(2, 1, 20, 16), torch.ones(2, 1, 20, 8), 0)
    cache.update_indexer(torch.ones(2, 20, 16), 0)
    layer.crop(-5)
    assert torch.equal(layer.indexer_position_ids, positions[..., :15])
    layer.indexer_position_ids = None
    with pytest.raises(UnsupportedError, match="positions must be of all 15 tokens"):
        layer.indexer_position_ids  # noqa: B018
    assert cache_utils.DynamicIndexedLayer().indexer_position_ids is None
