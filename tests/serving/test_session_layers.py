"""What a server makes of its layers: kept while it serves, taken back, said where it cannot be."""

from __future__ import annotations

import logging
import time
from typing import Any

import openai
import pytest
import torch
from oracles.serving import PROMPT, make_session, served

from kvloom.integrations.transformers import load_model, report_layers
from kvloom.integrations.transformers.invariance import install
from kvloom.integrations.transformers.invariance.packing import PackedRows
from kvloom.models import bundled_model_path
from kvloom.serving.settings import Settings


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(x.levelname, x.getMessage()) for x in caplog.records if x.name == "kvloom"]


def ask_twice(**layers: Any) -> None:
    """Ask a server that begins again between two answers."""
    with served("int8", **layers) as server, server.client() as client:
        for count in range(2):
            client.completions.create(model="bundled", prompt=PROMPT, max_tokens=2)
            if not count:
                server.session.model.register_forward_pre_hook(fail_once)
                with pytest.raises(openai.InternalServerError):
                    client.completions.create(model="bundled", prompt=PROMPT, max_tokens=2)
                while not server.session.num_restarts or not server.session.alive:
                    time.sleep(0.005)


def fail_once(model: Any, _: Any) -> None:
    model._forward_pre_hooks.popitem()
    raise RuntimeError("broken")


def test_layers_that_cannot_be_packed_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvloom")
    monkeypatch.setattr(install, "why_not_packable", lambda weight: "int3 without its instructions")
    ask_twice(pack=True)
    warnings = [text for level, text in said(caplog) if level == "WARNING"]
    assert warnings == ["linear layers that are not packed: 35, int3 without its instructions; 1, tied"]


def test_few_layers_that_are_not_packed_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvloom")
    ask_twice(pack=True)
    assert ("INFO", "linear layers that are not packed: 1, tied") in said(caplog)
    assert not [text for level, text in said(caplog) if level == "WARNING"]


@pytest.mark.parametrize(("batch_invariant", "level"), [(True, "WARNING"), (None, "INFO"), (False, None)])
def test_layers_that_are_not_batch_invariant_are_said(
    batch_invariant: bool | None, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvloom")
    session = make_session("auto", None, Settings(), batch_invariant=batch_invariant)
    layer = session.model.model.layers[0].mlp.down_proj
    layer.forward = layer.forward
    session.manager.switch_to_cb_friendly_attn(session.model)
    assert session.report().not_invariant == ({} if level is None else {"its forward was replaced": 1})
    session._tell_what_layers_are_not()
    words = "layers that are not batch invariant: 1, its forward was replaced"
    assert said(caplog) == ([] if level is None else [(level, words)])


@pytest.mark.parametrize("pack", [False, True, "only"])
def test_layers_stay_while_a_server_serves_and_are_taken_back_with_its_end(pack: bool | str) -> None:
    with served("int8", pack=pack) as server, server.client() as client:
        model = server.session.model
        before = [x.packed.tensor for x in model.modules() if isinstance(x, PackedRows)]
        assert len(before) == (35 if pack else 0) and report_layers(model).holds
        server.session.model.register_forward_pre_hook(fail_once)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="bundled", prompt=PROMPT, max_tokens=2)
        while not server.session.num_restarts or not server.session.alive:
            time.sleep(0.005)
        after = [x.packed.tensor for x in model.modules() if isinstance(x, PackedRows)]
        assert all(x is y for x, y in zip(before, after, strict=True))  # nothing is packed anew
        report = server.session.report()
        assert (report.packed_bytes > 0) is bool(pack) and report.batch_invariant
    assert {type(x) for x in model.modules() if isinstance(x, torch.nn.Linear)} == {torch.nn.Linear}
    fresh = load_model(bundled_model_path(), progress=False)[0].float()
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), fresh.parameters(), strict=True))
    assert report_layers(model).packed_bytes == 0 and not report_layers(model).batch_invariant
