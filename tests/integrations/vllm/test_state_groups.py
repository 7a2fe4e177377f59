"""Which recurrent states a connector reads and writes for vLLM's requests; without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("xxhash")

from integrations.vllm.test_mover import FINGERPRINT, PAGE, empty_blocks, file_of, read
from integrations.vllm.test_planner import Request

from kvloom.integrations.vllm.storing.mover import Mover
from kvloom.integrations.vllm.storing.planner import Planner, Transfer, TransferPlan
from kvloom.integrations.vllm.storing.recurrent import StateGroups, States
from kvloom.store import KVStore
from kvloom.store.backends.memory import MemoryBackend

# Group 0 attends; groups 1 and 2 have two layers and one, of seven bytes and twelve behind a text.
GROUPS = StateGroups((1, 2), (("a", "b"), ("c",)), PAGE, 7 + 7 + 12, "seven and twelve bytes")
WHOSE = GROUPS.fingerprint(FINGERPRINT)
BLOCKS = ([5, 6, 7, 8], [0, 0, 21, 22], [0, 0, 31, 32])
TEXT = list(range(4 * PAGE))


def memory(num_blocks: int = 40) -> list[list[list[Tensor]]]:
    """Of each group, of each layer, its states."""
    random = torch.Generator().manual_seed(0)
    byte = torch.randint(0, 255, (2, num_blocks, 7), dtype=torch.uint8, generator=random)
    return [
        [[byte[0]], [byte[1]]],
        [[torch.rand(num_blocks, 2, generator=random), torch.rand(num_blocks, 1)]],
    ]


def save_pages(store: KVStore, num_pages: int) -> None:
    text = TEXT[: num_pages * PAGE]
    data = bytearray(
        FINGERPRINT.num_heads * num_pages * empty_blocks(1)[0].page_bytes // FINGERPRINT.num_heads
    )
    assert store.save(FINGERPRINT, "", text, 0, PAGE, data)


def save_states(store: KVStore, num_tokens: int, whose: object = WHOSE, salt: str = "") -> None:
    packed = States(WHOSE, memory()).pack((1, 2))
    assert store.save(whose, salt, TEXT[:num_tokens], num_tokens - 1, 1, packed)  # type: ignore[arg-type]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with KVStore(f"memory://{request.node.name}") as store:
        yield store


def found(store: KVStore, computed: int = 0) -> int | None:
    assert store.flush(10)
    with closing(Planner(store, FINGERPRINT, PAGE, states=GROUPS)) as planner:
        return planner.match(Request("a", [*TEXT, 7]), computed)


def test_a_prefix_has_pages_and_the_states_behind_them(store: KVStore) -> None:
    save_pages(store, 3)
    assert found(store) == 0
    save_states(store, 2 * PAGE)
    assert found(store) == 2 * PAGE
    assert found(store, 2 * PAGE) == 0
    save_states(store, 4 * PAGE)  # of which a page is missing
    assert found(store) == 2 * PAGE
    save_states(store, 3 * PAGE)
    assert found(store, PAGE) == 2 * PAGE


def test_states_alone_and_those_of_others_are_none(store: KVStore) -> None:
    save_states(store, 2 * PAGE)
    assert found(store) == 0
    save_pages(store, 3)
    save_states(store, 3 * PAGE, salt="other")
    save_states(store, 3 * PAGE, replace(GROUPS, content="others").fingerprint(FINGERPRINT))
    save_states(store, 3 * PAGE, GROUPS.fingerprint(replace(FINGERPRINT, weights="other")))
    save_states(store, 3 * PAGE - 1)
    assert found(store) == 2 * PAGE


def test_states_are_read_into_the_block_behind_which_a_request_goes_on(store: KVStore) -> None:
    with closing(Planner(store, FINGERPRINT, PAGE, states=GROUPS)) as planner:
        planner.allocated(Request("a", [*TEXT, 7], num_computed_tokens=PAGE), BLOCKS, 2 * PAGE)
        [load] = planner.plan({}, lambda name: BLOCKS).loads
    assert (load.start, len(load.tokens), load.blocks, load.states) == (
        PAGE,
        3 * PAGE,
        ([5, 6, 7, 8],),
        (21, 31),
    )


def test_states_are_written_that_all_groups_offer_behind_pages(store: KVStore) -> None:
    offers = [(1, 21, 3 * PAGE), (2, 31, 3 * PAGE), (1, 22, 4 * PAGE), (1, 20, PAGE - 1), (2, 30, PAGE - 1)]
    with closing(Planner(store, FINGERPRINT, PAGE, states=GROUPS)) as planner:
        planner.allocated(request := Request("a", TEXT, cache_salt="mine"), BLOCKS, 0)
        plan = planner.plan({"a": 4 * PAGE}, lambda name: BLOCKS, {"a": offers, "unknown": offers})
        [state] = plan.states
        assert (state.tokens, state.salt, state.states) == (TEXT[: 3 * PAGE], "mine", (21, 31))
        assert [save.blocks for save in plan.saves] == [([5, 6, 7, 8],)]
        request.lora_request = object()
        assert planner.plan({"a": 1}, lambda name: BLOCKS, {"a": offers}).states == []
        request.lora_request = None
        planner.set_aside()
        assert planner.plan({"a": 1}, lambda name: BLOCKS, {"a": offers}).states == []


def written_and_read(store: KVStore, damage: bool = False) -> tuple[set[str], list[bool]]:
    """Requests that failed, and of each state whether it went to its block and to no other."""
    run, file = file_of(text := [0, *range(1, 2 * PAGE)])
    MemoryBackend.of_url(store.tiers[0].url).put_if_absent(run.name, [file])
    source, target = memory(), [[[torch.zeros_like(x) for x in y] for y in z] for z in memory()]
    pages, _ = empty_blocks(3)
    with closing(Mover(store, FINGERPRINT, pages, None, states=States(WHOSE, source))) as mover:
        mover.save(TransferPlan(states=[Transfer("a", "", text, 2 * PAGE - 1, (), (21, 31))]))
        assert store.flush(10)
    if damage:
        objects = MemoryBackend.of_url(store.tiers[0].url)._objects
        [name] = [name for name in objects if name != run.name and WHOSE.folder in name]
        parts, used = objects[name]
        data = b"".join(parts)
        objects[name] = [data[:-12] + b"?" + data[-11:]], used
    with closing(Mover(store, FINGERPRINT, pages, None, states=States(WHOSE, target))) as mover:
        failed = read(mover, [Transfer("a", "", text, 0, ([1, 2],), (3, 4))])
    right = []
    for group, (mine, theirs) in enumerate(zip(target, source, strict=True)):
        to, of = (3, 4)[group], (21, 31)[group]
        for a, b in ((x, y) for m, t in zip(mine, theirs, strict=True) for x, y in zip(m, t, strict=True)):
            right.append(torch.equal(a[to], b[of]) and int(a.count_nonzero()) == int(b[of].count_nonzero()))
    return failed, right


def test_states_are_those_that_were_written(store: KVStore) -> None:
    assert written_and_read(store) == (set(), [True] * 4)


def test_damaged_states_are_not_read_and_nor_is_the_request(store: KVStore) -> None:
    assert written_and_read(store, damage=True) == ({"a"}, [False] * 4)


def test_without_states_pages_are_not_enough(store: KVStore) -> None:
    run, file = file_of(text := [0, *range(1, 2 * PAGE)])
    MemoryBackend.of_url(store.tiers[0].url).put_if_absent(run.name, [file])
    pages, _ = empty_blocks(3)
    with closing(Mover(store, FINGERPRINT, pages, None, states=States(WHOSE, memory()))) as mover:
        assert read(mover, [Transfer("a", "", text, 0, ([1, 2],), (3, 4))]) == {"a"}
        assert mover.counts["tokens_loaded"] == 0
