"""Codes without a group get one that divides the head dim, through every door."""

from __future__ import annotations

import shutil
from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import FAMILIES, SMALL
from oracles.batching import alone, batched
from oracles.language_models import FakeQuantCache, make_prompts
from oracles.pairs import in_turn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvloom
from kvloom.cli import main
from kvloom.core.entries import CODES
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache, KVPool, continuous_batching, enable
from kvloom.integrations.transformers.versions import IS_4
from kvloom.measuring import quality
from kvloom.models import bundled_model_path

HEAD_DIMS = [32, 40, 64, 72, 80, 96, 112, 128, 256]


def model_of(head_dim: int, attention: str = "kvloom") -> Any:
    """A random Llama of heads of this size."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        initializer_range=0.25,
        attn_implementation=attention,
        pad_token_id=0,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def fake(model: Any, kv: str, group: int) -> FakeQuantCache:
    """transformers' own cache of what codes of this group mean."""
    kind = type("Fake", (FakeQuantCache,), {"bits": CODES[kv].bits, "group": group})
    return kind(config=model.config)


@pytest.mark.parametrize(("head_dim", "kv"), in_turn(HEAD_DIMS, [*CODES]))
def test_generate_is_right_for_every_head_dim(kv: str, head_dim: int) -> None:
    model, group = model_of(head_dim), gcd(64, head_dim)
    request = make_prompts([70])["input_ids"][0].tolist()
    want = alone(model_of(head_dim, "sdpa"), request, 8, fake(model, kv, group))
    assert alone(model, request, 8, KVCache.for_model(model, f"{kv},rotate=none,recent=0")) == want
    default = alone(model, request, 8, KVCache.for_model(model, f"{kv}:g{group}"))
    assert alone(model, request, 8, KVCache.for_model(model, kv)) == default
    assert alone(model, request, 8, KVCache.for_model(model, kv, static=True, max_tokens=80)) == default
    enable(model, kv=kv)
    assert alone(model, request, 8) == default


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv", CODES)
def test_pools_say_the_group(kv: str, head_dim: int) -> None:
    model, said = model_of(head_dim), f"{kv}:g{gcd(64, head_dim)}"
    pool = KVPool.for_model(model, kv, max_tokens=128)
    ids = make_prompts([40])["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=pool.begin(ids))
    assert pool.report()["kv"] == said


@pytest.mark.skipif(IS_4, reason="this transformers has no sessions")
@pytest.mark.parametrize(("kv", "head_dim"), in_turn([*CODES], [40, 96, 256]))
def test_sessions_say_the_group(kv: str, head_dim: int) -> None:
    model, said = model_of(head_dim), f"{kv}:g{gcd(64, head_dim)}"
    ids = make_prompts([40])["input_ids"]
    requests = [ids[0].tolist(), ids[0, 20:].tolist()]
    expected = [alone(model, x, 6, KVCache.for_model(model, kv)) for x in requests]
    assert batched(model, requests, 6, kv) == expected
    continuous_batching(model, kv)
    assert model.init_continuous_batching().report().kv == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv": "auto"}, "auto"),
        ({"kv": "float16"}, "float16"),
        ({"kv": "int4,recent=8"}, "int4:g32,recent=8"),
        ({"kv": "int4:g16,rotate=both,recent=0"}, "int4:g16,rotate=both,recent=0"),
        ({"kv": "int8", "values": "int4"}, "int8:g32/int4:g32"),
        ({"kv": "int8", "values": "auto"}, "int8:g32/auto"),
    ],
)
def test_a_pool_says_how_it_keeps_tokens(options: dict[str, str], said: str) -> None:
    assert KVPool.for_model(model_of(96), max_tokens=64, **options).report()["kv"] == said


@pytest.mark.parametrize(
    ("head_dim", "kv", "why"),
    [
        (96, "int8:g64", "that divides the head dim 96"),
        (96, "int4:g64,rotate=none", "that divides the head dim 96"),
        (36, "int8", "that divides the head dim 36, which is no multiple of 8"),
        (36, "int4,recent=0", "that divides the head dim 36, which is no multiple of 8"),
    ],
)
def test_what_has_no_group_is_refused_as_it_was_written(head_dim: int, kv: str, why: str) -> None:
    model = model_of(head_dim)
    doors: list[Any] = [
        lambda: KVCache.for_model(model, kv),
        lambda: KVPool.for_model(model, kv, max_tokens=64),
        lambda: enable(model, kv=kv),
        *([] if IS_4 else [lambda: continuous_batching(model, kv)]),
        lambda: kvloom.plan(model.config, kv, context=9),
    ]
    for door in doors:
        with pytest.raises(ArgumentError, match=f"^kv must have a group {why}, got '{kv}'$"):
            door()


@pytest.mark.skipif("DeepSeek-V3" not in FAMILIES, reason="this transformers has no such model")
def test_keys_and_values_of_two_sizes_have_a_group_each() -> None:
    config, differs, *_ = FAMILIES["DeepSeek-V3"]
    sizes = {"kv_lora_rank": 80, "qk_nope_head_dim": 40, "qk_rope_head_dim": 8, "v_head_dim": 32}
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**SMALL | differs | sizes), attn_implementation="kvloom"
    )
    cache = KVCache.for_model(model, "int8")
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.int64), past_key_values=cache)
    specs = cache.layers[0].pages.storage.specs  # of latent vectors, or of what they are expanded to
    assert len({spec.head_dim for spec in specs}) == 2
    assert [spec.group for spec in specs] == [gcd(64, spec.head_dim) for spec in specs]
    pool = KVPool.for_model(model, "int8,smooth=none", max_tokens=64)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.int64), past_key_values=pool.begin(torch.ones(1, 5).long()))
    assert pool.report()["kv"] == "/".join(str(spec.quant) for spec in specs) + ",smooth=none"
    planned = kvloom.plan(model.config, "int8", context=5)
    assert planned.cache + planned.scales == cache.nbytes


def test_quality_plans_and_bit_plans_take_the_same_group(tmp_path: Path) -> None:
    model = model_of(96)
    ids = make_prompts([40])["input_ids"]
    short, said = quality.quality(model, ids, ["int4", "int4:g32"], chunk=8)[1:]
    assert (short.kind, short.mean_kl, short.nbytes_per_token) == (
        "int4",
        said.mean_kl,
        said.nbytes_per_token,
    )
    assert kvloom.plan(model.config, "int4", context=9).total == (
        kvloom.plan(model.config, "int4:g32", context=9).total
    )
    plan = kvloom.plan_bits(model, ids, bits=5, kinds=["int4", "int4:g32", "int8"])
    assert {kind for layer in plan.layers for kind in layer} <= {"int4:g32", "int8:g32"}
    plan.save(tmp_path / "plan.json")
    kinds = {kind for layer in plan.layers for kind in layer}
    report = KVPool.for_model(model, tmp_path / "plan.json", max_tokens=64).report()
    assert report["kv"] == (kinds.pop() if len(kinds) == 1 else "plan")


def test_the_command_line_takes_and_refuses_what_the_library_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled = bundled_model_path()
    config = AutoConfig.from_pretrained(bundled)
    config.head_dim, config.num_hidden_layers = 96, 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in bundled.glob("*token*"):
        shutil.copy(file, tmp_path)
    options = ["--model", str(tmp_path), "--prompt", "def", "--max-new-tokens", "3"]
    assert main(["generate", *options, "--kv", "int4"]) == 0
    assert main(["generate", *options, "--kv", "int8:g64"]) == 2
    assert "kv must have a group that divides the head dim 96, got 'int8:g64'" in capsys.readouterr().err
