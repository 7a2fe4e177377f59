"""The newest tokens as they were computed in fixed storage: what pages of any number make of them."""

from __future__ import annotations

import pickle

import pytest
import torch
from caches.test_recent import DIM, HEADS, INT4, RECENT, mixed, tokens
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import assert_same_bits
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, PagedLayer
from kvloom.caches.fixed_recent import ROLLBACK, ring_slots
from kvloom.core.specs import QuantSpec
from kvloom.ops.impl import cpu

FORMAT = CacheFormat(quant=INT4, recent=RECENT, max_tokens=700)


def both(quant: QuantSpec = INT4, recent: int = RECENT) -> tuple[PagedLayer, FixedLayer]:
    format = CacheFormat(quant=quant, recent=recent)
    return PagedLayer(format), FixedLayer(CacheFormat(quant=quant, recent=recent, max_tokens=700))


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("quant", [INT4, QuantSpec(4, 32, rotated=True)], ids=str)
@pytest.mark.parametrize("recent", [1, 16, 40])
def test_fixed_storage_has_the_bits_of_pages(recent: int, quant: QuantSpec) -> None:
    paged, fixed = both(quant, recent)
    for count in (70, 1, 5, 30, 1, 22, 400, 1, 3, 100):
        key, query = tokens(2, count, count), tokens(2, count, 3, 4)
        assert_same_bits(fixed.append(key, -key).attend(query), paged.append(key, -key).attend(query), "out")
        for got, want in zip(fixed.gather(torch.float32), paged.gather(torch.float32), strict=True):
            assert_same_bits(got[:, :, : paged.num_tokens], want, "held")
    assert fixed.nbytes_recent == 2 * 2 * HEADS * ring_slots(recent) * DIM * 4
    assert fixed.nbytes_recent <= paged.nbytes_recent <= 3 * fixed.nbytes_recent


@pytest.mark.parametrize("recent", [1, 9, 40])
@pytest.mark.parametrize("window", [9, 50])
@pytest.mark.parametrize("max_tokens", [None, 700])
def test_windows(max_tokens: int | None, window: int, recent: int) -> None:
    layer = FixedLayer(CacheFormat(quant=INT4, recent=recent, max_tokens=max_tokens), window)
    key, query, start = tokens(2, 640, 1), tokens(2, 640, 3, 4), 0
    for count in (70, 1, 5, 30, 1, 1, 22, 400, 1, 3, 100):
        piece = slice(start, start := start + count)
        out = layer.append(key[:, :, piece], -key[:, :, piece]).attend(query[:, :, piece])
        for b in range(2):
            own = key[b, :, :start]
            want = mixed(query[b, :, piece], own, -own, recent, 0, window)
            torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)


def test_gathered_columns_are_exact_where_they_stand() -> None:
    for window, max_tokens in ((None, 700), (50, 700), (50, None)):
        layer, key = FixedLayer(CacheFormat(quant=INT4, recent=RECENT, max_tokens=max_tokens), window), None
        key = tokens(2, 130, 1)
        for start, end in ((0, 3), (3, 4), (4, 80), (80, 90), (90, 130)):
            columns, first = layer.get_mask_sizes(end - start)
            keys, values = layer.update(key[:, :, start:end], -key[:, :, start:end])
            assert keys.shape[2] == columns
            exact = slice(max(start - RECENT + 1, 0) - int(first), end - int(first))
            assert torch.equal(keys[:, :, exact], key[:, :, exact.start + int(first) : end])
            assert torch.equal(values, -keys)
        held, after = layer.keys, layer.get_mask_sizes(0)[1] if max_tokens is None else 0
        evicted = max(130 - layer.num_columns, 0) if max_tokens is None else int(after)
        newest = slice(130 - RECENT + 1 - evicted, 130 - evicted)
        assert torch.equal(held[:, :, newest], key[:, :, 130 - RECENT + 1 :])


def test_masks_say_what_newest_tokens_are_seen() -> None:
    paged, fixed = both()
    key, query = tokens(2, 90, 1), tokens(2, 3, 3, 4)
    mask = torch.zeros(2, 1, 3, 90).masked_fill(torch.rand(2, 1, 3, 90) < 0.3, -torch.inf)
    mask[..., 80] = 0
    outs = []
    for layer, columns in ((paged, 90), (fixed, 700)):
        layer.append(key[:, :, :87], -key[:, :, :87])
        padded = torch.nn.functional.pad(mask, (0, columns - 90), value=-torch.inf)
        outs.append(layer.append(key[:, :, 87:], -key[:, :, 87:]).attend(query, mask=padded))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)


class Program:
    """A layer of fixed storage and what it should hold: all keys, and the first that is known."""

    def __init__(self, layer: FixedLayer, key: Tensor, known: int = 0) -> None:
        self.layer, self.key, self.known = layer, key, known

    def append(self, count: int, seed: int) -> None:
        new, query = tokens(self.key.shape[0], count, seed), tokens(self.key.shape[0], count, seed + 1, 4)
        self.key = torch.cat((self.key, new), 2)
        out = self.layer.append(new, -new).attend(query)
        for b, own in enumerate(self.key):
            want = mixed(query[b], own, -own, RECENT, self.known)
            torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)

    def crop(self, count: int) -> None:
        end = max(self.key.shape[2] - count, 0)
        self.known = min(max(self.known, self.key.shape[2] - ring_slots(RECENT)), end)
        self.key = self.key[:, :, :end]
        self.layer.truncate(end)


@given(st.data())
def test_programs_of_crops_rows_forks_and_files(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    programs = [Program(FixedLayer(FORMAT), torch.zeros(rows, HEADS, 0, 32))]
    programs[0].append(data.draw(st.integers(1, 60)), 0)
    for seed in range(10, 10 * data.draw(st.integers(2, 7)), 10):
        program = data.draw(st.sampled_from(programs))
        match data.draw(st.sampled_from(["append", "append", "long", "crop", "select", "fork", "save"])):
            case "append":
                program.append(data.draw(st.integers(1, 4)), seed)
            case "long":
                program.append(data.draw(st.integers(5, 70)), seed)
            case "crop":
                program.crop(data.draw(st.integers(0, 60)))
            case "select":
                row = st.integers(0, program.key.shape[0] - 1)
                which = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
                program.layer.select(which)
                program.key = program.key[which]
            case "fork":
                programs.append(Program(program.layer.fork(), program.key, program.known))
            case "save":
                program.layer = pickle.loads(pickle.dumps(program.layer))  # noqa: S301 (our own)
    for program in programs:
        program.append(1, 1000)


@pytest.mark.parametrize("removed", [ROLLBACK, 17, 40, 95])
def test_overwritten_tokens_are_read_as_codes_and_new_ones_are_exact(removed: int) -> None:
    program = Program(FixedLayer(FORMAT), torch.zeros(2, HEADS, 0, 32))
    program.append(100, 0)
    program.crop(removed)
    for count in (1, 3, 30):
        program.append(count, count)


def test_a_step_that_fails_takes_no_token_that_is_read_again() -> None:
    program = Program(FixedLayer(FORMAT), torch.zeros(2, HEADS, 0, 32))
    program.append(100, 0)
    new = tokens(2, ROLLBACK, 5)
    program.layer._recent.keep(new, new, program.layer.length, 0)
    program.append(1, 1)


def test_assigned_keys_are_read_as_codes() -> None:
    program = Program(FixedLayer(CacheFormat(quant=INT4, recent=RECENT, max_tokens=64)), tokens(2, 0, 0))
    program.append(40, 0)
    layer, new = program.layer, tokens(2, 64, 7)
    layer.keys = new
    layer.values = -new
    program.key, program.known = new[:, :, :40], 40
    program.append(1, 2)


def test_every_step_is_one_graph() -> None:
    layer, eager = FixedLayer(FORMAT), FixedLayer(FORMAT)
    for x in (layer, eager):
        x.append(tokens(2, 7, 1), tokens(2, 7, 2))
    counter = CompileCounter()

    def attend(key: Tensor, query: Tensor) -> Tensor:
        return layer.append(key, -key).attend(query, ops.Scores())

    torch._dynamo.reset()
    step = torch.compile(attend, fullgraph=True, backend=counter)
    where = [x.data_ptr() for x in layer._recent.ring.tensors]
    for i in range(50):
        key, query = tokens(2, 1, i), tokens(2, 1, 100 + i, 4)
        assert_same_bits(step(key, query), eager.append(key, -key).attend(query), "out")
    assert counter.frame_count == 1
    assert [x.data_ptr() for x in layer._recent.ring.tensors] == where
    long = tokens(2, 50, 1)
    assert_same_bits(step(long, long), eager.append(long, -long).attend(long), "a long step")
