"""Layers are changed for as long as somebody wants that, with weights as they are at the time."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from integrations.invariance.test_families import logits, model_of, texts
from integrations.models.test_families import family
from oracles.threads import num_threads
from torch import Tensor, nn

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVPool, continuous_batching, disable, enable, report_layers
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.invariance import install, packing
from kvloom.integrations.transformers.invariance.inline import invariant_calls
from kvloom.integrations.transformers.invariance.install import CHANGES
from kvloom.integrations.transformers.invariance.packed_only import PackedOnly
from kvloom.integrations.transformers.invariance.packing import PackedRows, PackedWeight

MIXTURE = "Qwen2-MoE"
pack_weight = packing.pack


def kinds(model: Any) -> list[type]:
    return [type(x) for x in model.modules()]


def state(model: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_same_state(model: Any, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert sorted(after) == sorted(before)
    assert all(torch.equal(after[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {}, (False, False)),
        (torch.bfloat16, {}, (True, False)),
        (torch.float32, {"pack": True}, (True, True)),
        (torch.float32, {"pack": True, "batch_invariant": False}, (False, True)),
        (torch.float32, {"batch_invariant": True}, (True, False)),
        (torch.bfloat16, {"batch_invariant": False}, (False, False)),
    ],
)
def test_defaults_are_where_it_costs_nothing(
    dtype: torch.dtype, options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    model = model_of("Llama", dtype)
    enable(model, **options)
    report = report_layers(model)
    assert (report.batch_invariant, report.packed > 0) == expected


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"pack": True}, {"pack": "only"}])
@pytest.mark.parametrize("name", [MIXTURE, "GPT-2"])
def test_disable_takes_all_away(name: str, options: dict[str, Any]) -> None:
    model, ids = model_of(name, torch.float32), texts()
    before, weights, plain = kinds(model), state(model), logits(model, ids, None)
    enable(model, **options)
    logits(model, ids, None)
    assert kinds(model) != before
    assert_same_state(model, weights)
    disable(model)
    assert kinds(model) == before and not hasattr(model, CHANGES)
    assert not any(name in vars(x) for x in model.modules() for name in ("packed", "row_rule"))
    assert_same_state(model, weights)
    assert torch.equal(logits(model, ids, None), plain)


def test_layers_stay_until_nobody_wants_them() -> None:
    model = model_of("Llama", torch.float32)
    before = kinds(model)
    enable(model, batch_invariant=True)
    pool = KVPool.for_model(model, max_tokens=64, pack=True)
    continuous_batching(model, pack=True)
    disable(model)
    assert report_layers(model).batch_invariant and report_layers(model).packed
    continuous_batching(model, None)
    assert report_layers(model).packed
    pool.close()
    assert kinds(model) == before


def test_a_pool_that_is_gone_wants_nothing() -> None:
    model = model_of("Llama", torch.float32)
    before, pool = kinds(model), KVPool.for_model(model, max_tokens=64, batch_invariant=True)
    assert kinds(model) != before
    del pool
    assert kinds(model) == before


def write(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def write_uncounted(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)


def replace(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def load(model: Any) -> None:
    model.load_state_dict({name: x * 1.5 for name, x in state(model).items()})


@pytest.mark.parametrize("change", [write, write_uncounted, replace, load])
def test_weights_that_change_are_packed_anew(change: Any) -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, pack=True)
    logits(model, ids, None)
    change(model)
    found = logits(model, ids, None)
    enable(model, pack=True)
    assert torch.equal(found, logits(model, ids, None))
    disable(model)
    plain = logits(model, ids, None)
    assert (found - plain).norm() < 1e-4 * plain.norm()


def test_weights_are_looked_at_in_layers_that_were_changed_between_forwards() -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, batch_invariant=True)
    logits(model, ids, None)
    enable(model, pack=True)
    before = logits(model, ids, None)
    write_uncounted(model)
    assert not torch.equal(logits(model, ids, None), before)


@pytest.mark.parametrize("pack", [True, "only"])
@pytest.mark.parametrize("was_enabled", [False, True])
def test_packing_that_fails_is_undone(
    was_enabled: bool, pack: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weights = model_of(MIXTURE, torch.float32), state(model_of(MIXTURE, torch.float32))
    if was_enabled:
        pool = KVPool.for_model(model, max_tokens=64, batch_invariant=True)
    before, packed = kinds(model), iter(range(9))

    def refuse(weight: Tensor) -> Tensor:
        if next(packed, None) is None:
            raise MemoryError
        return pack_weight(weight)

    monkeypatch.setattr(packing, "pack", refuse)
    with pytest.raises(MemoryError):
        enable(model, pack=pack)
    assert kinds(model) == before
    assert_same_state(model, weights)
    if was_enabled:
        pool.close()
    assert not hasattr(model, CHANGES)


@pytest.mark.parametrize("pack", [True, "only"])
def test_a_dtype_that_changes_is_packed_anew_or_not(pack: bool | str) -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, batch_invariant=True, pack=pack)
    logits(model, ids, None)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        alone = torch.cat([logits(model, row[None], None) for row in ids])
        assert alone.dtype == dtype
        assert torch.equal(logits(model, ids, 0), alone)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_packed_only_lets_the_weights_go(name: str, tmp_path: Path) -> None:
    model, ids = model_of(name, torch.float32), texts()
    weights = state(model)
    layer = next(x for x in model.modules() if type(x).__name__ in ("Linear", "Conv1D"))
    held = weakref.ref(layer.weight)
    enable(model, pack="only")
    assert held() is None and isinstance(layer, PackedOnly)
    found = logits(model, ids, None)
    model.load_state_dict({key: x * 0.5 for key, x in weights.items()})
    assert not torch.equal(logits(model, ids, None), found)
    model.load_state_dict(weights)
    assert torch.equal(logits(model, ids, None), found)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_state(loaded, weights)


def test_packed_only_stays_so_with_other_threads() -> None:
    model, ids = model_of(MIXTURE, torch.float32), texts()
    enable(model, pack="only")
    before, expected = kinds(model), logits(model, ids, None)
    with num_threads(2):
        assert torch.equal(logits(model, ids, 1), expected)
        assert kinds(model) == before


def test_a_weight_that_is_packed_only_is_not_written() -> None:
    model = model_of("Llama", torch.float32)
    enable(model, pack="only")
    layer = model.model.layers[0].mlp.up_proj
    with pytest.raises(UnsupportedError, match="packed only cannot be changed in place: use load_state_dict"):
        layer.weight.mul_(2)
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(48, 32))


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"pack": True}, {"pack": "only"}])
def test_copies_and_pickles_compute_the_same(options: dict[str, Any]) -> None:
    model, ids = model_of(MIXTURE, torch.float32), texts()
    enable(model, **options)
    expected = logits(model, ids, None)
    copied = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model))  # noqa: S301 (our own bytes)
    for other in (copied, restored):
        assert torch.equal(logits(other, ids, None), expected)
    disable(copied)
    assert kinds(copied) == kinds(model_of(MIXTURE, torch.float32))
    assert torch.equal(logits(model, ids, None), expected)


@pytest.mark.parametrize("pack", [True, "only"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_copies_are_padded_as_their_originals(batch_invariant: bool, pack: bool | str) -> None:
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=batch_invariant, pack=pack)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 (our own bytes)
        assert {x.packed.is_invariant for x in other.modules() if hasattr(x, "packed")} == {batch_invariant}


def test_the_state_of_a_model_follows_its_layers() -> None:
    """Pages that are computed with other bits are found by others only."""
    model = model_of("Llama", torch.float32)
    watch = ModelWatch(model)
    seen = {watch.state()}
    for options in ({"batch_invariant": True}, {"pack": True}, {"pack": "only"}):
        enable(model, **options)
        assert watch.state() not in seen
        seen.add(watch.state())
    model.load_state_dict({name: x * 1.5 for name, x in state(model).items()})
    assert watch.state() not in seen


def adapt(model: Any, *names: str) -> Any:
    """A ``PeftModel`` around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for a property that peft reads
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=[*names], init_lora_weights=False))


def test_layers_that_are_not_packed_are_named() -> None:
    model = model_of("Llama", torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight
    adapted = adapt(model, "q_proj")
    enable(adapted, batch_invariant=True, pack=True)
    report = report_layers(model)
    assert report.not_packed["tied"] == ["lm_head"]
    assert len(report.not_packed["adapted"]) == 2 * 3  # the layer, and what the adapter adds and multiplies
    assert report.packed == 2 * 6


def test_bytes_of_packed_weights_count_what_fills_blocks() -> None:
    whole, part = (PackedWeight(nn.Linear(4096, outputs), False).nbytes for outputs in (64, 33))
    assert 33 * 4096 * 4 < part <= whole == 64 * 4096 * 4


def test_an_adapted_model_is_batch_invariant() -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(adapt(model, "q_proj", "up_proj"), batch_invariant=True)
    alone = torch.cat([logits(model, row[None], None) for row in ids])
    assert torch.equal(logits(model, ids, 0), alone)
    assert torch.equal(logits(model, ids, 1), alone)


def test_packed_layers_have_no_gradient() -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, pack=True)
    out = model(ids, use_cache=False).logits
    with pytest.raises(UnsupportedError, match="has no gradient"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": 1}, "batch_invariant must be True, False or None, got 1"),
        ({"pack": "both"}, "pack must be False, True or 'only', got 'both'"),
        ({"pack": 1}, "pack must be False, True or 'only', got 1"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_changed(options: dict[str, Any], message: str) -> None:
    model = model_of("Llama", torch.float32)
    before = kinds(model)
    for call in (enable, continuous_batching, lambda m, **o: KVPool.for_model(m, max_tokens=64, **o)):
        with pytest.raises(ArgumentError, match=message):
            call(model, **options)
    assert kinds(model) == before


@pytest.mark.compile
def test_compiled_graphs_compute_what_the_layers_computed() -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    del model.model.layers[1:]
    enable(model, batch_invariant=True, pack=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_grouped_products_of_other_forms_are_those_of_torch() -> None:
    groups, matrices = torch.randn(2, 3, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16()
    expected = torch._grouped_mm(groups, matrices)
    with invariant_calls():
        assert torch.equal(torch._grouped_mm(groups, matrices), expected)


def test_autocast_is_left_alone() -> None:
    model, ids = model_of("Llama", torch.float32), texts()
    enable(model, pack=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model.lm_head(model.model.embed_tokens(ids)).dtype == torch.bfloat16
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert buffer.tell()


def test_a_report_while_a_thread_changes_layers_is_that_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama", torch.float32)
    enable(model, batch_invariant=True)
    before, seen = report_layers(model), []
    change = install.change_linear

    def watched(layer: Any, wish: Any) -> None:
        change(layer, wish)
        seen.append(report_layers(model))

    monkeypatch.setattr(install, "change_linear", watched)
    install.hold_layers(model, "another", install.Wish(True, pack=True))
    assert seen and all((x.rules, x.holds) == (before.rules, True) for x in seen)
    assert [x.packed for x in seen] == sorted(x.packed for x in seen)
    report = report_layers(model)
    packed = next(x for x in model.modules() if isinstance(x, PackedRows))
    del packed.packed  # the moment before it has its class again
    assert report_layers(model).packed == report.packed - 1


def test_a_changed_model_is_saved_by_its_own_name(tmp_path: Path) -> None:
    """The class of a model whose forward calls products itself is another one, with the same name."""
    model = family("Gemma3n")
    kind = type(model)
    enable(model, batch_invariant=True)
    assert type(model) is not kind and type(model).__name__ == kind.__name__
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind.__name__]
