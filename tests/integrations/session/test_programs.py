"""Random sessions: arrivals, salts, forks, cancels, few pages, allocations that fail.

Whoever is neither cancelled nor failed has the tokens that it has alone, and no request leaves a page taken.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from campaign import times
from oracles.batching import Session, alone, random_requests, session
from oracles.language_models import make_model

from kvloom.errors import OutOfPages
from kvloom.integrations.transformers import continuous_batching
from kvloom.paging import PagePool, PageRef

SESSIONS = times(12)
NEW = 8
REQUESTS = random_requests(24, seed=11)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [alone(model, x, NEW) for x in REQUESTS]


@contextmanager
def failing(every: int) -> Iterator[None]:
    """Every n-th time that a page is wanted there is none; never if n is 0."""
    take, count = PagePool.take, 0

    def refuse(self: PagePool, num_pages: int, wanted: Any = ()) -> list[PageRef]:
        nonlocal count
        count += num_pages > 0
        if every and num_pages and count % every == 0:
            raise OutOfPages("refused")
        return take(self, num_pages, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagePool, "take", refuse)
        yield


class Program:
    """What happens to one session; what each of its requests is, and which were cancelled."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.asked: dict[str, int] = {}
        self.cancelled: set[str] = set()

    def run(self, running: Session) -> None:
        draw = self.draw
        for _ in range(draw.randrange(4, 12)):
            for _ in range(draw.randrange(1, 4)):
                which = draw.randrange(len(REQUESTS))
                salt = draw.choice(["", "", "a"])
                self.asked[running.manager.add_request(REQUESTS[which], cache_salt=salt)] = which
            for _ in range(draw.randrange(5)):
                running.step()
            if draw.random() < 0.4:
                name = draw.choice([*self.asked])
                running.manager.cancel_request(name)
                self.cancelled.add(name)
        running.run()


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(SESSIONS))
def test_a_random_session(model: Any, expected: list[list[int]], seed: int) -> None:
    draw = random.Random(seed)
    continuous_batching(model, share=draw.random() < 0.8)
    size = draw.choice([8, 16, 32])
    options = {
        "page_size": size,
        "num_blocks": draw.choice([-(-120 // size), -(-250 // size), 200]),
        "max_batch_tokens": draw.choice([16, 64, 300]),
        "max_requests_per_batch": draw.choice([3, 16]),
        "scheduler_type": draw.choice(["fifo", "prefill_first"]),
    }
    program = Program(seed)
    with session(model, {"max_new_tokens": NEW}, **options) as running, failing(draw.choice([0, 0, 2, 3, 7])):
        program.run(running)
        report = running.manager.report()
    assert report.active == report.waiting == report.running == 0
    for name, which in program.asked.items():
        output = running.outputs.get(name)
        if output is None:
            assert name in program.cancelled
        elif output.error is None:
            assert output.generated_tokens == expected[which]
        else:
            assert "no memory for more tokens" in output.error


def test_memory_that_does_not_come_is_a_limit(model: Any, expected: list[list[int]]) -> None:
    continuous_batching(model, share=False)
    with (
        session(model, {"max_new_tokens": NEW}, page_size=8) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        names = [running.manager.add_request(x) for x in REQUESTS]
        running.step()
        storages = running.cache.requests.pages.storages
        patch.setattr(type(storages[2]), "reserve", refuse)
        running.run()
        report = running.manager.report()
    assert [running.outputs[name].generated_tokens for name in names] == expected
    assert report.num_pages < report.max_pages == 512 and report.active == 0


def refuse(*_: Any) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_forward_that_raises_ends_all_requests_and_leaves_no_page_taken(model: Any) -> None:
    continuous_batching(model)
    with session(model) as running:
        for request in REQUESTS[:4]:
            running.manager.add_request(request)
        running.step()
        error = RuntimeError("broken")
        running.processor.prepare_next_batch()
        running.manager._handle_critical_error(error, running.processor)
        running._collect()
        report = running.manager.report()
        running.cache.requests.check()
    assert {x.error for x in running.outputs.values()} == {"broken"} and len(running.outputs) == 4
    assert report.active == report.running == report.waiting == 0
