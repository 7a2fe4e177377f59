"""Plans of bits: what they cost, that they are the best choice, and that a cache is made as they say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.language_models import make_model

import kvloom
from kvloom.core.specs import QuantSpec
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache, KVPool, enable
from kvloom.integrations.transformers.models.bit_plan import BitPlan, config_digest
from kvloom.measuring import planned_bits
from kvloom.measuring.planned_bits import plan_bits

KINDS = ("int2:g16", "int4:g16", "int8:g16", "auto")


def texts(count: int = 2, width: int = 40) -> torch.Tensor:
    return torch.randint(3, 60, (count, width), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def plan(model: Any) -> BitPlan:
    return plan_bits(model, texts(), bits=8, kinds=KINDS, recent=0)


def test_a_plan_keeps_its_budget_and_a_cache_takes_its_bytes(
    model: Any, plan: BitPlan, tmp_path: Path
) -> None:
    cache = KVCache.for_model(model)
    model(texts(), past_key_values=cache)
    assert plan.nbytes_per_token <= cache.nbytes_per_token / 4
    plan.save(tmp_path / "plan.json")
    planned = KVCache.for_model(model, tmp_path / "plan.json")
    model(texts(), past_key_values=planned)
    assert planned.nbytes_per_token == plan.nbytes_per_token
    for layer, kinds in zip(planned.layers, plan.layers, strict=True):
        for spec, kind, side in zip(layer.pages.storage.specs, kinds, ("keys", "values"), strict=True):
            assert spec.quant == (None if kind == "auto" else QuantSpec.parse(kind, "kv", side))


def test_the_same_text_gives_the_same_file(model: Any, plan: BitPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.json")
    plan_bits(model, texts(), bits=8, kinds=KINDS, recent=0).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert BitPlan.load(tmp_path / "a.json") == plan


def test_a_larger_budget_errs_less_and_the_whole_budget_not_at_all(model: Any) -> None:
    plans = [plan_bits(model, texts(), bits=bits, kinds=KINDS, recent=0) for bits in (5, 7, 10, 32)]
    errors, nbytes = ([getattr(x, name) for x in plans] for name in ("error", "nbytes_per_token"))
    assert errors == sorted(errors, reverse=True)
    assert nbytes == sorted(nbytes)
    assert errors[-1] == 0.0
    assert {kind for layer in plans[-1].layers for kind in layer} == {"auto"}


def test_no_other_choice_errs_less() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        costs = torch.randint(1, 9, (4, 3), generator=generator).tolist()
        errors = torch.rand(4, 3, generator=generator).tolist()
        items, limit = list(zip(costs, errors, strict=True)), 16
        best = min(
            (
                sum(errors[i][c] for i, c in enumerate(choice))
                for choice in itertools.product(range(3), repeat=4)
                if sum(costs[i][c] for i, c in enumerate(choice)) <= limit
            ),
            default=None,
        )
        chosen = planned_bits._cheapest_errors(items, limit)
        assert (chosen is None) == (best is None)
        if chosen is not None:
            assert sum(costs[i][c] for i, c in enumerate(chosen)) <= limit
            assert sum(errors[i][c] for i, c in enumerate(chosen)) == pytest.approx(best)


def test_a_planned_pool_finds_prefixes_and_continues_as_a_cache(
    model: Any, plan: BitPlan, tmp_path: Path
) -> None:
    path, ids = tmp_path / "plan.json", texts(1, 40)
    plan.save(path)
    with torch.no_grad():
        expected = model(ids, past_key_values=KVCache.for_model(model, path)).logits[:, 32:]
        with KVPool.for_model(model, path, max_tokens=128, store=f"file://{tmp_path / 'store'}") as pool:
            cache = pool.begin(ids)
            model(ids, past_key_values=cache)
            pool.commit(cache, ids)
            found = pool.begin(ids)
            assert found.get_seq_length() == 32
            torch.testing.assert_close(model(ids[:, 32:], past_key_values=found).logits, expected)
        with KVPool.for_model(model, path, max_tokens=128, store=f"file://{tmp_path / 'store'}") as other:
            assert other.begin(ids).get_seq_length() in (0, 32)


@pytest.mark.parametrize("static", [False, True])
def test_a_plan_keeps_recent_tokens_in_layers_of_codes(model: Any, tmp_path: Path, static: bool) -> None:
    path, ids = tmp_path / "plan.json", texts(1, 40)
    plan = plan_bits(model, texts(), bits=8, kinds=KINDS)
    assert plan.recent == 64
    layers = (("int4:g16", "auto"), ("auto", "auto"), ("int8:g16", "int4:g16"))
    BitPlan(plan.config, layers, plan.nbytes_per_token, plan.error, 64).save(path)
    assert BitPlan.load(path).recent == 64
    options = {"static": True, "max_tokens": 64} if static else {}
    cache = KVCache.for_model(model, path, **options)
    with torch.no_grad():
        exact, found = (model(ids, past_key_values=x).logits for x in (KVCache.for_model(model), cache))
    torch.testing.assert_close(found, exact)  # 40 tokens are all recent
    sizes = [layer.pages.nbytes_recent for layer in cache.layers]
    assert sizes[1] == 0 < sizes[0] == sizes[2]


def test_a_plan_that_was_saved_without_recent_tokens_has_none(
    model: Any, plan: BitPlan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    fields = json.loads(path.read_text())
    del fields["recent"]
    path.write_text(json.dumps(fields))
    assert BitPlan.load(path) == plan
    cache = KVCache.for_model(model, path)
    model(texts(), past_key_values=cache)
    assert cache.nbytes_recent == 0


@pytest.mark.parametrize("static", [False, True])
def test_forks_and_fixed_storage_keep_each_layer_as_planned(
    model: Any, plan: BitPlan, tmp_path: Path, static: bool
) -> None:
    path, ids = tmp_path / "plan.json", texts(1, 24)
    plan.save(path)
    options = {"static": True, "max_tokens": 64} if static else {}
    cache = KVCache.for_model(model, str(path), **options)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        fork = cache.fork()
        a, b = (model(ids[:, 20:], past_key_values=x).logits for x in (cache, fork))
    assert torch.equal(a, b)
    assert fork.nbytes_per_token == cache.nbytes_per_token == plan.nbytes_per_token


def test_quality_and_enable_take_a_plan(model: Any, plan: BitPlan, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan.save(path)
    rows = kvloom.quality(model, texts(), [path, "int4:g16,recent=0"])
    assert rows[1].nbytes_per_token == plan.nbytes_per_token
    assert rows[1].mean_kl < rows[2].mean_kl
    other = make_model()
    enable(other, path)
    assert other.generate(texts(1, 9), max_new_tokens=2).shape == (1, 11)


def bad_plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "kv must be a plan that kvloom saved"),
        (lambda path: path.write_text("{"), "kv must be a plan that kvloom saved"),
        (bad_plan(lambda x: x.pop("layers")), "kv must be a plan that kvloom saved"),
        (bad_plan(lambda x: x.update(format="kvloom-plan/9")), "kv must be a plan of kvloom-plan/1, got"),
        (bad_plan(lambda x: x.update(config="0" * 64)), "kv must be a plan that was made for this model"),
        (bad_plan(lambda x: x["layers"][0].update(keys="int5")), "kv must be one of auto, "),
        (
            bad_plan(lambda x: x["layers"][0].update(keys="int4:g16,recent=3")),
            "kv must be a plan whose kinds",
        ),
        (bad_plan(lambda x: x.update(recent="many")), "kv must be a plan that kvloom saved"),
    ],
)
def test_a_file_that_is_no_plan_of_the_model_is_refused(
    model: Any, plan: BitPlan, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    damage(path)
    for make in (KVCache.for_model, lambda model, kv: KVPool.for_model(model, kv, max_tokens=64)):
        with pytest.raises(ArgumentError, match="^" + message):
            make(model, path)


def test_values_beside_a_plan_are_refused(model: Any, plan: BitPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match=r"^values must be None beside a plan, got 'int8'$"):
        KVCache.for_model(model, tmp_path / "plan.json", values="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of bits and budget must be given, got None and None"),
        ({"bits": 4, "budget": 10}, "one of bits and budget must be given, got 4 and 10"),
        ({"budget": 3}, "budget must be at least"),
        ({"bits": 0.5}, "bits must be at least 3, got 0.5"),
        ({"bits": 8, "kinds": ()}, r"kinds must not be empty, got \(\)"),
        ({"bits": 8, "kinds": ("int5",)}, "kinds must be one of"),
        ({"bits": 8, "kinds": ("int4:g16,recent=8",)}, "kinds must be without recent"),
        ({"bits": 8, "recent": -1}, "recent must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match="^" + message):
        plan_bits(model, texts(), **options)
    with pytest.raises(ArgumentError, match=r"^input_ids must be \[N, W\] with at least one token, got \["):
        plan_bits(model, texts()[0], bits=8)


def test_the_digest_of_a_configuration_is_that_of_what_changes_keys() -> None:
    a, b = make_model().config, make_model().config
    b.use_cache = False
    assert config_digest(a) == config_digest(b)
    b.rms_norm_eps = 1e-3
    assert config_digest(a) != config_digest(b)
