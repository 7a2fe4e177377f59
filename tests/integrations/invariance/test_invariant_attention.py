"""Attention is batch invariant as long as somebody asked for it: with ``enable``, by a pool, in a session."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from integrations.models.test_families import SMALL
from ops.attention import make_case
from ops.cases import alone, fewest_tokens_in_tiles
from ops.pools import Kind
from oracles.batching import session
from transformers import AutoModelForCausalLM, LlamaConfig

from kvloom import ops
from kvloom.integrations.transformers import KVPool, continuous_batching, disable, enable
from kvloom.integrations.transformers.invariance import install, report_layers

BF16 = torch.bfloat16
CONFIG = LlamaConfig(**SMALL | {"hidden_size": 64, "head_dim": 32, "vocab_size": 99})


@pytest.fixture(autouse=True)
def collected() -> None:
    """Models of other tests that nobody has any more ask for nothing."""
    gc.collect()


def make_model(dtype: torch.dtype = BF16) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval().to(dtype)


def is_invariant() -> bool:
    """Whether a token of a prompt has the bits of one that comes alone."""
    case = make_case([40], [90], kind=Kind(BF16), dtype=BF16, head_dim=64)
    out = ops.attend(case.query, case.kv, case.batch())
    few = alone(case, 0, 8)
    return torch.equal(ops.attend(few.query, few.kv, few.batch()), out[-8:])


ON_AMX = fewest_tokens_in_tiles(make_case([1], [1], kind=Kind(BF16), dtype=BF16, head_dim=64)) == 17
on_amx = pytest.mark.skipif(not ON_AMX, reason="no kernels of AMX, which alone have other bits")


def logits(model: Any, pieces: list[int]) -> torch.Tensor:
    tokens, cache, rows = torch.arange(sum(pieces))[None] % 90, None, []
    with torch.no_grad():
        for piece in tokens.split(pieces, dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits)
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("kv", ["auto", "int8:g8", "int8:g32", "int4:g16,recent=0"])
def test_a_text_has_the_bits_of_any_cut(kv: str) -> None:
    model = make_model()
    enable(model, kv, batch_invariant=True)
    whole = logits(model, [70])
    for pieces in ([1, 16, 17, 36], [40, 15, 15], [2, 1, 33, 34]):
        assert torch.equal(logits(model, pieces), whole), pieces
    assert not report_layers(model).not_invariant
    disable(model)


@on_amx
def test_attention_is_as_before_once_nobody_asks() -> None:
    assert not is_invariant()
    model = make_model()
    enable(model, batch_invariant=True)
    pool = KVPool.for_model(model, max_tokens=64, batch_invariant=True)
    disable(model)
    assert is_invariant()
    pool.close()
    assert not is_invariant()


@on_amx
def test_enabling_again_replaces_the_wish() -> None:
    model = make_model()
    enable(model, batch_invariant=True)
    enable(model, batch_invariant=False)
    assert not is_invariant()


@on_amx
def test_a_model_that_is_collected_asks_no_more() -> None:
    model = make_model()
    enable(model, batch_invariant=True)
    other = copy.deepcopy(model)
    del model
    gc.collect()
    assert is_invariant()
    disable(other)
    assert not is_invariant()


@on_amx
def test_a_session_asks_while_it_is_there() -> None:
    model = make_model()
    continuous_batching(model, batch_invariant=True)
    assert not is_invariant()
    with session(model) as running:
        running.manager.add_request([5, 6, 7])
        assert is_invariant()
        running.run()
    assert not is_invariant()


@on_amx
@pytest.mark.parametrize(("dtype", "is_said"), [(BF16, True), (torch.float32, False)])
def test_what_takes_time_is_not_done_unasked(dtype: torch.dtype, is_said: bool) -> None:
    """Nor hidden: a report says so."""
    model = make_model(dtype)
    enable(model, pack=True)  # batch invariant where that takes no more time
    assert not is_invariant()
    report = report_layers(model)
    assert report.batch_invariant and (["attention"] in report.not_invariant.values()) == is_said
    disable(model)


def test_a_report_names_attention_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    enable(model, batch_invariant=True)
    monkeypatch.setattr(install, "WHY_NOT_COMPILED", "none here")
    report = report_layers(model)
    assert not report.holds and [x for x in report.not_invariant if "plain torch" in x]
