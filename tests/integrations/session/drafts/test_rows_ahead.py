"""Prompt lookup of several rows: what ``generate`` gives without it, bit for bit, in fewer forwards."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from integrations.models.test_families import family
from oracles.language_models import make_model, make_prompts
from oracles.pairs import pairwise
from oracles.stateful_models import small_model
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
)

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import Guesses
from kvloom.integrations.transformers.versions import IS_4

needs_5 = pytest.mark.skipif(IS_4, reason="prompt lookup of several rows is for transformers 5")
LOOKUP = {"prompt_lookup_num_tokens": 10}
LENGTHS = [19, 12, 30, 7]
NEW = 40


@pytest.fixture(autouse=True)
def _forwards_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are as long as they can be, whatever forwards take on this machine."""
    monkeypatch.setattr(Costs, "note", lambda self, num_tokens, seconds: None)


class OneLater(StoppingCriteria):
    """Finishes a row after a number of tokens that is its own."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] - 30 > torch.arange(9, 9 + 4 * len(input_ids), 4)


class Streamed(list[list[int]]):
    """A streamer that keeps what it is given."""

    def put(self, value: Tensor) -> None:
        self.append(value.tolist())

    def end(self) -> None:
        self.append([])


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.3},
    "wide sampling": {"do_sample": True, "top_k": 4},
    "penalty": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "ends": {"eos_token_id": [*range(3, 13)]},
    "late ends": {"eos_token_id": [*range(3, 20)], "min_new_tokens": 20},
    "criteria": {"eos_token_id": 5, "stopping_criteria": [OneLater()]},
}


def sliding(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model with a window that passes during each test."""
    torch.manual_seed(7)
    config = MistralConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
        sliding_window=20,
        pad_token_id=0,
    )
    return MistralForCausalLM(config).to(dtype).eval()


def full() -> Any:
    return make_model(dtype=torch.bfloat16)


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(
        **inputs, return_dict_in_generate=True, output_logits=True, output_scores=True, **options
    )


@contextmanager
def guessing(texts: list[list[int]], num_prompt: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Guesses that know the text of each row, are wrong now and then, and of any length."""
    draw, true = random.Random(0), Guesses.after

    def after(self: Guesses, generated: list[int], most: int, forced: Any = ()) -> list[int]:
        true(self, generated, most, forced)
        prompt = self._lookup._text[: self._num_prompt].tolist()
        row = next(x for x in texts if x[num_prompt - len(prompt) : num_prompt] == prompt)
        rest = row[num_prompt + len(generated) :][: draw.randrange(most + 1)]
        return [draw.randrange(3, 199) if draw.random() < 0.1 else x for x in rest]

    with monkeypatch.context() as patched:
        patched.setattr(Guesses, "after", after)
        yield


def counted(model: Any) -> list[int]:
    """Numbers of tokens of the forwards of a model from now on."""
    counts: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: counts.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    return counts


def expect_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("logits", "scores"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
    caches = [getattr(x, CACHE_ARGUMENT) for x in (found, expected)]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert [x.begins for x in caches[0].sequences] == [x.begins for x in caches[1].sequences]
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exact": (full, "auto"),
    "int8": (full, "int8"),
    "residual window": (full, "int4:g16,recent=24"),
    "window": (sliding, "auto"),
    "both windows": (sliding, "int8:g16,recent=8"),
}


@needs_5
@pytest.mark.parametrize(("mode", "kind"), pairwise([*MODES], [*KINDS]))
def test_several_rows_have_the_bits_of_generate_without_lookup(
    mode: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kv = KINDS[kind]
    model, inputs, streams = make(), make_prompts(LENGTHS), [Streamed(), Streamed()]
    enable(model, kv=kv)
    expected = generated(model, inputs, streamer=streams[0], **MODES[mode])
    counts = counted(model)
    with guessing(expected.sequences.tolist(), max(LENGTHS), monkeypatch):
        found = generated(model, inputs, streamer=streams[1], **LOOKUP, **MODES[mode])
    expect_same(found, expected)
    assert streams[0] == streams[1]
    assert len(counts) < len(expected.logits) or "sampling" in mode
    assert max(counts[1:]) > 1


@needs_5
def test_text_that_copies_takes_fewer_forwards() -> None:
    model, order = full(), torch.randperm(199)
    weight = torch.randn(199, 64, dtype=torch.bfloat16) * 99
    model.model.embed_tokens.weight.data, model.lm_head.weight.data = weight, weight[order.argsort()]
    text = [5]
    while len(text) < 60:
        text.append(int(order[text[-1]]))
    rows = torch.tensor([text[n : n + 20] + text[n : n + 3] for n in (0, 3, 9)])
    enable(model)
    options = {"eos_token_id": None, "attention_mask": torch.ones_like(rows)}
    expected = generated(model, {"input_ids": rows}, max_new_tokens=15, **options)
    counts = counted(model)
    expect_same(generated(model, {"input_ids": rows}, max_new_tokens=15, **options, **LOOKUP), expected)
    assert len(counts) <= 4


@needs_5
@pytest.mark.parametrize(("kind", "most"), [("exact", 276), ("window", 208)])
def test_rows_stay_together_where_pages_are_few(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that just holds what is computed without lookup."""
    (make, kv), inputs = KINDS[kind], make_prompts(LENGTHS)
    model, outs = make(), list[Any]()
    enable(model, kv=kv)
    counts = counted(model)
    for lookup in ({}, LOOKUP):
        cache = KVCache.for_model(model, kv=kv, page_size=1, max_tokens=most)
        with guessing(outs[0].sequences.tolist() if outs else [], max(LENGTHS), monkeypatch):
            outs.append(generated(model, inputs, **{CACHE_ARGUMENT: cache}, eos_token_id=None, **lookup))
    expect_same(outs[1], outs[0])
    assert max(counts[1:NEW]) == 1 < max(counts[NEW + 1 :])


@needs_5
def test_a_filled_cache_goes_on_and_its_rows_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = full(), make_prompts([20, 14])
    enable(model)
    outs = []
    start = {name: x[:, :11] for name, x in inputs.items()}
    for lookup in ({}, LOOKUP):
        cache = KVCache.for_model(model)
        model(**start, **{CACHE_ARGUMENT: cache})
        with guessing(outs[0].sequences.tolist() if outs else [], 20, monkeypatch):
            outs.append(generated(model, inputs, **{CACHE_ARGUMENT: cache}, **lookup) if lookup else None)
        outs[-1] = outs[-1] or generated(model, inputs, **{CACHE_ARGUMENT: cache})
    expect_same(outs[1], outs[0])


@needs_5
def test_rows_end_together_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = full(), make_prompts(LENGTHS)
    enable(model)
    expected = generated(model, inputs)

    class Break(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] == 42:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

    cache = KVCache.for_model(model)
    with guessing(expected.sequences.tolist(), 30, monkeypatch), pytest.raises(KeyboardInterrupt):
        generated(model, inputs, **{CACHE_ARGUMENT: cache}, stopping_criteria=[Break()], **LOOKUP)
    assert cache.get_seq_length() == 41 and cache.sequences[0].begins == [0] * 4
    keys = getattr(expected, CACHE_ARGUMENT).layers[-1].keys
    assert torch.equal(cache.layers[-1].keys, keys[:, :, :41])


@needs_5
def test_a_copy_looks_up_and_a_disabled_model_does_not() -> None:
    model, inputs = full(), make_prompts([9, 5])
    enable(model)
    other, expected = copy.deepcopy(model), generated(model, inputs).sequences
    disable(model)
    assert torch.equal(generated(other, inputs, **LOOKUP).sequences, expected)
    with pytest.raises(ValueError, match="batch_size"):
        generated(model, inputs, **LOOKUP)


def stretched() -> Any:
    """A model with other frequencies for texts of more than 16 tokens."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "hidden states": (full, {"output_hidden_states": True}, "output_hidden_states"),
    "attentions": (full, {"output_attentions": True}, "output_attentions"),
    "other processes": (full, {"synced_gpus": True}, "synced_gpus"),
    "recurrent states": (lambda: small_model("qwen3_next"), {}, "Qwen3Next.*recurrent states"),
    "both in a layer": (lambda: family("Falcon-H1"), {}, "FalconH1.*recurrent states"),
    "other frequencies": (stretched, {}, "RoPE.*max_length 49"),
}


@needs_5
@pytest.mark.parametrize("what", [*REFUSED])
def test_what_would_differ_is_refused_by_name(what: str) -> None:
    make, options, message = REFUSED[what]
    model = make()
    enable(model)
    inputs = {name: x.clamp(max=98) for name, x in make_prompts([9, 5]).items()}
    with pytest.raises(
        UnsupportedError, match=f"prompt_lookup_num_tokens must be None for 2 rows .*{message}"
    ):
        generated(model, inputs, **LOOKUP, **options)


@needs_5
def test_other_caches_are_refused() -> None:
    model, inputs = full(), make_prompts([9, 9])
    enable(model)
    with pytest.raises(ValueError, match="batch_size"):
        generated(model, inputs, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}, **LOOKUP)
    with pytest.raises(ArgumentError, match="at least 1, got 0"):
        generated(model, inputs, prompt_lookup_num_tokens=0)
    static = KVCache.for_model(model, static=True, max_tokens=64)
    with pytest.raises(UnsupportedError, match="keys and values in fixed storage"):
        generated(model, inputs, **{CACHE_ARGUMENT: static}, **LOOKUP)
    found = KVPool.for_model(model, max_tokens=512).begin(inputs["input_ids"])
    with pytest.raises(UnsupportedError, match="PoolCache"):
        generated(model, inputs, **{CACHE_ARGUMENT: found}, **LOOKUP)


@pytest.mark.parametrize("options", [{"num_return_sequences": 2}, {"assistant_model": "itself"}])
def test_what_else_has_one_row_in_transformers_stays_so(options: dict[str, Any]) -> None:
    model = full()
    enable(model)
    own = {"assistant_model": model} if "assistant_model" in options else options
    with pytest.raises(ValueError, match=r"batch_size|num_return_sequences"):
        generated(model, make_prompts([9, 5]), **LOOKUP, **own)
    beams = generated(model, make_prompts([9, 5]), num_beams=2, **LOOKUP).sequences
    assert torch.equal(beams, generated(model, make_prompts([9, 5]), num_beams=2).sequences)


@pytest.mark.skipif(not IS_4, reason="as transformers 4 refuses it")
def test_transformers_4_refuses_several_rows() -> None:
    model = full()
    enable(model)
    with pytest.raises(ValueError, match="batch_size"):
        generated(model, make_prompts([9, 5]), **LOOKUP)
