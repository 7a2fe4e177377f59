"""What a session does costs the same beside any number of requests that wait."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from oracles.batching import alone, session
from oracles.interrupts import interrupted
from oracles.language_models import make_model

from kvloom.integrations.transformers import continuous_batching

PROMPT = [3 + (7 * i) % 90 for i in range(60)]


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "apart"])
def model(request: pytest.FixtureRequest) -> Any:
    return continuous_batching(make_model(), share=request.param)


def prompts(count: int) -> list[list[int]]:
    return [[3 + i % 80, 3 + i // 80, *PROMPT] for i in range(count)]


@pytest.mark.parametrize("alike", [False, True])
def test_a_step_costs_the_same_beside_any_number_of_waiting_requests(model: Any, alike: bool) -> None:
    lines = []
    for num_waiting in (100, 400):
        with session(model, {"max_new_tokens": 9}, max_batch_tokens=64, max_requests_per_batch=2) as running:
            running.manager.add_requests([PROMPT] * num_waiting if alike else prompts(num_waiting))
            for _ in range(4):
                running.step()
            assert running.manager.report().waiting > num_waiting - 4
            lines.append(interrupted(0, running.processor.prepare_next_batch, module=""))
    assert lines[1] - lines[0] < 50


class Waiting(deque[str]):
    """Refuses to be searched."""

    def __contains__(self, name: object) -> bool:
        assert not self, "all waiting requests are searched"
        return False

    def remove(self, name: str) -> None:
        raise AssertionError("all waiting requests are searched")


def test_many_requests_are_cancelled_without_a_search_for_each(model: Any) -> None:
    requests = prompts(90)
    with session(model, {"max_new_tokens": 9}, max_batch_tokens=64) as running:
        running.manager.add_requests(requests)
        running.step()
        scheduler = running.processor.scheduler
        names = [*scheduler.active_requests, *scheduler.waiting_requests]
        for name in names[1:80:2]:
            running.manager.cancel_request(name)
        scheduler.waiting_requests_order = Waiting(scheduler.waiting_requests_order)
        running.step()
        assert [*scheduler.waiting_requests_order] == [*scheduler.waiting_requests]
        assert not set(names[1:80:2]) & {*scheduler.active_requests, *scheduler.waiting_requests}
        running.run()
        kept = {tuple(x.prompt_ids): x.generated_tokens for x in running.outputs.values() if not x.error}
    assert len(kept) >= 50
    assert kept[tuple(requests[-1])] == alone(model, requests[-1], 9)
