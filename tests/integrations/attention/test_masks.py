"""What attention is told of visible columns: nothing, a compact mask, or the whole mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from integrations.attention.test_attention import MODERN, build_mask
from integrations.models.test_families import SMALL, padded_prompts
from oracles.language_models import make_model, make_prompts
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
)

from kvloom.caches import CacheFormat, PagedLayer
from kvloom.errors import ArgumentError, ShapeError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.attention.in_place import attention
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.integrations.transformers.attention.masks import CompactMask, attention_mask

CPU = torch.device("cpu")


def left_padded(*counts: int, width: int = 9) -> Tensor:
    """``[B, width]``, false in the first columns of each row."""
    return torch.arange(width) >= torch.tensor(counts).unsqueeze(1)


def logits_of(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **inputs).logits


# --- which of the three -------------------------------------------------------------------------------------


def test_there_is_no_mask_for_a_whole_text_and_for_a_lone_query() -> None:
    padding = left_padded(0, 0)
    assert attention_mask(**build_mask(2, 9, 9, padding, None)) is None
    assert attention_mask(**build_mask(2, 9, 9, padding, 50)) is None
    assert attention_mask(**build_mask(2, 1, 9, padding, None)) is None


@pytest.mark.parametrize(
    ("num_new", "padding", "window", "says"),
    [
        (4, left_padded(0, 0), None, (None, None)),
        (4, left_padded(0, 0), 50, (None, None)),
        (4, left_padded(3, 0), None, ([3, 0], None)),
        (1, left_padded(3, 0), None, ([3, 0], None)),
        (9, left_padded(3, 0), 3, ([3, 0], 3)),
        (4, left_padded(3, 0), 3, (None, 3)),  # padding lies before the window
    ],
)
def test_a_causal_mask_is_compact(num_new: int, padding: Tensor, window: int | None, says: Any) -> None:
    mask = attention_mask(**build_mask(2, num_new, 9, padding, window))
    assert isinstance(mask, CompactMask)
    assert (mask.first if mask.first is None else mask.first.tolist(), mask.window) == says
    assert mask.taken is None


def test_any_other_mask_is_whole() -> None:
    padding = left_padded(3, 0)
    padding[1, 5] = False
    mask = attention_mask(**build_mask(2, 4, 9, padding, None))
    assert isinstance(mask, Tensor)
    assert (mask.shape, mask.dtype) == ((2, 1, 4, 9), torch.bool)


@pytest.mark.parametrize("num_new", [1, 9])
def test_a_mask_that_a_model_insists_on_is_never_left_out(num_new: int) -> None:
    mask = attention_mask(**build_mask(2, num_new, 9, None, None), allow_is_causal_skip=False)
    assert torch.equal(mask & True, torch.ones(2, 1, num_new, 9, dtype=torch.bool).tril(9 - num_new))


# --- the compact mask ---------------------------------------------------------------------------------------


def compact() -> tuple[CompactMask, Tensor]:
    """A mask of 2 rows, 3 queries and 7 columns, 6 of them taken; and what it stands for."""
    mask = CompactMask((2, 1, 3, 7), CPU, torch.tensor([2, 0]), 6, window=3)
    seen = [["0011000", "0011100", "0001110"], ["0111000", "0011100", "0001110"]]
    return mask, torch.tensor([[[[x == "1" for x in query] for query in row]] for row in seen])


def test_a_compact_mask_computes_as_what_it_stands_for() -> None:
    mask, whole = compact()
    zeros = torch.zeros(2, 4, 3, 7)
    assert (mask.shape, mask.dtype, mask.device, mask.ndim) == (whole.shape, whole.dtype, CPU, 4)
    for actual, expected in [
        (mask.gather(), whole),
        (mask[:, 0, :, 1:], whole[:, 0, :, 1:]),
        (mask & whole, whole),
        (whole & mask, whole),
        (~mask, ~whole),
        (mask < 1, ~whole),
        (torch.where(mask, zeros, -1.0), torch.where(whole, zeros, -1.0)),
        (zeros.masked_fill(mask, 1.0), zeros.masked_fill(whole, 1.0)),
        (mask.expand(-1, 4, -1, -1).float(), whole.expand(-1, 4, -1, -1).float()),
    ]:
        assert torch.equal(actual, expected)


def test_a_mask_without_columns_for_stored_tokens_is_refused() -> None:
    """transformers would hide as many of the new tokens."""
    model = make_model("kvloom", num_layers=1)
    cache, ids = KVCache.for_model(model), torch.arange(3, 9)[None]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        mask = torch.ones_like(ids)
        with pytest.raises(
            ArgumentError, match=r"a column for each of 12 tokens, those of the cache .* got 6$"
        ):
            model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 6


def test_a_compact_mask_is_handed_on_as_it_is() -> None:
    """To another device, through ``generate``, and by a model to which it is given."""
    mask, whole = compact()
    for same in (mask.to("cpu"), mask.to(CPU, non_blocking=True), mask.contiguous(), copy.deepcopy(mask)):
        assert isinstance(same, CompactMask)
        assert torch.equal(same.gather(), whole)
    assert mask.to("meta").first.device.type == "meta"
    assert attention_mask(**build_mask(2, 3, 7, None, None) | {"attention_mask": mask}) is mask


def test_a_model_takes_a_compact_mask_that_was_made_ahead() -> None:
    model, inputs = make_model("kvloom"), make_prompts([6, 9])
    mask = attention_mask(**build_mask(2, 9, 9, inputs["attention_mask"].bool(), None))
    assert isinstance(mask, CompactMask)
    expected = logits_of(model, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    assert torch.equal(logits_of(model, inputs["input_ids"], attention_mask=mask), expected)


@pytest.mark.parametrize("columns", [1, 3, 4, 9])
def test_a_mask_of_integers_is_refused(columns: int) -> None:
    """Whatever its shape, it is no compact mask; ``sdpa`` refuses it, too."""
    model, tokens = make_model("kvloom"), make_prompts([9])["input_ids"]
    mask = torch.ones(1, 1, 1, columns, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"attention_mask must be bool, .* got torch.int64"):
        logits_of(model, tokens, attention_mask=mask)
    cache = KVCache.for_model(model)
    logits_of(model, tokens, past_key_values=cache)
    with pytest.raises(ShapeError, match=r"attention_mask must be bool, .* got torch.int64"):
        logits_of(model, tokens[:, :1], past_key_values=cache, attention_mask=mask)


def test_a_compact_mask_of_other_sizes_is_refused() -> None:
    x = torch.randn(2, 4, 3, 8)
    with pytest.raises(ArgumentError, match="must have 4 axes and 3 columns"):
        attention(torch.nn.Module(), x, x, x, CompactMask((2, 1, 3, 4), CPU))
    with pytest.raises(ArgumentError, match="must have 2 rows, 4 heads and 3 queries"):
        attention(torch.nn.Module(), x, x, x, CompactMask((2, 1, 2, 3), CPU))


def test_its_window_counts_where_the_cache_has_none() -> None:
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    states = LazyStates.pair(PagedLayer(CacheFormat()).append(key, key), key, key)
    mask = CompactMask((1, 1, 4, 9), CPU, window=3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, mask.gather())
    for keys, values in ((key, key), states):
        out, _ = attention(torch.nn.Module(), query, keys, values, mask)
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


# --- models that say themselves what is seen ----------------------------------------------------------------


def steps_of(model: Any, cache: Any, padded: bool) -> list[Tensor]:
    """Logits of a prompt and of steps of several tokens and of one; where row 0 is padded, those of row 1."""
    inputs = padded_prompts()
    mask, found = inputs["attention_mask"] if padded else torch.ones(2, 14), []
    tail = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(4))
    for tokens in (inputs["input_ids"], *tail.split([5, 1, 3], dim=1)):
        if found:
            mask = torch.cat([mask, mask.new_ones(tokens.shape)], dim=1)
        found.append(logits_of(model, tokens, past_key_values=cache, attention_mask=mask)[padded:])
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("config", "differs"),
    [
        ("GemmaConfig", {"head_dim": 8, "use_bidirectional_attention": True}),
        ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "use_bidirectional_attention": True}),
        ("LlamaConfig", {"is_causal": False}),
        # Of old, sdpa fails where such a model has a window.
        *[("MistralConfig", {"is_causal": False, "sliding_window": 8})] * MODERN,
    ],
    ids=str,
)
def test_bidirectional_text_gives_the_logits_of_sdpa(
    config: str, differs: dict[str, Any], ours: bool, padded: bool
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, config)(**SMALL | differs)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    expected = steps_of(model, DynamicCache(config=model.config), padded)
    model.set_attn_implementation("kvloom")
    cache = KVCache.for_model(model, page_size=4) if ours else DynamicCache(config=model.config)
    for actual, want in zip(steps_of(model, cache, padded), expected, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-3, atol=1e-3)


def test_a_model_that_computes_with_its_mask_gives_the_logits_of_sdpa() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        transformers.DogeConfig(**SMALL | {"keep_window_size": 8}), attn_implementation="sdpa"
    ).eval()
    for padded in (False, True):
        model.set_attn_implementation("sdpa")
        expected = steps_of(model, DynamicCache(config=model.config), padded)
        model.set_attn_implementation("kvloom")
        for cache in (KVCache.for_model(model, page_size=4), DynamicCache(config=model.config)):
            for actual, want in zip(steps_of(model, cache, padded), expected, strict=True):
                torch.testing.assert_close(actual, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pads", ["none", "left", "right"])
def test_an_encoder_sees_both_sides(pads: str) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    inputs = padded_prompts()
    mask = {"none": None, "left": inputs["attention_mask"], "right": inputs["attention_mask"].flip(1)}[pads]
    with torch.no_grad():
        expected = model(inputs["input_ids"], attention_mask=mask).last_hidden_state[1]
        model.set_attn_implementation("kvloom")
        actual = model(inputs["input_ids"], attention_mask=mask).last_hidden_state[1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_biased_positions_of_encoder_and_decoder_give_the_stock_logits(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    options = options | {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for inputs in (padded_prompts(), {"input_ids": padded_prompts()["input_ids"]}):
        model.set_attn_implementation("eager")
        expected = model.generate(**inputs, **options)
        for implementation in ("eager", "kvloom"):
            model.set_attn_implementation(implementation)
            cache = EncoderDecoderCache(KVCache.for_model(model, page_size=4), DynamicCache())
            actual = model.generate(**inputs, past_key_values=cache, **options)
            assert torch.equal(actual.sequences, expected.sequences)
            torch.testing.assert_close(
                torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
            )
