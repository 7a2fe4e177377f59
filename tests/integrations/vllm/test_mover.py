"""What is read into vLLM's blocks and what is not; without vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import pytest
import torch
from campaign import times
from torch import Tensor

pytest.importorskip("xxhash")

from store.runs import damaged, make_run

from kvloom.core.specs import QuantSpec
from kvloom.integrations.vllm import blocks
from kvloom.integrations.vllm.blocks import Blocks, Group
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.integrations.vllm.storing.mover import Mover
from kvloom.integrations.vllm.storing.planner import Transfer, TransferPlan
from kvloom.store import Fingerprint, KVStore
from kvloom.store.backends.memory import MemoryBackend
from kvloom.store.format import Run

NUM_OFFERED = times(1000)
PAGE, HEADS, DIM, QUANT, AT_ONCE = 32, 2, 32, QuantSpec(8, 32), 20
GROUPS = [Group((0,), PAGE)]
LAYER = blocks.layer_format(HEADS, DIM, torch.float32, QUANT)
FINGERPRINT = Fingerprint("model", "weights", "float32", "rope", "full", "none", (LAYER,))
OTHERS = [
    replace(FINGERPRINT, weights="other"),
    replace(FINGERPRINT, layers=(blocks.layer_format(HEADS, DIM, torch.float32, QuantSpec(4, 32)),)),
    replace(FINGERPRINT, attention="windows 64"),
]


def empty_blocks(num_blocks: int) -> tuple[Blocks, Tensor]:
    """Blocks of one layer, and the memory that they lie in."""
    content = PageFormat.heads(DIM, torch.float32, QUANT).content_bytes
    memory = torch.zeros(num_blocks, HEADS, PAGE, content, dtype=torch.uint8)
    views = {0: PageFormat.heads(DIM, torch.float32, QUANT).view(memory)}
    return Blocks(FINGERPRINT, range(HEADS), GROUPS, views), memory


def text_of(number: int) -> list[int]:
    """Two pages of tokens that no other number has."""
    return [number, *range(1, 2 * PAGE)]


def file_of(tokens: list[int], whose: Fingerprint = FINGERPRINT, salt: str = "") -> tuple[Run, bytes]:
    run, data = make_run(tokens, page_size=PAGE, whose=whose, salt=salt)
    return run, run.head() + bytes(data)


def foreign(number: int, rng: random.Random) -> bytes:
    """A whole file of another model, format, text or salt, or of none of these."""
    tokens = text_of(number)
    match rng.randrange(5):
        case 0:
            return file_of(tokens, rng.choice(OTHERS))[1]
        case 1:
            return file_of(tokens, salt="other")[1]
        case 2:
            tokens[rng.randrange(len(tokens))] += 1
            return file_of(tokens)[1]
        case 3:
            return make_run(tokens, page_size=PAGE // 2, whose=FINGERPRINT)[0].head()
        case _:
            return rng.randbytes(rng.randrange(20_000))


def offered(rng: random.Random) -> Iterator[tuple[int, str, bytes, bool]]:
    """Numbers of texts, the names under which their runs are looked for, files, whether they are right."""
    for number in count():
        run, good = file_of(text_of(number))
        if number % AT_ONCE == 0:
            yield number, run.name, good, True
        else:
            yield number, run.name, damaged(good, rng) if number % 2 else foreign(number, rng), False


def read(mover: Mover, loads: list[Transfer]) -> set[str]:
    """Requests that failed, of a step that reads."""
    mover.start(TransferPlan(loads))
    done, failed = set[str](), set[str]()
    while len(done) < len(loads):
        for known, new in zip((done, failed), mover.finished(True), strict=True):
            known |= new
    return failed


@pytest.mark.campaign
def test_of_damaged_and_foreign_files_none_is_read() -> None:
    files = offered(random.Random(0))
    num_refused = 0
    for step in count():
        if num_refused >= NUM_OFFERED:
            break
        url = f"memory://offered-{step}"
        target, memory = empty_blocks(2 * AT_ONCE + 1)
        loads, wrong = [], set()
        for i in range(AT_ONCE):
            number, name, file, is_right = next(files)
            MemoryBackend.of_url(url).put_if_absent(name, [file])
            loads.append(Transfer(str(number), "", text_of(number), 0, ([2 * i + 1, 2 * i + 2],)))
            wrong |= set() if is_right else {str(number)}
        with KVStore(url) as store, closing(Mover(store, FINGERPRINT, target, None)) as mover:
            assert read(mover, loads) == wrong
        assert memory[1:3].any() and not memory[3:].any()
        num_refused += len(wrong)
        MemoryBackend._shared.pop(url)


def test_a_reader_that_fails_gives_the_request_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object, **options: object) -> None:
        raise OSError("the network is gone")

    target, memory = empty_blocks(3)
    store = KVStore("memory://reader-fails")
    with closing(Mover(store, FINGERPRINT, target, None)) as mover:
        monkeypatch.setattr(store, "load", gone)
        assert read(mover, [Transfer("a", "", text_of(0), 0, ([1, 2],))]) == {"a"}
        assert mover.counts["tokens_failed"] == 2 * PAGE and not memory.any()


def test_a_model_that_changed_has_nothing_read_or_written(caplog: pytest.LogCaptureFixture) -> None:
    url, changes = "memory://model-changed", iter([False, True])
    run, file = file_of(text_of(0))
    MemoryBackend.of_url(url).put_if_absent(run.name, [file])
    target, memory = empty_blocks(5)
    load = Transfer("a", "", text_of(0), 0, ([1, 2],))
    save = Transfer("b", "", text_of(1), 0, ([1, 2],))
    with (
        KVStore(url) as store,
        closing(Mover(store, FINGERPRINT, target, None, is_changed=lambda exactly: next(changes))) as mover,
    ):
        assert read(mover, [load]) == set() and memory[1:3].any()
        mover.save(TransferPlan(saves=[save]))
        memory.zero_()
        assert read(mover, [load]) == {"a"} and mover.is_aside
        mover.save(TransferPlan(saves=[replace(save, tokens=text_of(2))]))
        assert read(mover, [load]) == {"a"} and not memory.any()
        assert mover.counts["tokens_saved"] == mover.counts["tokens_loaded"] == 2 * PAGE
    assert caplog.text.count("The weights of the model changed.") == 1


def test_what_was_being_read_when_the_model_changed_is_computed() -> None:
    url, changes = "memory://model-changed-meanwhile", iter([False, True])
    run, file = file_of(text_of(0))
    MemoryBackend.of_url(url).put_if_absent(run.name, [file])
    target, memory = empty_blocks(3)
    with (
        KVStore(url) as store,
        closing(Mover(store, FINGERPRINT, target, None, is_changed=lambda exactly: next(changes))) as mover,
    ):
        mover.start(TransferPlan([Transfer("a", "", text_of(0), 0, ([1, 2],))]))
        while not memory[1:3].any():
            pass
        mover.start(TransferPlan())  # a step in which the weights are others
        done, failed = set[str](), set[str]()
        while not done:
            done, failed = mover.finished(True)
        assert done == failed == {"a"}


@pytest.mark.parametrize("is_doubted", [False, True])
def test_a_model_that_is_doubted_is_looked_at_exactly(is_doubted: bool) -> None:
    looks: list[bool] = []
    target, _ = empty_blocks(3)
    with (
        KVStore("memory://doubted") as store,
        closing(
            Mover(store, FINGERPRINT, target, None, is_changed=lambda exactly: looks.append(exactly) or False)
        ) as mover,
    ):
        mover.start(TransferPlan(is_doubted=is_doubted))
    assert looks == [is_doubted]
