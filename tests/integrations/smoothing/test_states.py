"""Smoothing is measured once for each state of a model, which measuring does not change."""

from __future__ import annotations

import copy
import io
from threading import Thread
from typing import Any

import pytest
import torch
from oracles.changes import peft_model
from oracles.language_models import make_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import disable, enable
from kvloom.integrations.transformers.fingerprint.per_state import without_hooks
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.smoothing import LayerSmoothing, smoothing_of


def digests(found: tuple[LayerSmoothing, ...]) -> list[str]:
    """Of every number of every layer."""
    return ["" if x.smoothing is None else x.smoothing.digest for x in found]


def observed(model: Any) -> list[Any]:
    """What measuring must leave as it is."""
    modules = [*model.modules()]
    return [
        torch.get_rng_state().tolist(),
        [module.training for module in modules],
        [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules],
        model.config.to_dict(),
        model.config._attn_implementation,
        vars(model.config).keys() - set(),
    ]


def test_an_unchanged_model_has_the_same_objects() -> None:
    model = make_model()
    found = smoothing_of(model)
    assert len(found) == 3 and all(x.smoothing is not None for x in found)
    assert smoothing_of(model) is found
    assert digests(smoothing_of(make_model())) == digests(found)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "kvloom"])
def test_a_model_is_as_before(training: bool, attention: str) -> None:
    model = make_model(attention)
    model.train(training)
    model.model.layers[0].train(not training)
    watch = ModelWatch(model)
    before = observed(model)
    smoothing_of(model)
    assert observed(model) == before
    assert watch.state() == ""


def test_random_numbers_of_a_forward_are_none_of_the_callers() -> None:
    class Draw(nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1e-6 * torch.rand(1)

    model = make_model()
    model.model.layers[0].mlp.act_fn = Draw()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert all(x.smoothing is not None for x in smoothing_of(model))
    assert torch.equal(torch.rand(3), expected)


def read_by(model: Any) -> list[torch.Tensor]:
    """Tokens that a model reads from now on."""
    embedding, seen = model.model.embed_tokens, list[torch.Tensor]()
    forward = embedding.forward

    def watched(tokens: torch.Tensor) -> Any:
        seen.append(tokens)
        return forward(tokens)

    embedding.forward = watched
    return seen


class Failing(nn.Module):
    """A layer that raises."""

    def forward(self, *args: Any) -> None:
        raise RuntimeError("no\nsuch tokens")


def test_a_model_that_raises_is_as_before_and_has_none(recwarn: pytest.WarningsRecorder) -> None:
    model = make_model()
    model.train()
    act = model.model.layers[1].mlp.act_fn
    model.model.layers[1].mlp.act_fn = Failing()
    before = observed(model)
    found = smoothing_of(model)
    assert found == (LayerSmoothing(None, "calibration failed: RuntimeError: no such tokens"),) * 3
    assert observed(model) == before and not recwarn.list
    model.model.layers[1].mlp.act_fn = act
    assert all(x.smoothing is not None for x in smoothing_of(model))


def test_a_model_without_data_has_none() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(make_model().config)
    for layer in smoothing_of(model):
        assert layer.smoothing is None
        assert layer.reason.startswith(("its weights have no data", "calibration failed: "))


def test_weights_that_are_not_finite_give_none() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    found = smoothing_of(model)
    assert found[0].smoothing is not None
    assert [x.reason for x in found[1:]] == ["its keys or queries are not finite"] * 2


@pytest.mark.parametrize("positions", [40, 256])
def test_a_model_of_few_positions_reads_as_many_as_it_has(positions: int) -> None:
    config = copy.deepcopy(make_model().config)
    config.max_position_embeddings = positions
    model = LlamaForCausalLM(config)
    seen = read_by(model)
    assert all(x.smoothing is not None for x in smoothing_of(model))
    assert seen[0].shape == (2, positions * 3 // 4)


def test_a_model_of_too_few_positions_says_so() -> None:
    config = copy.deepcopy(make_model().config)
    config.max_position_embeddings = 12
    (found, *_) = smoothing_of(LlamaForCausalLM(config))
    assert found.reason == (
        "calibration failed: UnsupportedError: model must have positions for 16 tokens, got 12"
    )


def test_tokens_are_the_same_each_time_and_none_has_a_meaning() -> None:
    seen: list[torch.Tensor] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, bos_token_id=1, eos_token_id=[2, 15], pad_token_id=0)
        )  # fmt: skip
        model.config.image_token_id = 7
        read = read_by(model)
        smoothing_of(model)
        seen += read
    assert torch.equal(seen[0], seen[1])
    assert set(seen[0].flatten().tolist()) == set(range(16)) - {0, 1, 2, 7, 15}


def test_dropout_and_inference_mode_change_nothing() -> None:
    expected = digests(smoothing_of(make_model()))
    model = make_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with torch.inference_mode():
        found = smoothing_of(model)
    assert digests(found) == expected
    assert not any(x.smoothing.gain.is_inference() for x in found if x.smoothing is not None)


def test_what_is_written_is_measured_anew() -> None:
    model = make_model()
    first = smoothing_of(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0] *= 16
    second = smoothing_of(model)
    assert digests(second)[0] != digests(first)[0]


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "global hook", "global pre-hook"])
def test_hooks_are_called_with_no_tokens_but_the_callers(kind: str) -> None:
    model, seen = make_model(), list[object]()
    expected = digests(smoothing_of(make_model()))

    def enlarge(module: nn.Module, *given: Any) -> Any:
        seen.append(module)
        return tuple(16 * x for x in given[0]) if "pre" in kind else 16 * given[-1]

    register = {
        "hook": model.model.layers[0].self_attn.k_proj.register_forward_hook,
        "pre-hook": model.model.layers[0].self_attn.k_proj.register_forward_pre_hook,
        "global hook": nn.modules.module.register_module_forward_hook,
        "global pre-hook": nn.modules.module.register_module_forward_pre_hook,
    }[kind]
    with register(enlarge):
        assert digests(smoothing_of(model)) == expected and not seen
        other = Thread(target=lambda: model.model.layers[0].self_attn.k_proj(torch.ones(1, 64)))
        with without_hooks(model):
            other.start(), other.join()
        assert seen.count(model.model.layers[0].self_attn.k_proj) == 1  # of another thread
        model.model.layers[0].self_attn.k_proj(torch.ones(1, 64))
        assert len(seen) == 2
    assert not model.model.layers[0].self_attn.k_proj._forward_hooks


def test_a_hook_that_is_removed_meanwhile_stays_removed() -> None:
    layer, seen = nn.Linear(1, 1), list[int]()
    handle = layer.register_forward_hook(lambda *args: seen.append(1))
    with without_hooks(layer):
        handle.remove()
    layer(torch.ones(1))
    assert not seen


def test_adapters_have_a_smoothing_of_their_own() -> None:
    model = peft_model()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "q_proj.lora_B" in name:
                x[[3, 11]] = 50.0
    found = smoothing_of(model)
    with model.disable_adapter():
        without = smoothing_of(model)
    assert len(found) == len(without) == 3 and digests(without) == digests(smoothing_of(make_model()))
    assert digests(found) != digests(without)
    assert smoothing_of(model) is found


def test_copies_begin_with_nothing() -> None:
    model = make_model()
    first = smoothing_of(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight[0] *= 16
    assert digests(smoothing_of(twin))[0] != digests(first)[0]
    assert smoothing_of(model) is first
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert digests(smoothing_of(torch.load(file, weights_only=False))) == digests(first)


def test_an_enabled_model_has_the_smoothing_of_a_plain_one() -> None:
    model = make_model()
    expected = digests(smoothing_of(make_model()))
    enable(model, "int8")
    assert digests(smoothing_of(model)) == expected
    assert model.config._attn_implementation == "kvloom"
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_threads_do_not_matter() -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(digests(smoothing_of(make_model())))
    torch.set_num_threads(1)
    assert found[0] == found[1]
