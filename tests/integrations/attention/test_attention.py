"""``attn_implementation="kvloom"``: the numbers of other implementations, read where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from integrations.models.test_families import FAMILIES, STOCK, continued, family, padded_prompts
from integrations.test_generate_modes import KINDS, MODES, NAMES, ONE_ROW, continue_with, ours
from oracles.bits import generator
from oracles.language_models import generate, make_model, make_prompts
from oracles.pairs import in_turn
from torch import Tensor
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from kvloom.caches import CacheFormat, PagedLayer, Tokens
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.attention.in_place import attention
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.integrations.transformers.attention.masks import CompactMask, attention_mask

MODERN = "cache_position" not in ALL_MASK_ATTENTION_FUNCTIONS["sdpa"].__code__.co_varnames


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Tokens]:
    """Filled with what is gathered while a test runs."""
    found: list[Tokens] = []
    gather = Tokens.gather

    def spy(self: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found.append(self)
        return gather(self, dtype)

    monkeypatch.setattr(Tokens, "gather", spy)
    return found


# Latent keys are expanded, and a shared layer reads the tensors of the other where caches have none for it.
SHARES = ("Gemma3n",) if hasattr(cache_utils, "DummyLayer") else ("Gemma3n", "Gemma4")


@pytest.mark.parametrize("name", [x for x in FAMILIES if x not in ("DeepSeek-V3", *SHARES)])
def test_attention_gathers_nothing(name: str, gathers: list[Tokens]) -> None:
    model = family(name, "kvloom")
    continued(model, KVCache.for_model(model, page_size=4), num_beams=2)
    assert not gathers


@pytest.mark.parametrize(("kv", "count"), [("auto", 0), ("int8:g8", 16 * 2)])
def test_other_attention_gathers_what_must_be_dequantized(gathers: list[Tokens], kv: str, count: int) -> None:
    model = family("Llama", "sdpa")
    continued(model, KVCache.for_model(model, kv), max_new_tokens=16)
    assert len(gathers) == count


@pytest.mark.parametrize(("mode", "kv"), in_turn([*MODES], NAMES[::-1]))
def test_mode_gives_the_tokens_of_gathered_keys_and_values(mode: str, kv: str) -> None:
    model = make_model()
    inputs = make_prompts([17] if mode in ONE_ROW else [11, 5, 14])
    if mode in ONE_ROW:
        inputs["input_ids"][0, 9:] = inputs["input_ids"][0, :8]
    expected = continue_with(model, inputs, ours(model, kv), **MODES[mode])
    model.set_attn_implementation("kvloom")
    assert continue_with(model, inputs, ours(model, kv), **MODES[mode]) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@KINDS
def test_small_dtypes_stay_near_the_gathered_logits(kv: str, dtype: torch.dtype) -> None:
    if kv.startswith("int2"):
        pytest.skip(
            "roundings differ before the second layer, and a number between two codes moves by two scales"
        )
    model, inputs = make_model(dtype=dtype), make_prompts([6, 11])
    kv = "auto" if kv == "float32" else kv
    expected = generate(model, inputs, KVCache.for_model(model, kv=kv)).logits[0]
    model.set_attn_implementation("kvloom")
    actual = generate(model, inputs, KVCache.for_model(model, kv=kv)).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "gpt-oss", "Llama4"])
def test_attention_serves_other_caches_too(name: str) -> None:
    model = family(name)
    expected = continued(model, DynamicCache(config=model.config))
    with torch.no_grad():
        whole = model(**padded_prompts(), use_cache=False).logits[1]
    model.set_attn_implementation("kvloom")
    assert torch.equal(continued(model, DynamicCache(config=model.config)).sequences, expected.sequences)
    with torch.no_grad():
        torch.testing.assert_close(
            model(**padded_prompts(), use_cache=False).logits[1], whole, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "gpt-oss"])
def test_attention_serves_a_static_cache_whose_columns_are_not_all_taken(name: str) -> None:
    model = family(name, STOCK.get(name))
    expected = continued(model, DynamicCache(config=model.config)).sequences
    model.set_attn_implementation("kvloom")
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(continued(model, cache).sequences, expected)


def test_implementation_can_change_between_steps() -> None:
    model, inputs = make_model(), make_prompts([9, 14])
    steps = []
    for implementations in (["sdpa"] * 4, ["kvloom", "sdpa", "eager", "kvloom"]):
        cache, mask, tokens = KVCache.for_model(model), inputs["attention_mask"], inputs["input_ids"]
        for implementation in implementations:
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                logits = model(tokens, attention_mask=mask, past_key_values=cache).logits[:, -1]
            steps.append(logits)
            mask, tokens = torch.cat([mask, mask.new_ones(2, 1)], 1), torch.tensor([[5], [9]])
    for expected, actual in zip(steps[:4], steps[4:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# --- masks --------------------------------------------------------------------------------------------------


def build_mask(rows: int, num_new: int, num_stored: int, padding: Tensor | None, window: int | None) -> Any:
    """Arguments as ``create_causal_mask`` and its like hand over."""
    seen = num_stored - num_new
    first = 0 if window is None else max(seen - window + 1, 0)
    where = (
        {"q_length": num_new, "q_offset": seen, "device": torch.device("cpu")}
        if MODERN
        else {"cache_position": torch.arange(seen, num_stored)}
    )
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return {
        "batch_size": rows, "kv_length": num_stored - first, "kv_offset": first, "mask_function": function,
        "attention_mask": padding, "config": transformers.LlamaConfig(), "local_size": window, **where,
    }  # fmt: skip


@given(st.data())
def test_any_mask_gives_the_numbers_of_the_whole_mask(data: st.DataObject) -> None:
    """Of the mask that ``sdpa`` gets, which is none where the module says all."""
    rows, num_new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    num_stored = num_new + data.draw(st.sampled_from([0, 1, 4, 9]))
    window = data.draw(st.sampled_from([None, 1, 3, 6, 50]))
    module = torch.nn.Module()
    module.is_causal = data.draw(st.booleans(), label="is_causal")
    padding = None
    if data.draw(st.booleans(), label="padded"):
        kind = data.draw(st.sampled_from(["left", "right", "holes"]))
        padding = torch.ones(rows, num_stored, dtype=torch.bool)
        for row in padding:
            count = data.draw(st.integers(0, num_stored - 1))
            if kind == "left":
                row[:count] = False
            elif kind == "right":
                row[num_stored - count :] = False
            else:
                row[torch.rand(num_stored, generator=generator(count)) < 0.4] = False
    arguments = build_mask(rows, num_new, num_stored, padding, window)
    whole = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)
    if whole is None:
        whole = torch.ones(rows, 1, num_new, arguments["kv_length"], dtype=torch.bool)
        if module.is_causal and num_new > 1:
            whole = whole.tril()
    query, key, value = (
        torch.randn(rows, heads, count, 8, generator=generator(i))
        for i, (heads, count) in enumerate(((4, num_new), (2, whole.shape[3]), (2, whole.shape[3])))
    )
    out, _ = attention(module, query, key, value, attention_mask(**arguments))
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    weights = scores.masked_fill(~whole, float("-inf")).softmax(-1).nan_to_num(0.0)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_behind_stored_tokens_attention_is_causal_whatever_the_module_says(padded: bool) -> None:
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :2] = not padded
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8)
    mask = attention_mask(**build_mask(2, 3, 6, padding, None))
    free, bound = torch.nn.Module(), torch.nn.Module()
    free.is_causal, bound.is_causal = False, True
    outs = [attention(module, query, key, key, mask)[0] for module in (free, bound)]
    seen = torch.ones(3, 6, dtype=torch.bool).tril(3) & padding[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, seen)
    for out in outs:
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_without_a_mask_the_module_or_the_argument_says_whether_it_is_causal() -> None:
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8)
    free = torch.nn.Module()
    free.is_causal = False
    for causal, (module, argument) in [
        (False, (free, None)), (True, (free, True)), (True, (torch.nn.Module(), None)),
        (False, (torch.nn.Module(), False)),
    ]:  # fmt: skip
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=causal)
        actual, _ = attention(module, query, key, key, None, is_causal=argument)
        torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_a_given_mask_says_all(rows: int, heads: int, queries: int, kind: torch.dtype) -> None:
    """Of one row, head or query it serves all of them; later columns are seen where it says so."""
    query, key, value = (torch.randn(2, n, m, 8) for n, m in ((4, 3), (2, 5), (2, 5)))
    seen = torch.rand(rows, heads, queries, 5) < 0.7
    seen[..., 0] = seen[..., 0, 4] = True
    mask = seen if kind == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    out, _ = attention(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "compact"])
def test_position_bias_is_added_to_the_scores(mask: str) -> None:
    query, key, bias = (torch.randn(2, 4, n, m) for n, m in ((3, 8), (5, 8), (3, 5)))
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, 3, 5)
    given_mask = {
        "none": None, "bool": seen, "float": torch.zeros(2, 1, 3, 5).masked_fill(~seen, float("-inf")),
        "compact": CompactMask((2, 1, 3, 5), torch.device("cpu")),
    }[mask]  # fmt: skip
    out, _ = attention(torch.nn.Module(), query, key, key, given_mask, position_bias=bias, scaling=0.3)
    weights = (query @ key.mT * 0.3 + bias).masked_fill(~seen, float("-inf")).softmax(-1)
    torch.testing.assert_close(out, (weights @ key).transpose(1, 2), rtol=1e-4, atol=1e-5)


# --- what update returns ------------------------------------------------------------------------------------


def stored_states() -> tuple[LazyStates, LazyStates, Tensor, Tensor]:
    """Keys and values of 2 rows, 2 heads and 5 tokens, and the tensors that they stand for."""
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4)
    layer = PagedLayer(CacheFormat(page_size=2))
    return *LazyStates.pair(layer.append(key, value), key, value), key, value


def test_stored_states_have_the_shape_of_what_they_stand_for(gathers: list[Tokens]) -> None:
    keys, values, key, value = stored_states()
    assert (keys.shape, keys.dtype, keys.device) == (key.shape, key.dtype, key.device)
    assert values.shape == value.shape
    assert not gathers


def test_stored_states_compute_like_tensors(gathers: list[Tokens]) -> None:
    keys, values, key, value = stored_states()
    query = torch.randn(2, 2, 1, 8)
    for actual, expected in [
        (torch.matmul(query, keys.transpose(2, 3)), torch.matmul(query, key.transpose(2, 3))),
        (query @ keys.mT, query @ key.mT),
        (torch.cat([keys, key], dim=2), torch.cat([key, key], dim=2)),
        (keys[:, :, 1:3], key[:, :, 1:3]),
        (keys * 2 + 1, key * 2 + 1),
        (2 * keys - 1, 2 * key - 1),
        (keys / 2, key / 2),
        (-keys, -key),
        (torch.stack(list(values)), value),
        (values.float().contiguous(), value),
        (torch.nn.functional.scaled_dot_product_attention(query, keys, values),
         torch.nn.functional.scaled_dot_product_attention(query, key, value)),
    ]:  # fmt: skip
        assert torch.equal(actual, expected)
    assert len(values) == 2
    assert len(gathers) == 1


def test_attention_gathers_states_that_do_not_belong_together(gathers: list[Tokens]) -> None:
    keys, values, key, value = stored_states()
    query = torch.randn(2, 4, 1, 8)
    expected, _ = attention(torch.nn.Module(), query, key, value, None)
    for pair in ((keys, value), (key, values)):
        assert torch.equal(attention(torch.nn.Module(), query, *pair, None)[0], expected)
    assert len(gathers) == 1


# --- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1}, {"output_attentions": True}, {"head_mask": torch.ones(4)},
        {"block_indices": torch.zeros(1, 3, 2)},
        {"sinks": torch.zeros(1, 4, 3, 1)}, {"cache": object()},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_what_it_cannot_do_is_refused(options: dict[str, Any]) -> None:
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(UnsupportedError, match=f"has no {next(iter(options))}"):
        attention(torch.nn.Module(), x, x, x, None, **options)


def test_a_mask_of_two_axes_is_refused() -> None:
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(ArgumentError, match=r"attention_mask must have 4 axes and 3 columns, got \[1, 3\]"):
        attention(torch.nn.Module(), x, x, x, torch.ones(1, 3))


@pytest.mark.parametrize("shape", [(3, 1, 3, 3), (1, 2, 3, 3), (1, 1, 2, 3)], ids=str)
def test_a_mask_of_other_rows_heads_or_queries_is_refused(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 4, 3, 8)
    with pytest.raises(ArgumentError, match="must have 2 rows, 4 heads and 3 queries, or 1 for all, got"):
        attention(torch.nn.Module(), x, x, x, torch.ones(shape, dtype=torch.bool))


ROUNDINGS = 16 * 2**-8
"""Allowed distance of logits that bfloat16 rounded in another order, of each operation of four layers."""


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Falcon-H1", "DeepSeek-V3"])
def test_float32_under_autocast_gives_the_stock_logits(name: str) -> None:
    """RoPE leaves keys in float32 beside values of autocast's dtype, in which attention computes."""
    if name not in FAMILIES:
        pytest.skip("this version has no such layers")
    model, ids = family(name), make_prompts([14])["input_ids"] % 99

    def logits(cache: Any) -> Tensor:
        return torch.cat([model(x, past_key_values=cache).logits for x in ids.split((9, 1, 4), 1)], 1)

    options: list[dict[str, Any]] = [{}, {"kv": "bfloat16"}]
    options += [] if name == "Falcon-H1" else [{"static": True, "max_tokens": 32}]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = logits(DynamicCache(config=model.config))
        for given in options:
            rounding = ROUNDINGS if "static" in given else 0  # masks make sums of others
            found = logits(KVCache.for_model(model, **given))
            assert (found - expected).abs().max() <= rounding * expected.abs().max()
        model.set_attn_implementation("kvloom")
        for given in (*options, {"kv": "int8:g8"}):
            found = logits(KVCache.for_model(model, **given))
            assert (found - expected).norm() < ROUNDINGS * expected.norm()
        assert (model(ids, use_cache=False).logits - expected).norm() < ROUNDINGS * expected.norm()


@pytest.mark.parametrize("first", [True, False])
def test_a_text_in_and_out_of_autocast_is_refused_by_name(first: bool) -> None:
    model = make_model(num_layers=1)
    cache, ids = KVCache.for_model(model), make_prompts([9])["input_ids"]
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            model(ids[:, :8], past_key_values=cache)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=not first),
            pytest.raises(ShapeError, match=r"in one dtype of torch\.autocast, or without it"),
        ):
            model(ids[:, 8:], past_key_values=cache)
        assert cache.get_seq_length() == 8
