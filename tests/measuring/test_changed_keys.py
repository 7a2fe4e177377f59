"""Statistics of real keys built into models: what is cached, what the models compute, and who is refused."""

from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import make_model
from torch import Tensor
from transformers import DynamicCache

import kvloom
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.smoothing import smoothing_of
from kvloom.measuring.changed_keys import changed_keys
from kvloom.measuring.key_statistics import STATISTICS, KeyStatistics, parse_statistics

TEXTS = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")
    return model(model.config_class(**{**SIZES, **options})).eval()


MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 8},
    "Olmo2": {},
    "Phi": {"partial_rotary_factor": 0.5, "qk_layernorm": False},
}
"""Without and with biases, with norms of a head and of all heads, and with a part of it that is rotated."""
with_models = pytest.mark.parametrize("name", MODELS)


@torch.no_grad()
def read(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of ``TEXTS``, and ``[B, H, D]`` keys that the first layer keeps of their first tokens.

    RoPE turns these by an angle of 0.
    """
    cache = DynamicCache()
    logits = model(TEXTS, past_key_values=cache, use_cache=True).logits
    return logits, cache.layers[0].keys[:, :, 0]


@with_models
def test_outliers_are_pairs_of_channels_and_leave_predictions_alone(name: str) -> None:
    model = make(name, **MODELS[name])
    logits, keys = read(model)
    with changed_keys(model, KeyStatistics(outliers=2)):
        same, changed = read(model)
    torch.testing.assert_close(same, logits, rtol=1e-3, atol=1e-3)
    ratio = (changed / keys)[..., : 8 if name == "Phi" else 16]
    first, second = ratio.round().chunk(2, dim=-1)
    assert torch.equal(first, second)
    assert torch.equal(first.sort(-1).values[..., -3:], torch.tensor([1.0, 20.0, 20.0]).expand(2, 2, 3))
    assert torch.equal(read(model)[0], logits)


@with_models
def test_biases_are_so_many_standard_deviations_in_their_pairs(name: str) -> None:
    model = make(name, **MODELS[name])
    logits, keys = read(model)
    with changed_keys(model, KeyStatistics(biases=(0.0, 0.5), sigmas=30.0)):
        other, changed = read(model)
    added = changed - keys
    torch.testing.assert_close(added[0], added[1], rtol=1e-3, atol=1e-3)
    half = 4 if name == "Phi" else 8
    norms = (added[0, :, :half].square() + added[0, :, half : 2 * half].square()).sqrt()
    assert (norms[:, [0, half // 2]] > 10 * keys.std()).all()
    norms[:, [0, half // 2]] = 0
    assert float(norms.abs().max()) < 1e-3
    assert 0 < float((other - logits).abs().mean()) < 2 * float(logits.std())
    assert torch.equal(read(model)[0], logits)


def test_a_bias_is_measured_by_what_the_projection_gives() -> None:
    model = make("Llama")
    keys: list[Tensor] = []
    tokens = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(2))
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda _, args, out: keys.append(out)
    )
    with torch.no_grad():
        model(tokens)
    handle.remove()
    deviation = keys[0][0].view(-1, 2, 16).std(0).mean(-1)
    before = read(model)[1]
    with changed_keys(model, KeyStatistics(biases=(0.0,), sigmas=50.0)):
        norms = (read(model)[1] - before)[0].norm(dim=-1)
    torch.testing.assert_close(norms, 50 * deviation, rtol=0.2, atol=0.0)


def test_a_group_of_codes_suffers_and_the_model_itself_does_not() -> None:
    model = make_model()
    plain, plain_int8 = kvloom.quality(model, TEXTS, ["int8:g16,smooth=none"])
    with changed_keys(model, STATISTICS["outliers"]):
        stock, int8 = kvloom.quality(model, TEXTS, ["int8:g16,smooth=none"])
    assert stock.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
    assert int8.mean_kl > 5 * plain_int8.mean_kl
    with changed_keys(model, STATISTICS["plain"]):
        assert kvloom.quality(model, TEXTS, ["int8:g16,smooth=none"])[1].mean_kl == plain_int8.mean_kl


def test_caches_are_made_for_the_keys_as_they_are_now() -> None:
    model, found = make_model(), []
    for name in ("outliers", "biases", "plain", "outliers"):
        with changed_keys(model, STATISTICS[name]):
            found.append(tuple(x.smoothing.digest for x in smoothing_of(model)))
    assert len(set(found)) == 3 and found[0] == found[3]


def test_a_model_is_as_before_after_an_error() -> None:
    model = make("Llama")
    logits = read(model)[0]
    with pytest.raises(KeyError), changed_keys(model, STATISTICS["both"]):
        raise KeyError
    assert torch.equal(read(model)[0], logits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2", {"n_embd": 32, "n_layer": 1, "n_head": 2}),
        ("GPTJ", {"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 16}),
        ("Cohere", {}),
    ],
)
def test_other_projections_and_other_pairs_are_refused(name: str, options: dict[str, Any]) -> None:
    known = SIZES if name == "Cohere" else {"vocab_size": 64, "initializer_range": 0.25}
    torch.manual_seed(5)
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = cls(cls.config_class(**known, **options)).eval()
    with (
        pytest.raises(UnsupportedError, match=rf"^model must have q_proj and k_proj .* got {name}"),
        changed_keys(model, STATISTICS["outliers"]),
    ):
        pass


def test_statistics_are_named() -> None:
    assert parse_statistics("--keys", "plain") == KeyStatistics()
    assert parse_statistics("--keys", "biases-low:30") == KeyStatistics(biases=(31 / 32,), sigmas=30.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("real", "--keys must be one of plain, outliers, biases"),
        ("outliers:30", "--keys must be without standard deviations unless it has biases, got 'outliers:30'"),
        ("biases:", "--keys must have 1 to 10000 standard deviations, got 'biases:'"),
        ("both:0", "--keys must have 1 to 10000 standard deviations, got 'both:0'"),
        ("both:1e3", "--keys must have 1 to 10000 standard deviations, got 'both:1e3'"),
        ("both:20000", "--keys must have 1 to 10000 standard deviations, got 'both:20000'"),
    ],
)
def test_statistics_that_are_none_are_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        parse_statistics("--keys", text)
