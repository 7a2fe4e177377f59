"""Memory that is refused is no end: requests wait or fail, and the capacity stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.batching import Session, alone, random_requests, session
from oracles.language_models import make_model

from kvloom.caches.tensors.storage import Storage
from kvloom.integrations.transformers import continuous_batching
from kvloom.integrations.transformers.session.requests import growing

NEW = 6
REQUESTS = [x for x in random_requests(40, seed=5) if len(x) > 20][:16]


@pytest.fixture(scope="module")
def model() -> Any:
    return continuous_batching(make_model(), share=False)


class Memory:
    """What a machine has, in pages of each layer; time stands still unless a test says otherwise."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.limit, self.num_refused, self.now = 0, 0, 100.0
        reserve = Storage.reserve

        def limited(storage: Storage, num_extents: int, stride: int) -> None:
            if stride > max(self.limit, storage.stride):
                self.num_refused += 1
                raise self.error
            reserve(storage, num_extents, stride)

        self.error: Exception = MemoryError()
        patch.setattr(Storage, "reserve", limited)
        patch.setattr(growing, "monotonic", lambda: self.now)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [alone(model, x, NEW) for x in REQUESTS]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def expect_capacity(running: Session, pages: int) -> None:
    report = running.manager.report()
    assert report.max_pages == pages and report.active == report.running == report.waiting == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory")]
)
def test_the_first_growth_may_be_refused(
    model: Any, expected: list[list[int]], memory: Memory, error: Exception
) -> None:
    memory.error = error
    with session(model, {"max_new_tokens": NEW}) as running:
        names = [running.manager.add_request(x) for x in REQUESTS]
        running.run()
        assert all("no memory for more tokens" in running.outputs[name].error for name in names)
        expect_capacity(running, 512)
        memory.limit = 512
        names = [running.manager.add_request(x) for x in REQUESTS]
        running.run()
        assert [running.outputs[x].generated_tokens for x in names] == expected
        expect_capacity(running, 512)


def test_requests_share_what_there_is_until_there_is_more(
    model: Any, expected: list[list[int]], memory: Memory
) -> None:
    memory.limit = 64
    with session(model, {"max_new_tokens": NEW}, page_size=8) as running:
        names = [running.manager.add_request(x) for x in REQUESTS]
        while memory.num_refused == 0:
            running.step()
        refused = memory.num_refused
        for _ in range(4):
            running.step()
        assert memory.num_refused == refused and running.manager.report().num_pages == 64
        memory.limit, memory.now = 512, memory.now + 2
        more = [running.manager.add_request(x) for x in REQUESTS]
        running.run()
        assert running.manager.report().num_pages > 64
        assert [running.outputs[x].generated_tokens for x in names + more] == expected * 2
        expect_capacity(running, 512)


def test_no_request_fails_for_memory_that_was_refused_to_another(model: Any, memory: Memory) -> None:
    with session(model, {"max_new_tokens": NEW}) as running:
        first = running.manager.add_request(REQUESTS[0])
        running.run()
        memory.limit = 512
        second = running.manager.add_request(REQUESTS[0])
        running.run()
    assert "no memory" in running.outputs[first].error
    assert running.outputs[second].generated_tokens == alone(model, REQUESTS[0], NEW)


def test_where_half_as_many_again_are_too_many_there_may_be_enough(model: Any, memory: Memory) -> None:
    request = (REQUESTS[0] * 40)[:700]
    memory.limit = -(-(len(request) + NEW) // 8)
    with session(model, {"max_new_tokens": NEW}, page_size=8) as running:
        name = running.manager.add_request(request)
        running.run()
    assert running.outputs[name].generated_tokens == alone(model, request, NEW)
