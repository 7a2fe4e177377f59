"""``check_isolation`` and ``kvloom isolation`` find what is wrong, and sharing that does not happen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from oracles.changes import adapted_model
from oracles.language_models import make_model

from kvloom.caches.prefixes.search import Prefixes
from kvloom.cli import main
from kvloom.integrations.transformers import isolation
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.isolation import Check, check_isolation
from kvloom.integrations.transformers.pool.origin import Origin
from kvloom.integrations.transformers.versions import IS_4


def problems(model: Any) -> set[str]:
    return {x.name for x in check_isolation(model) if x.problem}


def test_a_model_with_adapters_is_tried_without_them() -> None:
    model = adapted_model()
    checks = {x.name: x for x in check_isolation(model)}
    assert [x for x in checks.values() if x.problem] == []
    assert (checks["no adapter"].actual, checks["no adapter, undone"].actual) == (0, 20)


def test_the_model_is_left_as_it_was() -> None:
    model, other = make_model().train(), make_model()
    check_isolation(model)
    assert model.training
    assert all((x == y).all() for x, y in zip(model.parameters(), other.parameters(), strict=True))
    assert "init_continuous_batching" not in vars(model)
    assert model.config._attn_implementation == other.config._attn_implementation


def test_states_that_are_not_told_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelWatch, "state", lambda self: "")
    monkeypatch.setattr(ModelWatch, "quick_state", lambda self: "")
    assert problems(make_model()) == {
        "a hook",
        "another scaling",
        *([] if IS_4 else ["a session, a hook"]),
        "a weight was written",
        "a weight was written, the same text",
        "the weight was restored",
    }


def test_salts_and_content_that_are_not_told_apart_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Origin, "scopes", lambda self: [self.state for _ in self.contents])
    assert {"another salt", "other content"} <= problems(make_model())


def test_a_pool_that_shares_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefixes, "_num_columns", lambda self, every, begins, *_: min(begins))
    assert {"the same text", "the same content", "a store that has the text"} <= problems(make_model())


def test_the_command_prints_what_was_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the bundled model, which is isolated; and what is wrong, with a status that says so."""
    assert main(["isolation", "--json", "--kv", "int8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_isolated"]
    assert {"name": "the same text", "expected": 20, "actual": 20, "problem": ""} in told["checks"]
    names = {"a hook", "a weight was written"} | ({"a session"} if not IS_4 else set())
    assert {x["name"] for x in told["checks"]} >= names
    wrong = Check("the same text", 20, 0, "0 tokens were found")
    monkeypatch.setattr(isolation, "check_isolation", lambda model, kv: [wrong])
    assert main(["isolation"]) == 1
    assert "0 tokens were found" in capsys.readouterr().out
