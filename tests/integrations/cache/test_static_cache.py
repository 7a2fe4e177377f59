"""A static ``KVCache``: one graph for all decode steps, and memory that stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.attention.test_attention import MODERN
from integrations.models.test_families import FAMILIES, STOCK, continued, family
from oracles.language_models import generate, make_model, make_prompts
from oracles.pairs import in_turn, pairwise
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, DynamicCache, StaticCache

from kvloom import ops
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache

ALL_KINDS = [
    "auto",
    "int8:g16",
    "int4:g16,recent=0",
    "int4:g16,rotate=both,recent=0",
    "int4:g16,recent=5",
    "int2:g16",
]
KINDS = pytest.mark.parametrize("kv", ALL_KINDS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def static(model: Any, kv: str = "auto", max_tokens: int = 64) -> KVCache:
    return KVCache.for_model(model, kv=kv, max_tokens=max_tokens, static=True)


def absolute(position: Tensor) -> dict[str, Tensor]:
    """What a compiled step must be told besides, where transformers still counts on its own."""
    return {} if MODERN else {"cache_position": position[0]}


def addresses(cache: KVCache) -> list[int]:
    return [x.data_ptr() for layer in cache.layers for x in layer.pages.storage.tensors if x is not None]


@pytest.mark.parametrize(
    ("attention", "kv", "lengths"), pairwise(["sdpa", "kvloom"], ALL_KINDS, [[9], [5, 12, 1]]), ids=str
)
def test_static_cache_gives_the_tokens_of_a_growing_one(attention: str, kv: str, lengths: list[int]) -> None:
    model, inputs = make_model(attention), make_prompts(lengths)
    growing = generate(model, inputs, KVCache.for_model(model, kv=kv))
    fixed = generate(model, inputs, static(model, kv))
    assert torch.equal(fixed.sequences, growing.sequences)
    tolerance = 1e-4 if kv == "auto" else 1e-2  # a code may differ by one
    for expected, actual in zip(growing.logits, fixed.logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "attention", "mode"),
    in_turn(
        [name for name in FAMILIES if name not in ("Falcon-H1", "DeepSeek-V3")],
        ["sdpa", "kvloom"],
        [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}],
    ),
    ids=str,
)
def test_family_gives_the_stock_tokens(name: str, attention: str, mode: dict[str, Any]) -> None:
    model = family(name, STOCK.get(name))
    expected = continued(model, DynamicCache(config=model.config), **mode)
    try:
        continued(model, StaticCache(config=model.config, max_cache_len=40), **mode)
    except (TypeError, KeyError) as error:
        pytest.skip(f"this model takes no static cache in this version: {error}")
    if attention == "kvloom":
        model.set_attn_implementation("kvloom")
    ours = KVCache.for_model(model, max_tokens=33, static=True)
    assert torch.equal(continued(model, ours, **mode).sequences, expected.sequences)


@pytest.mark.compile
@pytest.mark.parametrize(("kv", "attention"), in_turn(ALL_KINDS, ["kvloom", "sdpa"]))
def test_every_decode_step_is_one_graph(kv: str, attention: str) -> None:
    model, prompt = make_model(attention, num_layers=1), make_prompts([9])["input_ids"]
    ours, growing = static(model, kv), KVCache.for_model(model, kv=kv)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        token = model(prompt, past_key_values=ours).logits[:, -1:].argmax(-1)
        model(prompt, past_key_values=growing)
        where = addresses(ours)
        for i in range(6):
            position = torch.tensor([[9 + i]])
            compiled = step(token, past_key_values=ours, position_ids=position, **absolute(position)).logits
            expected = model(token, past_key_values=growing, position_ids=position).logits
            torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
            token = expected.argmax(-1)
    assert counter.frame_count == 1
    assert addresses(ours) == where
    assert int(ours.get_seq_length()) == 15


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "ours", "backend"),
    [("Llama", True, "eager"), ("Gemma2", True, "aot_eager"), ("Gemma2", False, "eager")],
)
def test_generate_compiles_steps_whose_masks_it_made_ahead(name: str, ours: bool, backend: str) -> None:
    """In place, of this library's static cache and of transformers' own."""
    model = family(name, "kvloom", num_hidden_layers={"Llama": 1, "Gemma2": 2}[name])  # of each kind one
    new = {"max_new_tokens": 6, "min_new_tokens": 6}
    expected = continued(model, KVCache.for_model(model), **new).sequences
    cache = static(model) if ours else StaticCache(config=model.config, max_cache_len=64)
    compilation = CompileConfig(backend=backend, fullgraph=True, mode=None)
    compilation._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    assert torch.equal(continued(model, cache, compile_config=compilation, **new).sequences, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.compile
def test_compiled_step_that_does_not_fit_writes_to_no_other_row() -> None:
    model = make_model("kvloom", num_layers=1)
    cache = static(model, max_tokens=8)
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        model(make_prompts([7, 7])["input_ids"], past_key_values=cache)
        position = torch.tensor([[7], [7]])
        step(torch.tensor([[5], [6]]), past_key_values=cache, position_ids=position, **absolute(position))
        before = [x.clone() for x in cache.layers[0].pages.storage.tensors if x is not None]
        with pytest.raises(
            IndexError if ops.cpu_kernels() else ArgumentError, match=r"slots must be in \[0, 16\)"
        ):
            position = position + 1
            step(torch.tensor([[5], [6]]), past_key_values=cache, position_ids=position, **absolute(position))
    after = [x for x in cache.layers[0].pages.storage.tensors if x is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_overflow_is_refused_before_anything_is_written() -> None:
    model = make_model()
    cache = static(model, max_tokens=12)
    with torch.no_grad():
        model(make_prompts([10])["input_ids"], past_key_values=cache)
        keys = cache.layers[0].keys
        with pytest.raises(StateError, match="max_tokens must hold 3 more tokens, got 12 with 10 taken"):
            model(make_prompts([3])["input_ids"], past_key_values=cache)
    assert torch.equal(cache.layers[0].keys, keys)
    assert int(cache.get_seq_length()) == 10


@KINDS
def test_rows_move_and_forks_part(kv: str) -> None:
    model, inputs = make_model(), make_prompts([7, 7])
    stock, ours = KVCache.for_model(model, kv=kv), static(model, kv, 16)
    for cache in (stock, ours):
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
        cache.batch_select_indices(torch.tensor([True, True, False, True]))
        cache.crop(-2)
    fork = ours.fork()
    tokens = torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        logits = [model(tokens, past_key_values=c).logits for c in (stock, ours, fork)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits[1], logits[2])
    for layer, other in zip(stock.layers, ours.layers, strict=True):
        if kv == "auto":
            torch.testing.assert_close(other.keys[:, :, :6], layer.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(other.values[:, :, :6], layer.values, rtol=1e-4, atol=1e-4)


def test_reset_keeps_the_memory() -> None:
    model, inputs = make_model(), make_prompts([9, 4])
    cache = static(model)
    first = generate(model, inputs, cache).sequences
    where, nbytes = addresses(cache), cache.nbytes
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(generate(model, inputs, cache).sequences, first)
    assert (addresses(cache), cache.nbytes) == (where, nbytes)
    assert nbytes == 2 * 64 * cache.nbytes_per_token


def test_static_needs_its_size() -> None:
    with pytest.raises(ArgumentError, match="max_tokens must be given for a static cache"):
        KVCache.for_model(make_model(), static=True)


def test_rows_of_a_static_cache_end_together() -> None:
    model = make_model()
    cache = static(model)
    generate(model, make_prompts([4, 5]), cache)
    with pytest.raises(UnsupportedError, match="cannot be cropped row by row"):
        cache.crop([-1, 0])


@pytest.mark.parametrize("is_static", [False, True])
def test_the_legacy_format_is_a_copy(is_static: bool) -> None:
    model = make_model("sdpa")
    cache = KVCache.for_model(model, max_tokens=64, static=is_static)
    config = model.config
    sizes = 2, config.num_key_value_heads, 5, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(torch.ones(sizes), torch.ones(sizes), layer)
    pairs = cache.to_legacy_cache()
    keys = cache.layers[0].keys
    cache.crop(-3)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.zeros(sizes)[:, :, :3], torch.zeros(sizes)[:, :, :3], layer)
    assert all((x == 1).all() for pair in pairs for x in pair)
    assert (keys[:, :, :5] == 1).all()
