"""Random programs of calls against a dict of slots, and long-lived sequences against the golden."""

from __future__ import annotations

import random

import torch
from campaign import times
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bits
from oracles.pmx_cases import PADDING, Batch, Numerics, assert_matches_golden, poisoned_cache, random_input
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx

HEADS, HEAD_DIM, NUM_LAYERS = 2, 4, 2
Model = dict[int, Tensor]  # slot -> [L, K, H, D]


@st.composite
def ragged_batches(draw: st.DrawFn, num_slots: int) -> Batch:
    """Any legal batch: entries may be empty, share slots, and overlap, but never write one slot twice."""
    form = draw(st.sampled_from(["offset", "page", "token"]))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    kvlens = draw(st.lists(st.integers(0, 9), max_size=5))
    seqlens = [draw(st.integers(0, n)) for n in kvlens]
    if form == "offset":
        starts: tuple = tuple(draw(st.integers(0, num_slots - max(n, 1))) for n in kvlens)
    elif form == "token":
        starts = tuple(
            draw(st.lists(st.integers(0, num_slots - 1), min_size=sum(kvlens), max_size=sum(kvlens)))
        )
    else:
        width = max((-(-n // page_size) for n in kvlens), default=0) + draw(st.integers(0, 2))
        starts = tuple(draw(page_rows(n, page_size, width, num_slots)) for n in kvlens)
    batch = Batch(
        form,
        tuple(seqlens),
        tuple(n - s for n, s in zip(kvlens, seqlens, strict=True)),
        starts,
        num_slots,
        page_size,
    )
    return without_double_writes(batch)


@st.composite
def page_rows(draw: st.DrawFn, kvlen: int, page_size: int, width: int, num_slots: int) -> tuple[int, ...]:
    """The pages of one entry, then padding."""
    row = []
    for done in range(0, kvlen, page_size):
        row.append(draw(st.integers(0, num_slots - min(page_size, kvlen - done))))
    return (*row, *(draw(st.sampled_from(PADDING)) for _ in range(width - len(row))))


def without_double_writes(batch: Batch) -> Batch:
    """Entries that would write a slot again only read."""
    seqlens, start_pos, taken = [], [], set()
    for b, (num_new, start) in enumerate(zip(batch.seqlens, batch.start_pos, strict=True)):
        slots = [batch.slot(b, start + i) for i in range(num_new)]
        clash = len(set(slots)) < len(slots) or bool(taken & set(slots))
        taken |= set() if clash else set(slots)
        seqlens.append(0 if clash else num_new)
        start_pos.append(start + num_new if clash else start)
    return Batch(
        batch.form, tuple(seqlens), tuple(start_pos), batch.cachestarts, batch.num_slots, batch.page_size
    )


def by_token(cache: Tensor, axes: str) -> Tensor:
    return cache.permute([axes.index(axis) for axis in "TLKHD"])


@settings(max_examples=times(80))
@given(data=st.data())
def test_random_programs_behave_like_a_dict_of_slots(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from([0, 1, 2, 3]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    num_slots = data.draw(st.integers(9, 24))
    rng = bits.generator(data.draw(st.integers(0, 99)))
    axes = pmx_golden.DYNAMIC_AXES[layout]
    sizes = {"T": num_slots, "L": NUM_LAYERS, "K": 2, "H": HEADS, "D": HEAD_DIM}
    cache, _ = poisoned_cache(axes, sizes, Numerics(dtype, dtype), rng)
    model: Model = {slot: by_token(cache, axes)[slot].clone() for slot in range(num_slots)}
    for _ in range(data.draw(st.integers(1, 4))):
        batch, layer = data.draw(ragged_batches(num_slots)), data.draw(st.integers(0, NUM_LAYERS - 1))
        num_repeat = data.draw(st.integers(1, 2))
        new = [bits.poison((sum(batch.seqlens), HEADS, HEAD_DIM), dtype, rng) for _ in range(2)]
        for i, slot in enumerate(batch.written()):
            for side in range(2):
                model[slot][layer, side] = new[side][i]
        got = pmx.dynamic_batching.key_value_cache(
            new[0],
            new[1],
            **batch.arguments(),
            cache=cache,
            num_layer=NUM_LAYERS,
            layer_idx=layer,
            num_repeat=num_repeat,
            cache_layout=layout,
        )
        tokens = [batch.slot(b, t) for b, n in enumerate(batch.kvlens()) for t in range(n)]
        for side, name in enumerate(("key", "value")):
            rows = [model[slot][layer, side].repeat_interleave(num_repeat, 0) for slot in tokens]
            empty = torch.empty(0, HEADS * num_repeat, HEAD_DIM, dtype=dtype)
            bits.assert_same_bits(got[side], torch.stack(rows) if rows else empty, name)
        expected = torch.stack([model[slot] for slot in range(num_slots)])
        bits.assert_same_bits(by_token(cache, axes), expected, "cache")


class Sequences:
    """Sequences that own page lists in one pool; forks share the full pages of their parent."""

    def __init__(self, page_size: int, num_pages: int, rng: random.Random) -> None:
        self.page_size, self.num_slots = page_size, num_pages * page_size + 3
        self.free = [3 + page * page_size for page in range(num_pages)]
        rng.shuffle(self.free)
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []

    def begin(self, parent: int | None) -> None:
        shared = 0 if parent is None else self.lengths[parent] // self.page_size
        self.pages.append([] if parent is None else self.pages[parent][:shared])
        self.lengths.append(shared * self.page_size)

    def step(self, new: list[int], start_pos: list[int]) -> Batch:
        for pages, start, count in zip(self.pages, start_pos, new, strict=True):
            while len(pages) * self.page_size < start + count:
                pages.append(self.free.pop())
        width = max(len(pages) for pages in self.pages) + 1
        rows = tuple((*pages, *[-1] * (width - len(pages))) for pages in self.pages)
        self.lengths = [start + count for start, count in zip(start_pos, new, strict=True)]
        return Batch("page", tuple(new), tuple(start_pos), rows, self.num_slots, self.page_size)


@settings(max_examples=times(25))
@given(data=st.data())
def test_prefill_decode_fork_and_roll_back_equal_the_golden(data: st.DataObject) -> None:
    rng = bits.generator(data.draw(st.integers(0, 99)))
    page_size, bit = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([8, 4]))
    how = Numerics(torch.float16, {8: torch.int8, 4: torch.uint8}[bit], torch.float16, bit, group=4)
    layout = data.draw(st.sampled_from([0, 3]))
    world = Sequences(page_size, 60, random.Random(data.draw(st.integers(0, 99))))
    sizes = {"T": world.num_slots, "L": 1, "K": 2, "H": 1, "D": 8}
    cache, scale = poisoned_cache(pmx_golden.DYNAMIC_AXES[layout], sizes, how, rng)
    assert scale is not None
    scale.fill_(0.5)
    world.begin(None)
    for _ in range(data.draw(st.integers(2, 5))):
        if len(world.pages) < 4 and data.draw(st.booleans()):
            world.begin(data.draw(st.sampled_from([None, *range(len(world.pages))])))
        start_pos = [data.draw(st.integers(max(0, n - 3), n)) for n in world.lengths]
        batch = world.step([data.draw(st.sampled_from([0, 1, 1, 2, 5])) for _ in start_pos], start_pos)
        batch = without_double_writes(batch)
        world.lengths = batch.kvlens()
        shape = (sum(batch.seqlens), 1, 8)
        call = {
            "current_key": random_input(shape, how.inputs, rng),
            "current_value": random_input(shape, how.inputs, rng),
            **batch.arguments(),
            **how.attributes(),
            "cache": cache,
            "scale": scale,
            "cache_layout": layout,
        }
        operator = pmx.dynamic_batching.key_value_cache
        assert_matches_golden(operator, pmx_golden.dynamic_key_value_cache, call, any_nan=True)
