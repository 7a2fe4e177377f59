"""A model that changes while a session is paused: requests find no pages of before, and unchanged ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.batching import alone, session
from oracles.changes import ADAPTERS, ATTENTIONS, CHANGES, UNDONE, adapted_model
from oracles.language_models import make_model

from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch

PROMPT = torch.randint(3, 199, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def ask(running: Any, name: str, salt: str = "") -> tuple[list[int], int]:
    """The answer of a request, and how many tokens of its prompt were found."""
    before = running.manager.report().tokens_found
    running.manager.add_request(PROMPT, request_id=name, cache_salt=salt)
    tokens = running.run()[name].generated_tokens
    return tokens, running.manager.report().tokens_found - before


@pytest.mark.parametrize("name", [*(x for x in CHANGES if x not in ATTENTIONS), *ADAPTERS])
def test_a_request_finds_no_pages_of_another_state(name: str) -> None:
    model = adapted_model() if name in ADAPTERS else make_model()
    continuous_batching(model)
    with session(model) as running:
        first, found = ask(running, "first")
        assert found == 0
        assert ask(running, "same") == (first, 32)
        with (CHANGES | ADAPTERS)[name](model):
            answer, found = ask(running, "changed")
            assert found == 0
            again, found = ask(running, "changed again")
            assert (again, found) == (answer, 32)
        if name in UNDONE or name in ("switched", "disabled", "rescaled"):
            assert ask(running, "as before") == (first, 32)


def test_requests_that_ran_during_a_change_publish_nothing() -> None:
    model = make_model()
    continuous_batching(model)
    with session(model, {"max_new_tokens": 40}, max_batch_tokens=16) as running:
        running.manager.add_request(PROMPT, request_id="running")
        for _ in range(2):
            running.step()  # 32 of 40 tokens of the prompt
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        running.run()
        tokens, found = ask(running, "next")
        assert found == 0
    continuous_batching(model, None)
    assert tokens == alone(model, PROMPT, 40)


def test_a_step_looks_at_the_model_once_however_many_requests_fill_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, looks = make_model(), list[int]()
    continuous_batching(model)
    state = ModelWatch.state
    monkeypatch.setattr(ModelWatch, "state", lambda watch: looks.append(1) or state(watch))
    with session(model, {"max_new_tokens": 20}) as running:
        running.manager.add_requests([[3 + i, *PROMPT[:29]] for i in range(5)])
        running.step()
        for num_filled in (0, 5, 0):  # each has 31, 32 and 33 tokens then
            looks.clear()
            running.step()
            assert len(looks) == (num_filled > 0)
        assert running.manager.report().running == 5
