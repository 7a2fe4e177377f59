"""``enable``: a model uses our cache with nothing passed, and gives the tokens that it gave before."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import make_model, make_prompts
from torch._dynamo.exc import Unsupported
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, continuous_batching, disable, enable
from kvloom.integrations.transformers.session import SESSIONS
from kvloom.integrations.transformers.versions import IS_4

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
STEPS = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**inputs, **{**STEPS, "pad_token_id": 0, **options})


def prompts(mode: str = "greedy") -> dict[str, Any]:
    return make_prompts([17] if mode == "prompt lookup" else [9, 5])


@pytest.mark.parametrize("mode", list(MODES))
def test_generate_uses_our_cache_and_gives_the_same_tokens(mode: str) -> None:
    model, inputs = make_model("sdpa"), prompts(mode)
    expected = generate(model, inputs, **MODES[mode]).sequences
    enable(model)
    out = generate(model, inputs, **MODES[mode])
    assert isinstance(out.past_key_values, KVCache) and model.config._attn_implementation == "kvloom"
    assert torch.equal(out.sequences, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_model_of_peft_is_the_one_within() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make_model("sdpa"),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).eval()
    expected = generate(model, prompts()).sequences
    enable(model)
    out = generate(model, prompts())
    assert isinstance(out.past_key_values, KVCache)
    assert torch.equal(out.sequences, expected)
    disable(model)
    assert isinstance(generate(model, prompts()).past_key_values, DynamicCache)


def test_arguments_are_those_of_for_model() -> None:
    model = make_model()
    enable(model, kv="int8:g16", page_size=8)
    cache = generate(model, prompts()).past_key_values
    expected = KVCache.for_model(model, "int8:g16", page_size=8)
    assert cache.layers[0].pages.sequences.format == expected.layers[0].pages.sequences.format


@torch.no_grad()
def test_forward_makes_a_cache_where_one_is_used() -> None:
    model, inputs = make_model(), prompts()
    expected = model(**inputs).logits
    enable(model)
    out = model(**inputs)
    assert isinstance(out.past_key_values, KVCache)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    assert isinstance(model(inputs["input_ids"], None, None, None).past_key_values, KVCache)
    assert model(**inputs, use_cache=False).past_key_values is None
    again = model(inputs["input_ids"][:, -1:], past_key_values=out.past_key_values)
    assert again.past_key_values is out.past_key_values


def test_a_cache_of_the_caller_wins() -> None:
    model, inputs = make_model(), prompts()
    enable(model, "int8:g16")
    theirs = DynamicCache(config=model.config)
    assert generate(model, inputs, past_key_values=theirs).past_key_values is theirs
    assert model(**inputs, past_key_values=(theirs := DynamicCache())).past_key_values is theirs
    assert model(inputs["input_ids"], None, None, theirs := DynamicCache()).past_key_values is theirs
    ours = KVCache.for_model(model)
    assert generate(model, inputs, past_key_values=ours).past_key_values is ours


def test_a_cache_that_generate_would_fill_with_the_whole_text_in_each_step_is_refused() -> None:
    """transformers answers another text: ``use_cache=False`` may stand in a model's configuration."""
    model, inputs = make_model(), make_prompts([9])
    expected = generate(model, inputs).sequences
    enable(model)
    cache = KVCache.for_model(model)
    with pytest.raises(ArgumentError, match=r"^use_cache must be True with a cache, .* got False"):
        generate(model, inputs, past_key_values=cache, use_cache=False)
    model.generation_config.use_cache = False
    with pytest.raises(ArgumentError, match=r"^use_cache must be True with a cache, .* got False"):
        generate(model, inputs, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, inputs).sequences, expected)
    assert torch.equal(generate(model, inputs, past_key_values=cache, use_cache=True).sequences, expected)


@pytest.mark.skipif(not hasattr(StaticCache, "get_query_offset"), reason="this version slices in another way")
@pytest.mark.parametrize("lengths", [[9], [9, 5]], ids=["plain", "padded"])
def test_a_cache_that_holds_the_whole_text_is_refused_by_name(lengths: list[int]) -> None:
    """``generate`` would feed the text a second time."""
    model, inputs = make_model(), make_prompts(lengths)
    expected = generate(model, inputs).sequences
    enable(model)
    cache = KVCache.for_model(model)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, past_key_values=cache)
    with pytest.raises(
        ArgumentError, match=r"^input_ids must have tokens that are not in the cache, got 9 and"
    ):
        generate(model, inputs, past_key_values=cache)
    assert cache.get_seq_length() == 9
    cache.crop(-1)
    assert torch.equal(generate(model, inputs, past_key_values=cache).sequences, expected)


def test_a_cache_implementation_of_the_caller_wins() -> None:
    model = make_model()
    enable(model)
    out = generate(model, prompts(), cache_implementation="static", disable_compile=True)
    assert isinstance(out.past_key_values, StaticCache)
    assert generate(model, prompts(), use_cache=False).past_key_values is None


@pytest.mark.compile
@pytest.mark.parametrize(
    ("how", "kv", "options"),
    [
        ("model", "int8:g16", {}),
        ("model", "auto", {"static": True, "max_tokens": 32}),
        ("generate", "int4:g16", {"static": True, "max_tokens": 32}),
    ],
    ids=["model-paged", "model-static", "generate-static"],
)
def test_a_compiled_model_gives_the_same_tokens(how: str, kv: str, options: dict[str, Any]) -> None:
    """Pages are taken between the graphs."""
    model, ids, new = make_model(num_layers=1), prompts()["input_ids"][:1], {"max_new_tokens": 2}
    enable(model, kv, **options)
    expected = model.generate(ids, do_sample=False, **new)[:, -2:]
    torch._dynamo.reset()
    with torch.no_grad():
        if how == "model":
            step = torch.compile(model, backend="eager")
            out = step(ids, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            position = torch.tensor([[ids.shape[1]]])
            after = step(token, past_key_values=out.past_key_values, position_ids=position).logits
            found = torch.cat((token, after[:, -1:].argmax(-1)), 1)
        else:
            compilation = CompileConfig(backend="eager", fullgraph=True, mode="reduce-overhead")
            compilation._compile_all_devices = True
            found = model.generate(ids, do_sample=False, compile_config=compilation, **new)[:, -2:]
    torch._dynamo.reset()
    assert torch.equal(found, expected)


@pytest.mark.compile
def test_one_graph_with_pages_says_what_to_use_instead() -> None:
    model, ids = make_model(num_layers=1), prompts()["input_ids"][:1]
    enable(model)
    step = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="a cache that is given to the model"):
        step(ids)
    with pytest.raises(
        Unsupported, match="fullgraph=True with a KVCache of static=True that has seen the prompt"
    ):
        step(ids, past_key_values=KVCache.for_model(model))
    torch._dynamo.reset()


@pytest.mark.skipif(IS_4, reason="sessions are of later versions")
@pytest.mark.parametrize("order", ["enable", "enable sessions none", "sessions enable none"])
def test_transformers_own_sessions_begin_as_before(order: str) -> None:
    model, ids = make_model("eager"), prompts()["input_ids"][:1]
    model.generation_config.eos_token_id = -1
    # Left alone it takes most of the memory that is free.
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    model.generation_config.continuous_batching_config = small

    def own() -> list[Any]:
        options = {"max_new_tokens": 6, "do_sample": False}
        (output,) = model.generate_batch(ids.tolist(), progress_bar=False, **options).values()
        paged = model.generate(ids, cache_implementation="paged", **options)
        return [output.generated_tokens, paged.flatten().tolist()]

    expected = own()
    for step in order.split():
        if step == "enable":
            enable(model, "int8:g16")
        else:
            continuous_batching(model, None if step == "none" else "int8:g16")
    assert own() == expected
    assert model.config._attn_implementation == "kvloom"  # again
    assert isinstance(generate(model, prompts()).past_key_values, KVCache)
    disable(model)
    assert own() == expected and SESSIONS not in vars(model)
    assert model.config._attn_implementation == "eager"


def test_training_is_refused_until_disabled() -> None:
    model, inputs = make_model("sdpa").train(), prompts()
    enable(model)
    with pytest.raises(UnsupportedError, match="gradient"):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    disable(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(x.grad is not None and x.grad.any() for x in model.parameters())


def test_disable_takes_it_back() -> None:
    model, inputs = make_model("sdpa"), prompts()
    expected = generate(model, inputs).sequences
    before = dict(vars(model))
    for _ in range(2):
        disable(model)
        enable(model)
        enable(model, "int8:g16")
        disable(model)
        disable(model)
    assert vars(model).keys() == before.keys() and not model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"
    out = generate(model, inputs)
    assert type(out.past_key_values) is DynamicCache and torch.equal(out.sequences, expected)


def test_attention_that_was_set_in_between_stays() -> None:
    model = make_model("sdpa")
    enable(model)
    model.set_attn_implementation("eager")
    assert isinstance(generate(model, prompts()).past_key_values, KVCache)
    disable(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_is_enabled_and_on_its_own(how: str) -> None:
    model = make_model("sdpa")
    enable(model, "int8:g16")
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    expected = generate(model, prompts()).sequences
    disable(model)
    out = generate(other, prompts())
    assert isinstance(out.past_key_values, KVCache) and torch.equal(out.sequences, expected)
    disable(other)
    assert type(generate(other, prompts()).past_key_values) is DynamicCache
    assert other.config._attn_implementation == "sdpa"


def test_an_assistant_may_be_enabled_too() -> None:
    model, assistant, inputs = make_model("sdpa"), make_model("sdpa"), make_prompts([9])
    expected = generate(model, inputs, assistant_model=assistant).sequences
    enable(model)
    enable(assistant)
    assert torch.equal(generate(model, inputs, assistant_model=assistant).sequences, expected)


def test_an_encoder_decoder_model_has_its_decoder_served() -> None:
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                   decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0,
                   bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)
    ).eval()  # fmt: skip
    inputs = {"input_ids": torch.randint(3, 64, (2, 9))}
    expected = generate(model, inputs).sequences
    enable(model)
    out = generate(model, inputs)
    assert isinstance(out.past_key_values, EncoderDecoderCache)
    assert isinstance(out.past_key_values.self_attention_cache, KVCache)
    assert torch.equal(out.sequences, expected)
    assert isinstance(model(**inputs).past_key_values.self_attention_cache, KVCache)


def test_what_has_no_keys_and_values_is_refused_by_name() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    bert = BertModel(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                intermediate_size=16))  # fmt: skip
    with pytest.raises(UnsupportedError, match="MambaForCausalLM"):
        enable(mamba)
    for model in (make_model().config, torch.nn.Linear(2, 2), None):
        with pytest.raises(ArgumentError, match="model must be a PreTrainedModel, got"):
            enable(model)
        with pytest.raises(ArgumentError, match="model must be a PreTrainedModel, got"):
            disable(model)
    with pytest.raises(ArgumentError, match="kv must be one of"):
        enable(make_model(), "int7")
    assert not mamba._forward_pre_hooks and not bert._forward_pre_hooks


def test_a_cache_that_drops_what_a_model_attends_to_is_refused() -> None:
    """Windows of another model would leave out tokens without a word; more than is attended to is right."""
    plain = make_model()
    sizes = {name: value for name, value in plain.config.to_dict().items() if name in SIZES}
    near = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)).eval()
    inputs = {"input_ids": torch.arange(3, 33)[None], "max_new_tokens": 4, "do_sample": False}
    expected = near.generate(**inputs)
    enable(plain), enable(near)
    with pytest.raises(ArgumentError, match="got the last 8 tokens in layer 0, which attends to all"):
        plain.generate(**inputs, past_key_values=KVCache.for_model(near))
    assert torch.equal(near.generate(**inputs, past_key_values=KVCache.for_model(plain)), expected)


def test_attention_that_cannot_be_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("sdpa")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
    with caplog.at_level(logging.WARNING, "kvloom"):
        enable(model)
    assert "attention of LlamaForCausalLM stays 'sdpa'" in caplog.text
    assert isinstance(generate(model, prompts()).past_key_values, KVCache)


def test_what_was_done_is_said(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("sdpa")
    with caplog.at_level(logging.INFO, "kvloom"):
        enable(model, kv="int8,smooth=none")
    layers = model.config.num_hidden_layers
    said = f"keeps kv='int8,smooth=none' in {layers} of {layers} layers, smoothed keys in 0; attention reads"
    assert said in caplog.text and capsys.readouterr().err == ""
    enable(model, verbose=True)
    assert "LlamaForCausalLM keeps kv='auto'" in capsys.readouterr().err
