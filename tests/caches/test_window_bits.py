"""Attention of layers with a window has the bits of a layer that keeps all tokens, in any form and cut."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.caches.format import kept_as

NUM_TOKENS = 1400
KINDS = ["float32", "int8:g32", "int4:g32 with a residual window"]
WINDOWS = [1, 64, 600]
CUTS = [(1, 40), (2, 900)]
"""Seeds, and most tokens of a piece: pieces that do not fit beside those that they see, too."""


def format_of(kind: str, page_size: int, max_tokens: int | None = None) -> CacheFormat:
    dtype, quant = kept_as("kind", kind.split()[0])
    return CacheFormat(dtype, quant, page_size, max_tokens, recent=48 if "residual" in kind else 0)


@functools.cache
def text() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, H, N, D]``."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, NUM_TOKENS, 32)
    return query, key, value


def cuts(seed: int, most: int) -> list[tuple[int, int]]:
    """Where pieces begin and end."""
    chooser, ends = random.Random(seed), [0]
    while ends[-1] < NUM_TOKENS:
        size = 1 if chooser.random() < 0.8 else chooser.randint(2, most)
        ends.append(min(ends[-1] + size, NUM_TOKENS))
    return [*itertools.pairwise(ends)]


def attended(layer: PagedLayer | FixedLayer, pieces: list[tuple[int, int]]) -> Tensor:
    """``[B, N, H, D]`` of a text that comes in pieces."""
    query, key, value = (x.split([end - start for start, end in pieces], 2) for x in text())
    each = zip(query, key, value, strict=True)
    return torch.cat([layer.append(new, values).attend(asking) for asking, new, values in each], 1)


@functools.cache
def expected(kind: str, window: int) -> Tensor:
    """The same of tokens that are all kept, where attention alone knows of the window."""
    query, key, value = text()
    return PagedLayer(format_of(kind, 16)).append(key, value).attend(query, ops.Scores(window=window))


@pytest.mark.parametrize(
    ("page_size", "window", "kind"), pairwise([1, 7, 16, 24, 32, 128], WINDOWS, KINDS), ids=str
)
def test_pages_of_any_size(page_size: int, window: int, kind: str) -> None:
    format = format_of(kind, page_size)
    for seed, most in CUTS:
        layer = PagedLayer(format, Sequences(format, window))
        assert torch.equal(attended(layer, cuts(seed, most)), expected(kind, window))
        assert layer.sequences.tables[0].num_tokens < NUM_TOKENS  # others were evicted


@pytest.mark.parametrize(
    ("window", "kind", "max_tokens"), pairwise(WINDOWS, KINDS, [None, NUM_TOKENS]), ids=str
)
def test_fixed_storage(window: int, max_tokens: int | None, kind: str) -> None:
    for seed, most in CUTS:
        layer = FixedLayer(format_of(kind, 1, max_tokens), window)
        assert torch.equal(attended(layer, cuts(seed, most)), expected(kind, window))


@pytest.mark.parametrize("kind", ["float32", "int8:g32"])
def test_rows_of_different_lengths(kind: str) -> None:
    """A row that lost tokens begins in a later column than the other, and has its own bits still."""
    window, lost, kept = 64, 17, 700
    query, key, value = text()
    format = format_of(kind, 16)
    layer = PagedLayer(format, Sequences(format, window, rollback=32))
    layer.append(key[:, :, :kept], value[:, :, :kept])
    layer.sequences.remove([0, lost])
    for start in range(kept, NUM_TOKENS, 9):
        end = min(start + 9, NUM_TOKENS)
        new = [
            torch.stack([x[0, :, start:end], x[1, :, start - lost : end - lost]]) for x in (query, key, value)
        ]
        out = layer.append(new[1], new[2]).attend(new[0])
        whole = expected(kind, window)
        assert torch.equal(out[0], whole[0, start:end])
        assert torch.equal(out[1], whole[1, start - lost : end - lost])
