"""What is read unquantized follows from what became of a text, and not from where its tokens lie.

A history is appends and removals. Pages of every size and fixed storage, each append cut at random, with
forks and files in between: all have the same bits.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch
from caches.mixed import INT4, smoothing, tokens
from campaign import times
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.core.specs import QuantSpec
from kvloom.ops.impl import cpu

HISTORIES = times(2)
ROWS, MOST = 2, 900
KINDS = {"int4": INT4, "int8 rotated": QuantSpec(8, 32, rotated=True)}

History = list[int]
"""Numbers of tokens: appended, or removed if negative."""
_Layer = PagedLayer | FixedLayer


def format_of(kind: str, recent: int, page_size: int = 16, max_tokens: int | None = None) -> CacheFormat:
    smooth = smoothing() if kind == "int4" else None
    sizes = {"page_size": page_size, "max_tokens": max_tokens}
    return CacheFormat(quant=KINDS[kind], recent=recent, smoothing=smooth, **sizes)


def placements(kind: str, recent: int, window: int | None) -> dict[str, Callable[[], _Layer]]:
    """Every way to keep a text."""
    made: dict[str, Callable[[], _Layer]] = {
        f"pages of {size}": lambda size=size: PagedLayer(
            format_of(kind, recent, size), Sequences(format_of(kind, recent, size), window)
        )
        for size in (16, 1, 24)
    }
    made["fixed"] = lambda: FixedLayer(format_of(kind, recent, max_tokens=MOST), window)
    if window is not None:
        made["fixed, of any length"] = lambda: FixedLayer(format_of(kind, recent), window)
    return made


def history_of(draw: random.Random, window: int | None) -> History:
    """Appends and removals; of a window no more than it can go back by."""
    counts, length, removable = [draw.choice([1, 17, 60, 130])], 0, 0
    for _ in range(8):
        length, removable = length + max(counts[-1], 0), min(removable + max(counts[-1], 0), 15)
        most = length if window is None else min(length, removable)
        if draw.random() < 0.5 and most and counts[-1] > 0:
            count = min(draw.choice([1, 5, 16, 17, 40, 95]), most)
            length, removable = length - count, removable - count
            counts.append(-count)
        else:
            counts.append(draw.choice([1, 3, 30, 70]))
    return [*counts, 1]


def moved(layer: _Layer, draw: random.Random) -> _Layer:
    """The layer, or a fork of it, or what a file gives back."""
    match draw.randrange(6):
        case 0:
            return layer.fork()
        case 1:
            loaded: _Layer = pickle.loads(pickle.dumps(layer))  # noqa: S301 (our own)
            return loaded
    return layer


def read(layer: _Layer, history: History, draw: random.Random | None) -> list[Tensor]:
    """What attention in place gives each appended text; ``draw`` cuts it and moves the layer."""
    found = []
    for number, count in enumerate(history):
        if count < 0:
            layer.truncate(layer.num_tokens + count)
            continue
        key, query, parts, start = (
            tokens(ROWS, count, 2 * number),
            tokens(ROWS, count, 2 * number + 1, 4),
            [],
            0,
        )
        while start < count:
            end = count if draw is None else start + draw.randint(1, count - start)
            new = key[:, :, start:end]
            parts.append(layer.append(new, -new).attend(query[:, :, start:end]))
            start, layer = end, layer if draw is None else moved(layer, draw)
        found.append(torch.cat(parts, 1))
    return found


@pytest.mark.campaign
@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 9, 50])
@pytest.mark.parametrize("recent", [1, 20, 40])
def test_a_history_has_the_same_bits_wherever_it_lies(kind: str, window: int | None, recent: int) -> None:
    for seed in range(HISTORIES):
        draw = random.Random(f"{kind} {window} {recent} {seed}")
        history = history_of(draw, window)
        made = placements(kind, recent, window)
        want = read(next(iter(made.values()))(), history, None)
        for name, layer in made.items():
            got = read(layer(), history, draw)
            assert_same_bits(torch.cat(got, 1), torch.cat(want, 1), f"{name}, {history}")


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("page_size", [16, 1])
def test_pages_begin_at_multiples_of_a_page_when_all_was_removed(page_size: int) -> None:
    """As where nothing was removed, so attention adds its partial results in one order."""
    form, parts = format_of("int4", 20, page_size), []
    for history in ([130, -95, 70], [130, -95, 35, 35], [130, -90, -5, *[10] * 7]):
        layer, key, query, start = PagedLayer(form), tokens(1, 70, 1), tokens(1, 70, 2, 4), 0
        for number, count in enumerate(history):
            if count < 0:
                layer.truncate(layer.num_tokens + count)
                start, found = 0, []
                continue
            new = key[:, :, start : start + count] if number else tokens(1, count, 3)
            out = layer.append(new, -new)
            if number:
                found.append(out.attend(query[:, :, start : start + count]))
                start += count
        parts.append(torch.cat(found, 1))
    for found in parts[1:]:
        assert_same_bits(found, parts[0], "out")
