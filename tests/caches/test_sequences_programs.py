"""Random programs on the sequences of a cache, with and without a window, against lists of tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer, Pages, Sequences, Tokens
from kvloom.caches.rows.sequences import ROLLBACK
from kvloom.core.specs import QuantSpec
from kvloom.errors import StateError
from kvloom.paging import PageTable, PrefixTree, check
from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.rotation import rotate

HEADS, DIM = 2, 8
ACTIONS = ["append"] * 3 + ["long append", "remove", "remove rows", "select", "fork", "record"]
FORMATS = {"float32": None, "int8": QuantSpec(8, 4), "int4": QuantSpec(4, 8, rotated=True)}


def as_kept(x: Tensor, quant: QuantSpec | None) -> Tensor:
    """A round trip through storage."""
    if quant is None:
        return x
    x = rotate(x, DIM) if quant.rotated else x
    codes, scale = quantize(x, quant.bits, quant.group, quant.scale_dtype)
    back = dequantize(codes, scale, quant.bits, x.dtype)
    return rotate(back, DIM) if quant.rotated else back


@dataclass
class Rows:
    """What a cache of two layers should hold: keys of each row and layer, ``[H, tokens, D]``."""

    window: int | None
    rows: list[list[Tensor]] = field(default_factory=list)
    num_columns: int = 0
    padding: list[int] = field(default_factory=list)  # in front of each row, if there is any

    def append(self, layer: int, keys: Tensor) -> None:
        if not self.rows:
            self.rows = [[torch.zeros(HEADS, 0, DIM) for _ in range(2)] for _ in range(keys.shape[0])]
        start = self.num_columns - keys.shape[2]
        for b, (row, new) in enumerate(zip(self.rows, keys, strict=True)):
            hidden = max(self.padding[b] - start, 0) if self.padding else 0
            row[layer] = torch.cat([row[layer], new[:, hidden:]], dim=1)

    def remove(self, counts: list[int]) -> None:
        if len(set(counts)) > 1:
            self.padding = []
        end = max(self.num_columns - counts[0], 0)
        for b, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            kept = max(end - self.padding[b], 0) if self.padding else max(row[0].shape[1] - count, 0)
            row[:] = [x[:, :kept] for x in row]
        self.num_columns = end if self.padding else max((row[0].shape[1] for row in self.rows), default=0)

    def check(self, layer: int, stored: Tokens, num_new: int) -> None:
        """Gathered columns are the visible tokens, and attention over them is that over the rows."""
        first = 0 if self.window is None else max(self.num_columns - num_new - self.window + 1, 0)
        keys, values = stored.gather(torch.float32)
        assert keys.shape == (len(self.rows), HEADS, self.num_columns - first, DIM)
        for row, key, value in zip(self.rows, keys, values, strict=True):
            if not row[layer].shape[1]:
                continue
            want = row[layer][:, max(row[layer].shape[1] - keys.shape[2], 0) :]
            own = keys.shape[2] - want.shape[1]
            assert torch.equal(key[:, own:], want)
            assert torch.equal(value[:, own:], want)
        if not num_new:
            return
        query = torch.randn(len(self.rows), 2 * HEADS, num_new, DIM, generator=generator(num_new))
        out = stored.attend(query)
        for b, row in enumerate(self.rows):
            key = row[layer].repeat_interleave(2, dim=0)
            position, own = torch.arange(key.shape[1]), min(num_new, key.shape[1])
            distance = position - position[key.shape[1] - own :].unsqueeze(1)
            hidden = (distance > 0) | (distance <= -(self.window or key.shape[1] + 1))
            asked, got = query[b, :, num_new - own :], out[b, num_new - own :]
            weights = (asked @ key.mT / DIM**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
            torch.testing.assert_close(got.transpose(0, 1), weights @ key, rtol=1e-4, atol=1e-5)
            assert not out[b, : num_new - own].any()  # of padding, which sees nothing


@dataclass
class Cache:
    """Two layers over the same sequences, and what they should hold."""

    sequences: Sequences
    layers: list[PagedLayer]
    model: Rows

    @classmethod
    def over(cls, sequences: Sequences, model: Rows) -> Cache:
        layers = [PagedLayer(sequences.format, sequences, i) for i in range(2)]
        for layer in layers:
            layer.num_tokens = sequences.num_positions
        return cls(sequences, layers, model)

    def append(self, size: int, count: int, seed: int) -> None:
        """A step: all layers get their tokens, each attends when it has them."""
        self.model.num_columns += count
        for i, layer in enumerate(self.layers):
            new = torch.randn(size, HEADS, count, DIM, generator=generator(100 * seed + i))
            self.model.append(i, as_kept(new, self.sequences.format.quant))
            self.model.check(i, layer.append(new, new), count)

    def settle(self) -> None:
        """Between steps: lengths agree, and everything the next token sees is there."""
        assert self.sequences.num_positions == self.model.num_columns
        for i, layer in enumerate(self.layers):
            layer.num_tokens = self.sequences.num_positions
            if self.sequences.size and layer.storage is not None:
                self.model.check(i, layer.stored(), 0)


@given(st.data())
def test_program_agrees_with_lists_of_tokens(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 4), label="page_size")
    window = data.draw(st.sampled_from([None, 1, 2, 5, 9]), label="window")
    quant = data.draw(st.sampled_from(list(FORMATS.values())), label="quant")
    memory = Pages(CacheFormat(quant=quant, page_size=page_size))
    caches = [Cache.over(Sequences(memory, window), Rows(window))]
    padding = data.draw(st.lists(st.integers(0, 40), max_size=3), label="padding")
    if any(padding):
        other = Cache.over(Sequences(memory, window), Rows(window))  # a step of padding alone needs some page
        other.append(1, 1, 0)
        tables = [PageTable(memory.pool, page_size) for _ in padding]
        caches[0].sequences.adopt(tables, padding, min(padding))
        caches[0].model.num_columns = min(padding)
        for layer in caches[0].layers:
            layer.num_tokens = min(padding)
        caches[0].model.rows = [[torch.zeros(HEADS, 0, DIM) for _ in range(2)] for _ in padding]
        caches[0].model.padding = padding
    for step in range(data.draw(st.integers(1, 14), label="steps")):
        cache = data.draw(st.sampled_from(caches), label="cache")
        sequences, model = cache.sequences, cache.model
        action = data.draw(
            st.sampled_from(
                ["append"] * 3 + ["long append", "remove", "remove rows", "select", "fork", "record"]
            )
        )
        if action.endswith("append"):
            count = data.draw(st.integers(1, 4) if action == "append" else st.integers(30, 70), label="count")
            cache.append(sequences.size or data.draw(st.integers(1, 3), label="batch"), count, step)
        elif action.startswith("remove") and sequences.size:
            one = data.draw(st.integers(0, 12), label="count")
            counts = [
                one if action == "remove" else data.draw(st.integers(0, 12)) for _ in range(sequences.size)
            ]
            try:
                sequences.remove(counts)
            except StateError:
                if len(set(counts)) > 1 and any(n > model.num_columns for n in model.padding):
                    continue  # a row that has not begun
                assert window is not None
                assert (
                    max(counts) > ROLLBACK - page_size
                    or sequences.is_recording
                    or model.num_columns > ROLLBACK
                )
            else:
                model.remove(counts)
        elif action == "select" and sequences.size:
            rows = data.draw(
                st.lists(st.integers(0, sequences.size - 1), min_size=1, max_size=4), label="rows"
            )
            sequences.select(rows)
            model.rows = [list(model.rows[row]) for row in rows]
            model.padding = [model.padding[row] for row in rows] if model.padding else []
        elif action == "fork" and len(caches) < 3:
            caches.append(Cache.over(sequences.fork(), copy.deepcopy(model)))
        elif action == "record":
            sequences.is_recording = not sequences.is_recording
        for other in caches:
            other.settle()
    tables = [table for sequences in memory.users for table in sequences.tables]
    check(memory.pool, PrefixTree(memory.pool, page_size), tables)


@pytest.mark.parametrize("long", [1, 500], ids=["one by one", "at once"])
def test_a_window_holds_few_pages_however_long_the_text(long: int) -> None:
    sequences = Sequences(CacheFormat(page_size=4), window=10)
    cache = Cache.over(sequences, Rows(10))
    for step in range(1000 // long):
        cache.append(2, long, step)
    cache.append(2, 1, 0)
    most = 2 * (-(-(10 + ROLLBACK) // 4) + 2)
    assert sequences.num_pages_held <= most
    assert sequences.pages.pool.num_pages <= 2 * most
    assert sequences.num_positions == 1001


def test_what_a_window_has_evicted_cannot_come_back() -> None:
    sequences = Sequences(CacheFormat(page_size=4), window=10)
    cache = Cache.over(sequences, Rows(10))
    cache.append(1, 300, 0)
    sequences.remove([ROLLBACK])
    cache.model.remove([ROLLBACK])
    cache.settle()
    with pytest.raises(StateError, match=r"sequence 0 must keep at least 2\d\d tokens"):
        sequences.remove([ROLLBACK])
    cache.settle()


def test_recording_keeps_what_a_window_passes_until_the_next_removal() -> None:
    sequences = Sequences(CacheFormat(page_size=4), window=10)
    cache = Cache.over(sequences, Rows(10))
    sequences.is_recording = True
    for step in range(3):
        cache.append(1, 100, step)
    sequences.remove([200])
    cache.model.remove([200])
    cache.settle()
    assert sequences.num_pages_held <= (10 + ROLLBACK) // 4 + 2


def test_a_row_that_a_long_step_passes_less_of_keeps_its_tokens() -> None:
    """Rows of other lengths fill pages at other columns; one alone may be past what the step began with."""
    sequences = Sequences(CacheFormat(page_size=8), window=2)
    cache = Cache.over(sequences, Rows(2))
    for count, removed in ((5, [0, 2]), (36, [32, 37])):
        cache.append(2, count, count)
        sequences.remove(removed)
        cache.model.remove(removed)
        cache.settle()
    cache.append(2, 1, 0)
