"""A model whose sessions would compute something else is refused, before anything is asked of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import EXPERTS, FAMILIES, FOUR, SMALL, family
from oracles.batching import GREEDY, batching_config
from oracles.language_models import kosmos, make_model
from transformers import AutoModelForCausalLM, GenerationConfig

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import KVCache, continuous_batching, enable
from kvloom.integrations.transformers.isolation import check_isolation
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.models.text_config import token_ids_in
from kvloom.integrations.transformers.session import manager, self_check

STEP = "^model must compute a step of continuous batching, which {} does not: "
LOGITS = "^model must have the same logits in continuous batching as in a plain forward, got {} whose logits "
NO_CACHE = "its layers hand no cache on to attention"
HANDS_CACHES_ON = CACHE_ARGUMENT == "cache"
"""Whether layers give new tokens to the cache of a session themselves, as in transformers 5.24."""
REFUSED = {
    "DiffLlama": LOGITS,
    **({} if HANDS_CACHES_ON else dict.fromkeys(("StableLm", "Nemotron"), STEP + NO_CACHE)),
    "Bart": LOGITS,  # and the decoders like it, which number the tokens of a step, not of a text
    "Doge": STEP + "UnsupportedError: attn_implementation 'kvloom_paged' has no attention_mask",
}
SERVED = ["Llama", "Qwen2", "Qwen3", "Phi", "Mistral", "Gemma2", "Gemma3", "gpt-oss", "Gemma3n", "Gemma4"]
SERVED += ["Mixtral", "OPT"]
SERVED += ["StableLm", "Nemotron"] if HANDS_CACHES_ON else []
HALF = {"is_decoder": True, "is_encoder_decoder": False, "decoder_start_token_id": 1}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": (
        "BartConfig",
        HALF
        | FOUR
        | {"d_model": 32, "decoder_ffn_dim": 48, "encoder_layers": 4, "decoder_layers": 4}
        | {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "Mixtral": ("MixtralConfig", EXPERTS | {"num_local_experts": 4}),
    "OPT": (
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "num_key_value_heads": 4},
    ),
}


@pytest.fixture(autouse=True)
def nothing_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_served", set())


def make(name: str) -> Any:
    """A random model of a family."""
    if name in FAMILIES:
        return family(name)
    config, differs = MORE.get(name, (f"{name}Config", {}))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | differs)).eval()


def count_forwards(model: Any) -> list[int]:
    """A list that grows with each forward."""
    seen: list[int] = []
    model.register_forward_hook(lambda *args: seen.append(1))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(REFUSED))
def test_families_that_sessions_get_wrong_are_refused(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype).train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=REFUSED[name].format(f"{name}ForCausalLM")):
        continuous_batching(model)
    assert "init_continuous_batching" not in vars(model)
    assert model.config._attn_implementation == before
    assert all(module.training for module in model.modules())


def test_a_model_that_counts_positions_itself_is_refused() -> None:
    """Kosmos-2.5 counts from behind the number of its padding token, and ``generate`` lets it."""
    model = kosmos()
    with pytest.raises(UnsupportedError, match=LOGITS.format(type(model).__name__)):
        continuous_batching(model)


def test_what_a_session_adds_is_no_part_of_what_it_is_compared_with() -> None:
    """An enabled model is compared with its own attention and exact keys, without a cache."""
    model = make_model()
    enable(model, "int2")
    inputs: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _, args, given: inputs.append(given), with_kwargs=True)
    continuous_batching(model)
    plain = [given for given in inputs if "logits_indices" not in given and given.get("use_cache") is False]
    assert len(plain) == 6
    assert not any(given.get(CACHE_ARGUMENT) for given in plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_families_that_are_right_are_accepted(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype)
    before = model.config._attn_implementation
    seen = count_forwards(model)
    assert continuous_batching(model) is model
    assert seen, "nothing was computed"
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("ends", [[2, 5, 7], 2, None], ids=["several", "one", "none"])
def test_a_model_is_served_with_any_number_of_ends(ends: Any) -> None:
    """Published configurations of Llama 3, Gemma 3 and GLM have a list of them."""
    model = family("Llama", eos_token_id=ends, pad_token_id=None)
    model.generation_config.eos_token_id = ends
    expected = model.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    continuous_batching(model)
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=ends)
    (output,) = model.generate_batch([[9, 8, 7]], settings, progress_bar=False).values()
    assert output.generated_tokens == expected
    continuous_batching(model, None)
    assert not [check for check in check_isolation(model) if check.problem]
    assert KVCache.for_model(model, kv="int8:g8").num_rows == 0  # which chooses tokens to calibrate with


def test_a_model_is_checked_without_the_callers_autocast() -> None:
    """Sessions compute in a thread of their own, which has none."""
    with torch.autocast("cpu", torch.bfloat16):
        continuous_batching(family("Llama"))


def test_ids_are_read_from_whatever_names_them() -> None:
    for given in (7, [7], (7,), torch.tensor(7), torch.tensor([7]), {7}):
        assert token_ids_in(given) == [7]
    assert token_ids_in(None) == []
    assert token_ids_in([1, 128_009]) == [1, 128_009]


def test_a_model_that_multiplies_what_is_rounded_is_accepted() -> None:
    torch.manual_seed(0)
    small = SMALL | {"num_hidden_layers": 40, "initializer_range": 0.6}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).to(torch.bfloat16).eval()
    continuous_batching(model)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_a_window_that_is_forgotten_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_of = manager.token_layers_of
    forgotten = lambda model: {i: replace(x, window=None) for i, x in layers_of(model).items()}  # noqa: E731
    monkeypatch.setattr(manager, "token_layers_of", forgotten)
    monkeypatch.setattr(manager, "expect_same_layers", lambda *layers: None)
    with pytest.raises(
        UnsupportedError, match=r"whose logits differ by \d\.\de[+-]\d\d of their norm, where "
    ):
        continuous_batching(family(name))


def test_words_that_are_never_said_hide_no_difference() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(2, 50, generator=draw) for _ in range(2))
    for never in (-torch.inf, torch.finfo(torch.float32).min):
        one[:, 7] = other[:, 7] = never
        assert self_check.distance_of([one], [other]) > 1
        assert self_check.distance_of([one], [one]) == 0


def test_a_model_is_checked_once() -> None:
    model = continuous_batching(make_model())
    seen = count_forwards(model)
    continuous_batching(model, "int8:g16,smooth=none")
    model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config())
    assert not seen


def test_another_dtype_is_checked_when_a_session_begins() -> None:
    model = continuous_batching(make_model())
    seen = count_forwards(model.to(torch.bfloat16))
    model.init_continuous_batching(GenerationConfig(**GREEDY), batching_config())
    assert seen


def test_a_model_without_weights_is_left_unchecked() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    continuous_batching(model)
    damaged = make_model()
    damaged.lm_head.weight.data.fill_(torch.nan)
    continuous_batching(damaged)
    assert not self_check._served
