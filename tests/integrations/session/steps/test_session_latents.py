"""Sessions of models with multi-head latent attention (MLA) keep their latents and attend to them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.attention.test_indexed import INDEXED
from integrations.attention.test_latents import FAMILIES, family
from integrations.models.test_families import SMALL
from integrations.session.test_batch_invariance import NEW, answers
from oracles.batching import alone, batched, batching_config, random_requests, session
from oracles.pairs import in_turn, pairwise
from oracles.stateful_models import STATES_IN_SESSIONS, folders
from oracles.threads import num_threads
from torch import nn

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import continuous_batching, disable, enable
from kvloom.integrations.transformers.session import self_check

SERVED = [x for x in FAMILIES if x not in INDEXED and (STATES_IN_SESSIONS or x not in folders())]
CASES: dict[str, dict[str, int]] = {
    "short-steps": {"max_batch_tokens": 48},
    "few-pages": {"num_blocks": 14, "max_batch_tokens": 64},
    "pages-of-8": {"page_size": 8},
}
WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}


@pytest.mark.parametrize(("name", "case"), in_turn(SERVED, list(CASES)))
def test_requests_of_every_family_have_the_stock_tokens(name: str, case: str) -> None:
    model, requests = family(name), random_requests(6, seed=3)
    expected = [alone(model, x, NEW) for x in requests]
    assert batched(model, requests, NEW, **CASES[case]) == expected


@pytest.mark.parametrize("name", [x for x in FAMILIES if x in ("deepseek_v32", "glm_moe_dsa")])
def test_families_with_keys_of_an_index_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^model must have layers of .* only, got indexed_attention"):
        continuous_batching(family(name))


def test_latents_that_are_expanded_before_they_are_cached_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvloom.integrations.transformers.session.served.has_latents", lambda config: False)
    with pytest.raises(UnsupportedError, match=r"^model must cache its latents, which DeepseekV3ForCausalLM"):
        continuous_batching(family("deepseek_v3"))


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_a_prefix_is_found_and_its_tokens_are_the_same(kv: str) -> None:
    model = family("deepseek_v3", **WIDE)
    prompts = [[*range(3, 83), *tail] for tail in ([9, 4], [7], [*range(20, 30)])]
    continuous_batching(model, kv, share=False)
    tokens = [answers(model, [x])[0] for x in prompts]
    continuous_batching(model, kv)
    with session(model, {"max_new_tokens": NEW}, return_logprobs=True) as running:
        names = []
        for prompt in prompts:
            names.append(running.manager.add_request(prompt))
            running.run()
        outputs = [running.outputs[name] for name in names]
        assert running.manager.report().tokens_found == 2 * 80
    assert [(x.generated_tokens, list(x.logprobs)) for x in outputs] == tokens


@pytest.mark.parametrize("kv", ["float16", "int8", "int4", "int4,recent=0"])
def test_latents_of_every_kind_give_the_tokens_of_generate(kv: str) -> None:
    model, requests = family("deepseek_v3", **WIDE), random_requests(6, seed=5)
    enable(model, kv)
    expected = [alone(model, x, NEW) for x in requests]
    disable(model)
    assert batched(model, requests, NEW, kv, max_batch_tokens=64) == expected


@pytest.mark.parametrize(
    ("name", "kv", "dtype", "pack", "threads"),
    pairwise(
        ["deepseek_v2", "minicpm3"],
        ["auto", "int8", "int4"],
        [torch.float32, torch.bfloat16],
        [False, True, "only"],
        [1, 2],
    ),
    ids=str,
)
def test_a_request_has_the_bits_that_it_has_alone(
    name: str, kv: str, dtype: torch.dtype, pack: bool | str, threads: int
) -> None:
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1}  # and experts, of DeepSeek
    model, requests = family(name, **sizes).to(dtype), random_requests(4, seed=len(name + kv))
    with num_threads(threads):
        continuous_batching(model, kv, batch_invariant=True, pack=pack)
        expected = [answers(model, [request])[0] for request in requests]
        # With prefixes that are found, and prompts in pieces.
        assert answers(model, requests, seed=1, max_batch_tokens=48, num_blocks=24) == expected
        continuous_batching(model, None)


def test_pages_hold_a_latent_and_a_rope_key_of_each_token() -> None:
    model = continuous_batching(family("deepseek_v3", **WIDE), "int4,recent=0")
    with session(model) as running:
        latents, rope = running.cache.requests.pages.storages[0].specs
        report = running.manager.report()
        running.manager.add_request([*range(3, 40)])
        running.run()
    assert (latents.heads, latents.head_dim, latents.quant.bits) == (1, 64, 4)
    assert (rope.heads, rope.head_dim, rope.quant.bits) == (1, 16, 8)
    in_layer = (64 // 2 + 2) + (16 + 2)  # codes, and a scale of each
    assert report.page_bytes == 16 * in_layer * SMALL["num_hidden_layers"]
    assert report.kv == "int4:g64/int8:g16,recent=0,smooth=none"


class Adapter(nn.Module):
    """A module around a linear layer, as adapters are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice what the layer computes."""
        out: torch.Tensor = 2 * self.layer(x)
        return out


def adapt(model: Any) -> None:
    """Put an adapter around a projection of one layer."""
    owner = model.model.layers[1].self_attn
    owner.kv_b_proj = Adapter(owner.kv_b_proj)


def hook(model: Any) -> None:
    """Let a hook change what a projection of one layer computes."""
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)


CHANGES = {adapt: r"kv_b_proj is a \S+\.Adapter", hook: "kv_b_proj has hooks"}


@pytest.mark.parametrize("change", list(CHANGES), ids=lambda change: change.__name__)
def test_latents_that_must_be_expanded_are_refused_with_the_reason(change: Any) -> None:
    reason = r"^model must have layers whose latents can be attended to in place, got "
    reason += rf"model\.layers\.1\.self_attn of DeepseekV3ForCausalLM: {CHANGES[change]}$"
    model = family("deepseek_v3")
    change(model)
    with pytest.raises(UnsupportedError, match=reason):
        continuous_batching(model)
    assert "init_continuous_batching" not in vars(model)
    other = continuous_batching(family("deepseek_v3"))
    before = other.config._attn_implementation
    change(other)
    with pytest.raises(UnsupportedError, match=reason):
        other.init_continuous_batching(None, batching_config())
    assert other.config._attn_implementation == before


def test_a_change_within_a_session_fails_and_computes_nothing_else() -> None:
    model = continuous_batching(family("deepseek_v3"))
    with session(model) as running:
        adapt(model)
        running.manager.add_request([5, 6, 7])
        with pytest.raises(UnsupportedError, match=r"^sessions must attend to latents .* kv_b_proj is"):
            running.run()


def test_groups_that_divide_no_head_dim_are_refused() -> None:
    model = family("deepseek_v3", **WIDE)
    for kv in ("int8:g48", "int8:g32"):  # of the latents, of the rope keys
        with pytest.raises(ArgumentError, match=r"^kv must have a group that divides the head dim"):
            continuous_batching(model, kv)


def test_the_weights_of_latents_are_not_packed_only() -> None:
    model = family("deepseek_v3")
    enable(model, pack="only")
    projection = model.model.layers[0].self_attn.kv_b_proj
    assert isinstance(projection.weight, nn.Parameter)
    assert not isinstance(model.model.layers[0].self_attn.o_proj.weight, nn.Parameter)
    disable(model)
    assert type(projection) is nn.Linear


def test_weights_that_are_not_finite_say_nothing_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_served", set())
    damaged = family("youtu")
    kind = type(damaged.model.layers[0].self_attn)
    monkeypatch.delattr(kind, "_kvloom_expands_linearly", raising=False)
    with torch.no_grad():
        for layer in damaged.model.layers:
            layer.self_attn.kv_b_proj.weight.fill_(torch.nan)
    with pytest.raises(UnsupportedError, match="expand_kv is not known to be a product by kv_b_proj"):
        continuous_batching(damaged)
    continuous_batching(family("youtu"))
