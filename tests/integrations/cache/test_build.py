"""For which models and tuples a ``KVCache`` can be made, and what is said where it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import family
from oracles.language_models import FakeQuantCache, make_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, EncoderDecoderCache

from kvloom.errors import ArgumentError, ConfigError, OutOfPages, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.session import continuous_batching
from kvloom.integrations.transformers.versions import IS_4
from kvloom.planning.model import ModelShape


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def cut(model: Any, keep: list[int]) -> Any:
    """Some layers of a model; the configuration still names all."""
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in keep)
    return model


# --- models that use fewer layers than their configuration names --------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "kvloom"])
def test_a_decoder_of_fewer_layers_than_the_encoder(attention: str) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=4, num_decoder_layers=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(text(9, rows=2), **options)
    model.set_attn_implementation(attention)
    own = KVCache.for_model(model, page_size=4)
    assert len(own.layers) == 2
    both = EncoderDecoderCache(own, DynamicCache())
    assert torch.equal(model.generate(text(9, rows=2), past_key_values=both, **options), expected)


@pytest.mark.parametrize("static", [{}, {"static": True, "max_tokens": 40}], ids=["growing", "static"])
@pytest.mark.parametrize("keep", [[0], [0, 1], [0, 2]], ids=str)
def test_a_model_that_was_cut(keep: list[int], static: dict[str, Any]) -> None:
    model = cut(make_model(), keep)
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(text(9), past_key_values=DynamicCache(config=model.config), **options)
    cache = KVCache.for_model(model, **static)
    assert torch.equal(model.generate(text(9), past_key_values=cache, **options), expected)
    fork = cache.fork()
    assert torch.equal(
        model(text(2), past_key_values=fork).logits, model(text(2), past_key_values=cache).logits
    )


def test_a_pool_serves_a_model_that_was_cut() -> None:
    model = cut(make_model(), [0, 2])
    pool = KVPool.for_model(model, page_size=4, max_tokens=64)
    for found in (0, 8):
        cache = pool.begin(text(9))
        assert cache.get_seq_length() == found
        model(text(9)[:, found:], past_key_values=cache)
        pool.commit(cache, text(9))


def test_a_cache_of_a_deeper_model_says_so() -> None:
    model, cache = cut(make_model(), [0, 1]), KVCache.for_model(make_model())
    model(text(5), past_key_values=cache)
    sentence = (
        r"layers must have one length, got \[0, 5\].*or the model has no layers \[2\], which the cache has"
    )
    with pytest.raises(StateError, match=sentence):
        model(text(5), past_key_values=cache)


def test_a_cache_of_a_shallower_model_says_so() -> None:
    cache = KVCache.for_model(cut(make_model(), [0, 1]))
    with pytest.raises(
        ArgumentError, match=r"layer_idx must be in \[0, 2\), got 2: .* a model of fewer layers"
    ):
        make_model()(text(5), past_key_values=cache)


# --- what is no model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [KVCache.for_model, lambda model: KVPool.for_model(model, max_tokens=64)])
@pytest.mark.parametrize(
    ("given", "got"),
    [("a/path", "'a/path'"), (transformers.LlamaConfig(), "the configuration LlamaConfig"), (None, "None")],
    ids=["path", "config", "none"],
)
def test_what_is_no_model_is_named(make: Callable[[Any], Any], given: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=f"^model must be a PreTrainedModel, got {got}$"):
        make(given)


# --- the legacy format --------------------------------------------------------------------------------------


def legacy(model: Any, tokens: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    cache = DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    return tuple((layer.keys, layer.values) for layer in cache.layers)


@pytest.mark.parametrize("attention", ["sdpa", "kvloom"])
@pytest.mark.parametrize("kv", ["auto", "int8:g16"])
@pytest.mark.parametrize("is_known", [True, False], ids=["model", "no model"])
def test_a_tuple_continues(is_known: bool, kv: str, attention: str) -> None:
    model = make_model(attention)
    pairs = legacy(model, text(9, rows=2))
    stock = DynamicCache(config=model.config) if kv == "auto" else FakeQuantCache(config=model.config)
    for i, pair in enumerate(pairs):
        stock.update(*pair, i)
    options = {"kv": kv, "page_size": 4}
    cache = KVCache.from_legacy_cache(pairs, model if is_known else None, **options)
    assert (cache.get_seq_length(), cache.num_rows) == (9, 2)
    model.set_attn_implementation("sdpa")
    expected = model(text(2, 1, 2), past_key_values=stock).logits
    model.set_attn_implementation(attention)
    logits = model(text(2, 1, 2), past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    if kv == "auto":
        again = KVCache.from_legacy_cache(cache.to_legacy_cache())
        assert torch.equal(again.layers[2].keys, cache.layers[2].keys)


def test_a_tuple_is_copied() -> None:
    model = make_model()
    pairs = legacy(model, text(9))
    cache = KVCache.from_legacy_cache(pairs, model)
    before = cache.layers[0].keys
    pairs[0][0].zero_()
    assert torch.equal(cache.layers[0].keys, before)


def test_no_tuple_gives_an_empty_cache() -> None:
    model = make_model()
    cache = KVCache.from_legacy_cache(None, model)
    model(text(5), past_key_values=cache)
    assert (cache.get_seq_length(), len(KVCache.from_legacy_cache().layers)) == (5, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda p: [(k, v, k) for k, v in p],
            ArgumentError,
            r"past_key_values\[0\] must be a key and a value",
        ),
        (
            lambda p: [(k, v, k, v) for k, v in p],
            ArgumentError,
            "model must be given, and attend to an encoder, for keys of an encoder, got LlamaForCausalLM",
        ),
        (
            lambda p: [(k[0], v[0]) for k, v in p],
            ArgumentError,
            r"past_key_values\[0\] must be a key and a value",
        ),
        (
            lambda p: [p[0], (p[1][0][:, :, 2:], p[1][1][:, :, 2:]), p[2]],
            ArgumentError,
            r"must have one number of rows and tokens in every layer, got \[\(1, 7\), \(1, 9\)\]",
        ),
        (lambda p: [*p, p[0]], ArgumentError, "past_key_values must be of the 3 layers of model, got 4"),
    ],
)
def test_tuples_that_do_not_fit_are_refused(
    change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    model = make_model()
    with pytest.raises(error, match=message):
        KVCache.from_legacy_cache(change(legacy(model, text(9))), model)


def test_a_group_that_does_not_divide_the_head_dim_is_refused() -> None:
    pairs = legacy(make_model(), text(9))
    with pytest.raises(ConfigError, match="head_dim must be a multiple of group 32, got 16"):
        KVCache.from_legacy_cache(pairs, kv="int8:g32")


# --- fixed storage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "gpt-oss", "Llama4"])
def test_fixed_windows_keep_what_they_need(name: str) -> None:
    """As many tokens as the window, and those that a rejected draft takes back."""
    model = family(name, "eager")
    cache = KVCache.for_model(model, static=True, max_tokens=500)
    model(text(300), past_key_values=cache)
    for layer in cache.layers:
        slots = 500 if layer.window is None else 8 + 32
        assert layer.pages.nbytes == slots * layer.pages.nbytes_per_token
    growing = KVCache.for_model(model)
    model(text(300), past_key_values=growing)
    for count in (1, 7, 32, 40):
        logits = [model(text(count, 1), past_key_values=c).logits for c in (cache, growing)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    for c in (cache, growing):
        c.crop(-32)
    logits = [model(text(3, 1), past_key_values=c).logits for c in (cache, growing)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention", ["eager", "kvloom"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_a_crop_behind_a_fixed_window_is_refused_before_anything_changes(name: str, attention: str) -> None:
    """What is left behind a window does not grow by a crop."""
    model = family(name, attention)
    cache = KVCache.for_model(model, static=True, max_tokens=200)
    model(text(100), past_key_values=cache)
    for removed, length in ((33, 100), (13, 80)):
        if length < int(cache.get_seq_length()):  # ``crop(0)`` keeps nothing with transformers 4
            cache.crop(length - int(cache.get_seq_length()))
        expected = model(text(1, 1), past_key_values=cache.fork()).logits
        with pytest.raises(StateError, match="num_tokens must keep at least 68 tokens or none"):
            cache.crop(-removed)
        assert int(cache.get_seq_length()) == length
        assert torch.equal(model(text(1, 1), past_key_values=cache.fork()).logits, expected)
    cache.crop(-12)
    short = KVCache.for_model(model)
    model(text(100)[:, :68], past_key_values=short)
    logits = [model(text(1, 1), past_key_values=c).logits for c in (cache, short)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.compile
def test_windows_that_move_compile_once() -> None:
    model = family("Gemma2", "kvloom")
    growing, fixed = KVCache.for_model(model), KVCache.for_model(model, static=True, max_tokens=64)
    counter = CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=counter)
    for c in (growing, fixed):
        model(text(36), past_key_values=c)
    for i in range(8):
        position = {"position_ids": torch.tensor([[36 + i]])}
        if "cache_position" in transformers.cache_utils.Cache.get_mask_sizes.__code__.co_varnames:
            position["cache_position"] = torch.tensor([36 + i])
        logits = step(text(1, i), past_key_values=fixed, **position).logits
        torch.testing.assert_close(
            logits, model(text(1, i), past_key_values=growing).logits, rtol=1e-3, atol=1e-3
        )
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_too_little_memory_for_fixed_storage_says_what_would_fit() -> None:
    model = make_model()
    cache = KVCache.for_model(model, static=True, max_tokens=10**13)
    new = torch.zeros(2, 2, 5, 16)
    with pytest.raises(OutOfPages) as told:  # before transformers makes a mask as long
        cache.update(new, new, 0)
    asked = 2 * 10**13 * 3 * 2 * 2 * 16 * 4
    found = re.fullmatch(
        rf"max_tokens must be at most (\d+) for (\d+) free bytes, got {10**13}, which takes {asked} bytes "
        "for 2 sequences in 3 layers",
        str(told.value),
    )
    assert found is not None
    fits, free = map(int, found.groups())
    assert fits == free // (2 * 3 * 2 * 2 * 16 * 4)
    assert isinstance(told.value, MemoryError)
    assert (cache.num_rows, cache.nbytes) == (0, 0)
    small = KVCache.for_model(model, static=True, max_tokens=min(fits, 64))
    model(text(5, rows=2), past_key_values=small)


def test_a_static_cache_beside_recurrent_states_is_refused() -> None:
    if not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
        pytest.skip("this version has no such layers")
    why = "static must be False for FalconH1ForCausalLM, whose layers keep recurrent states beside keys"
    with pytest.raises(UnsupportedError, match=why):
        KVCache.for_model(family("Falcon-H1"), static=True, max_tokens=64)


@pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "LinearAttentionLayer"),
    reason="this version names no kinds of layers",
)
def test_attention_alone_in_a_class_of_hybrid_models_is_served_by_every_door() -> None:
    """As Granite 4.0's dense models are published."""
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=2,
        layer_types=["attention"] * 2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=0,
        num_experts_per_tok=0, position_embedding_type="rope", mamba_n_heads=8, mamba_d_head=16,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GraniteMoeHybridForCausalLM(config).eval()
    ids, options = text(20), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    for cache in (
        KVCache.for_model(model),
        KVCache.for_model(model, static=True, max_tokens=32),
        KVPool.for_model(model, max_tokens=64).begin(ids),
    ):
        assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options), expected)
    enable(model)
    assert torch.equal(model.generate(ids, **options), expected)
    disable(model)
    assert len(ModelShape.of(config).layers) == 2
    if not IS_4:
        continuous_batching(model)
        (output,) = model.generate_batch([ids[0].tolist()], progress_bar=False, **options).values()
        assert output.generated_tokens == expected[0, 20:].tolist()
