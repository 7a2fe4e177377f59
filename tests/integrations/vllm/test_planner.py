"""What a connector reads and writes for vLLM's requests; without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

pytest.importorskip("xxhash")

from kvloom.integrations.vllm import blocks
from kvloom.integrations.vllm.storing import planner as planning
from kvloom.integrations.vllm.storing.planner import Planner
from kvloom.store import Fingerprint, KVStore
from kvloom.store.format import page_bytes

PAGE = 32
LAYER = blocks.layer_format(2, 64, torch.float32, None)
FINGERPRINT = Fingerprint("model", "weights", "float32", "rope", "full", "none", (LAYER,))
BLOCKS = ([5, 6, 7, 8, 9],)


@dataclass
class Request:
    """What a planner reads of vLLM's."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for an answer, however busy the machine is."""
    monkeypatch.setattr(planning, "_PATIENCE", 60.0)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    """One with the first 96 tokens of ``range``."""
    name = request.node.name.translate(str.maketrans("[]", "--"))
    with KVStore(f"memory://{name}") as store:
        data = bytearray(3 * 2 * page_bytes(FINGERPRINT, PAGE))
        assert store.save(FINGERPRINT, "", range(96), 0, PAGE, data) and store.flush(10)
        yield store


@pytest.fixture
def planner(store: KVStore) -> Iterator[Planner]:
    with closing(Planner(store, FINGERPRINT, PAGE)) as planner:
        yield planner


def test_whole_pages_are_found_and_the_last_token_is_computed(planner: Planner) -> None:
    assert planner.match(Request("a", list(range(200))), 0) == 96
    assert planner.match(Request("b", list(range(200))), 64) == 32
    assert planner.match(Request("c", list(range(96))), 0) == 64
    assert planner.match(Request("d", [0, *range(200)]), 0) == 0
    assert planner.match(Request("e", list(range(200)), cache_salt="other"), 0) == 0


@pytest.mark.parametrize("other", ["lora_request", "mm_features", "prompt_embeds"])
def test_what_tokens_do_not_determine_is_neither_read_nor_written(planner: Planner, other: str) -> None:
    request = Request("a", list(range(200)), **{other: [object()]})
    assert planner.match(request, 0) == 0
    planner.allocated(request, BLOCKS, 0)
    assert planner.plan({"a": 200}, lambda name: BLOCKS).saves == []


def test_a_slow_store_is_asked_in_steps(
    planner: Planner, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, answered = store.find, threading.Event()

    def slow(*arguments: Any) -> int:
        answered.wait()
        return find(*arguments)

    monkeypatch.setattr(store, "find", slow)
    monkeypatch.setattr(planning, "_PATIENCE", 0.02)
    request = Request("a", list(range(200)))
    assert planner.match(request, 0) is None and planner.match(request, 0) is None
    answered.set()
    while (found := planner.match(request, 0)) is None:
        pass
    assert found == 96


def test_what_is_found_is_read_into_the_blocks_of_a_request_once(planner: Planner) -> None:
    request = Request("a", list(range(200)), num_computed_tokens=32)
    planner.allocated(request, BLOCKS, 64)
    plan = planner.plan({}, lambda name: BLOCKS)
    (load,) = plan.loads
    assert (load.start, load.tokens, load.blocks) == (32, list(range(96)), BLOCKS)
    assert plan.is_idle and not plan.saves
    assert planner.plan({}, lambda name: BLOCKS).loads == []


def test_pages_are_written_when_they_are_computed_whole(planner: Planner) -> None:
    request = Request("a", list(range(100)))
    planner.allocated(request, BLOCKS, 0)
    written = []
    for new in (50, 50, 1, 30, 1):  # a prompt in pieces, then generated tokens
        for save in planner.plan({"a": new}, lambda name: BLOCKS).saves:
            written.append((save.start, len(save.tokens)))
        request.num_computed_tokens += new
        request.all_token_ids += range(request.num_tokens, request.num_computed_tokens + 1)
    assert written == [(0, 32), (32, 96), (96, 128)]


def test_tokens_that_are_not_known_yet_are_written_later(planner: Planner) -> None:
    request = Request("a", list(range(100)), num_computed_tokens=127)
    planner.allocated(request, BLOCKS, 0)
    request.num_computed_tokens = 100
    assert planner.plan({"a": 28}, lambda name: BLOCKS).saves == []  # 28 are being guessed
    request.num_computed_tokens = 128
    request.all_token_ids += range(100, 129)
    (save,) = planner.plan({"a": 1}, lambda name: BLOCKS).saves
    assert (save.start, len(save.tokens)) == (96, 128)


def test_what_is_computed_again_is_offered_again(planner: Planner) -> None:
    request = Request("a", list(range(100)))
    planner.allocated(request, BLOCKS, 0)
    for _ in range(2):  # the second time after a preemption
        (save,) = planner.plan({"a": 100}, lambda name: BLOCKS).saves
        assert (save.start, len(save.tokens)) == (0, 96)


def test_a_read_that_fails_is_tried_once_more(planner: Planner) -> None:
    request = Request("a", list(range(200)))
    assert planner.match(request, 0) == 96
    planner.allocated(request, BLOCKS, 96)
    planner.plan({}, lambda name: BLOCKS)
    planner.failed({"a"})
    assert planner.plan({}, lambda name: BLOCKS).is_stale
    assert not planner.plan({}, lambda name: BLOCKS).is_stale
    assert planner.match(request, 0) == 96
    planner.failed({"a"})
    assert planner.match(request, 0) == 0
    planner.finished("a")
    assert planner.match(request, 0) == 96


@pytest.mark.parametrize(("reads", "writes"), [(True, False), (False, True)])
def test_a_role_reads_or_writes(store: KVStore, reads: bool, writes: bool) -> None:
    with closing(Planner(store, FINGERPRINT, PAGE, reads, writes)) as planner:
        request = Request("a", list(range(200)))
        assert planner.match(request, 0) == (96 if reads else 0)
        planner.allocated(request, BLOCKS, 0)
        assert len(planner.plan({"a": 200}, lambda name: BLOCKS).saves) == writes


def test_pages_are_those_of_the_fingerprint_that_is_known_last(planner: Planner) -> None:
    planner.know(replace(FINGERPRINT, smoothing="other"))
    assert planner.match(Request("a", list(range(200))), 0) == 0
    planner.know(FINGERPRINT)
    assert planner.match(Request("b", list(range(200))), 0) == 96


def test_what_is_set_aside_is_neither_read_nor_written(planner: Planner) -> None:
    request = Request("a", list(range(200)))
    planner.allocated(request, BLOCKS, 0)
    planner.set_aside()
    assert planner.match(request, 0) == 0
    assert planner.plan({"a": 200}, lambda name: BLOCKS).saves == []


def test_a_reset_doubts_the_model_once_and_asks_the_store_anew(
    planner: Planner, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request("a", list(range(200)))
    assert planner.match(request, 0) == 96
    monkeypatch.setattr(store, "find", lambda *_: 32)
    planner.reset()
    assert planner.match(request, 0) == 32
    doubted = [planner.plan({}, lambda name: BLOCKS).is_doubted for _ in range(2)]
    assert doubted == [True, False]
