"""Random programs of store, load and copy against a dict from slot to bytes."""

from __future__ import annotations

import random

import pytest
import torch
from campaign import times
from hypothesis import given
from hypothesis import strategies as st
from ops.pools import ALL_AXES, INT2, INT4, INT8, Kind, Pool, make_pool, new_tokens
from oracles.bits import FLOATS, assert_same_bits
from torch import Tensor

from kvloom import ops

KINDS = (Kind(torch.float32), Kind(torch.float16), Kind(torch.bfloat16), Kind(torch.int8), INT8, INT4, INT2,
         Kind(torch.int8, 8, 8, torch.bfloat16), Kind(torch.uint8, 4, 4, torch.float16))  # fmt: skip
SLOTS = 12
distinct_slots = st.lists(st.integers(0, SLOTS - 1), max_size=5, unique=True)


def written(pool: Pool) -> list[int]:
    return sorted({slot for _, slot in pool.rows})


def run_store(pool: Pool, slots: list[int], dtype: torch.dtype, seed: int) -> None:
    """Store tokens of random bits, remember them."""
    key, value = new_tokens(len(slots), pool, dtype, seed), new_tokens(len(slots), pool, dtype, seed + 1)
    ops.store(key, value, torch.tensor(slots, dtype=torch.int64), pool.view())
    for token, slot in enumerate(slots):
        if slot >= 0:
            pool.remember("key", slot, key[token])
            pool.remember("value", slot, value[token])


def run_load(pool: Pool, slots: list[int], dtype: torch.dtype) -> None:
    """Load slots and compare with what was remembered."""
    for part, got in zip(
        ("key", "value"),
        ops.load(torch.tensor(slots, dtype=torch.int64), pool.view(), dtype=dtype),
        strict=True,
    ):
        for token, slot in enumerate(slots):
            want = pool.recall(part, slot, dtype)
            assert_same_bits(got[token], want, part, any_nan=dtype in FLOATS and dtype != pool.kind.dtype)


def run_copy(source: Pool, source_slots: list[int], target: Pool, target_slots: list[int]) -> None:
    """Copy slots, remember where they are now."""
    ops.copy(source.view(), torch.tensor(source_slots), target.view(), torch.tensor(target_slots))
    moved = {(part, to): source.rows[part, slot] for part in source.parts()
             for slot, to in zip(source_slots, target_slots, strict=True)}  # fmt: skip
    target.rows.update(moved)


@given(st.sampled_from(KINDS), st.sampled_from(ALL_AXES), st.sampled_from(ALL_AXES), st.booleans(), st.data())
def test_program_leaves_every_byte_as_the_dict_says(
    kind: Kind, axes: str, other_axes: str, strided: bool, data: st.DataObject
) -> None:
    pools = [
        make_pool(axes, kind, strided=strided),
        make_pool(other_axes, kind, seed=1, blocks=2, block_size=6),
    ]
    dtypes = (kind.dtype,) if kind.dtype == torch.int8 and not kind.bits else FLOATS
    for step in range(data.draw(st.integers(1, 6), label="steps")):
        pool = data.draw(st.sampled_from(pools), label="pool")
        action = data.draw(st.sampled_from(["store", "load", "copy"]), label="action")
        filled = written(pool)
        if action == "store":
            slots = data.draw(distinct_slots, label="slots")
            slots = [slot if data.draw(st.integers(0, 4)) else -1 - slot for slot in slots]
            run_store(pool, slots, data.draw(st.sampled_from(dtypes)), seed=10 * step)
        elif filled and action == "load":
            slots = data.draw(st.lists(st.sampled_from(filled), max_size=6), label="slots")
            run_load(pool, slots, data.draw(st.sampled_from(dtypes)))
        elif filled:
            target_slots = data.draw(distinct_slots.filter(len), label="target slots")
            source_slots = [data.draw(st.sampled_from(filled)) for _ in target_slots]
            run_copy(pool, source_slots, data.draw(st.sampled_from(pools)), target_slots)
        for each in pools:
            each.check()


def walk(axes: str, seed: int, steps: int) -> int:
    """Random steps on one pool; returns how many rows were loaded and compared."""
    choose = random.Random(seed)
    pool = make_pool(axes, Kind(torch.int16), blocks=4, block_size=4, seed=seed)
    kv, loaded = pool.view(), 0
    model: dict[int, Tensor] = {}  # slot -> [key|value, H, D]
    fresh = torch.arange(5000).to(torch.int16)

    def as_slots(slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64)

    for _ in range(steps):
        count, action = choose.randint(0, 4), choose.random()
        slots = choose.sample(range(16), count)
        if action < 0.4 or not model:
            rows = fresh[choose.randrange(4000) :][: 2 * count * 16].view(2, count, 2, 8)
            kept = [slot if choose.random() < 0.9 else -1 - slot for slot in slots]
            ops.store(rows[0], rows[1], as_slots(kept), kv)
            model.update({slot: rows[:, i] for i, slot in enumerate(kept) if slot >= 0})
        elif action < 0.6:
            source = choose.choices(list(model), k=count)
            ops.copy(kv, as_slots(source), kv, as_slots(slots))
            model.update(dict(zip(slots, [model[slot] for slot in source], strict=True)))
        elif count:
            wanted = choose.choices(list(model), k=count)
            got = torch.stack(ops.load(as_slots(wanted), kv), dim=1)
            assert torch.equal(got, torch.stack([model[slot] for slot in wanted]))
            loaded += count
    for slot, (key, value) in model.items():
        pool.rows["key", slot], pool.rows["value", slot] = key, value
    pool.check()
    return loaded


@pytest.mark.campaign
def test_long_walk_agrees_with_a_dict() -> None:
    """Every loaded row is compared."""
    steps = times(20_000)
    layouts = ("L 2 T H D", "B 2 H S D", "B H D/4 S D%4", "B H S/2 D S%2", "B (H D/4) S D%4")
    loaded = sum(walk(axes, seed, steps // len(layouts)) for seed, axes in enumerate(layouts))
    assert loaded > steps / 2
