"""Attention to chosen tokens: as attention to all of them under a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, PagedLayer
from kvloom.caches.format import kept_as
from kvloom.caches.tensors.chosen import attend_chosen
from kvloom.core.spelling import parse_kind

RANK, ROPE = 64, 16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(kind: str, rope: int = ROPE, max_tokens: int | None = None) -> PagedLayer | FixedLayer:
    """Latents of a kind and rope keys of 8 bits, if these are codes, in pages of 4 tokens."""
    dtype, quant = kept_as("kind", kind)
    values = CacheFormat(dtype, kept_as("kind", "int8")[1] if quant is not None and rope else None)
    recent = parse_kind("kind", kind).recent or 0
    format = CacheFormat(dtype, quant, 4, max_tokens, values=values, layout="HND", recent=recent)
    return PagedLayer(format) if max_tokens is None else FixedLayer(format)


def filled(layer: PagedLayer | FixedLayer, cuts: tuple[int, ...], rope: int = ROPE, rows: int = 2) -> Any:
    """Latents that attention reads after the last of some steps."""
    for i, count in enumerate(cuts):
        tokens = layer.append(random(rows, 1, count, RANK, seed=i), random(rows, 1, count, rope, seed=9 + i))
    return replace(tokens, is_latent=True)


def choices(rows: int, num_new: int, num_columns: int, count: int) -> Tensor:
    """``[rows, num_new, count]`` distinct columns, some of which a query does not see."""
    order = [random(num_columns, seed=i).argsort()[:count] for i in range(rows * num_new)]
    return torch.stack(order).view(rows, num_new, count).int()


def mask_of(chosen: Tensor, num_columns: int, num_tokens: int, first: Tensor | None) -> Tensor:
    """``[B, 1, Q, N]`` bool, by loops."""
    rows, num_new, _ = chosen.shape
    mask = torch.zeros(rows, 1, num_new, num_columns, dtype=torch.bool)
    for b in range(rows):
        for i in range(num_new):
            for column in chosen[b, i].tolist():
                begin = 0 if first is None else int(first[b])
                mask[b, 0, i, column] = begin <= column <= num_tokens - num_new + i
    return mask


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("kind", ["auto", "int8", "int4,recent=7", "int2,recent=0"])
def test_chosen_tokens_are_attended_to_as_under_a_mask(kind: str, num_new: int) -> None:
    tokens = filled(layer_of(kind), (30, 11, num_new))
    num_tokens, query = 41 + num_new, random(2, 3, num_new, RANK + ROPE, seed=5)
    for first in (None, torch.tensor([6, 0])):
        chosen = choices(2, num_new, num_tokens, 9)
        mask = mask_of(chosen, num_tokens, num_tokens, first)
        out = attend_chosen(tokens, query, chosen, ops.Scores(0.1), first)
        if num_new == 1 or "recent=7" not in kind:  # a mask does not say what a query reads unquantized
            wanted = tokens.attend(query, ops.Scores(0.1, is_causal=False), mask=mask)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        for i in range(num_new):  # a query has the bits that it has alone
            if i == num_new - 1:
                alone = attend_chosen(tokens, query[:, :, i:], chosen[:, i:], ops.Scores(0.1), first)
                assert torch.equal(alone, out[:, i:])


def test_the_result_is_that_of_dense_tensors() -> None:
    tokens = filled(layer_of("auto"), (20, 4))
    query, chosen = random(2, 3, 4, RANK + ROPE, seed=5), choices(2, 4, 24, 9)
    latents, rope = (x.double() for x in tokens.gather(torch.float32))
    keys = torch.cat((latents, rope), -1)
    scores = (query.double() @ keys.mT) * 0.1
    scores = scores.masked_fill(~mask_of(chosen, 24, 24, None), float("-inf"))
    wanted = scores.softmax(-1).nan_to_num() @ latents
    out = attend_chosen(tokens, query, chosen, ops.Scores(0.1))
    torch.testing.assert_close(out.transpose(1, 2).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["auto", "int4,recent=7"])
def test_newest_chosen_tokens_are_read_unquantized(kind: str) -> None:
    """Five queries at once as one by one, each of which reads its own newest tokens so."""
    together = filled(layer_of(kind), (30, 5))
    query, chosen = random(2, 3, 5, RANK + ROPE, seed=5), choices(2, 5, 30, 9)
    out = attend_chosen(together, query, chosen, ops.Scores(0.1))
    layer, parts = layer_of(kind), (random(2, 1, 5, RANK, seed=1), random(2, 1, 5, ROPE, seed=10))
    filled(layer, (30,))
    for i in range(5):
        tokens = replace(layer.append(*(x[:, :, i : i + 1] for x in parts)), is_latent=True)
        one = attend_chosen(tokens, query[:, :, i : i + 1], chosen[:, i : i + 1], ops.Scores(0.1))
        torch.testing.assert_close(one, out[:, i : i + 1], rtol=1e-6, atol=1e-6)


def test_what_is_no_column_is_not_chosen() -> None:
    tokens = filled(layer_of("auto"), (20,))
    query = random(2, 3, 20, RANK + ROPE, seed=5)
    chosen = torch.tensor([0, -1, 25, 3]).expand(2, 20, -1)
    out = attend_chosen(tokens, query, chosen, ops.Scores(0.1))
    wanted = attend_chosen(tokens, query, torch.tensor([3, 0]).expand(2, 20, -1), ops.Scores(0.1))
    assert torch.equal(out, wanted)
    nothing = attend_chosen(tokens, query, torch.full((2, 20, 4), -1), ops.Scores(0.1))
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_rows_that_were_cropped_apart_choose_by_columns() -> None:
    layer = layer_of("auto")
    filled(layer, (20,))
    layer.sequences.remove([7, 0])
    layer.num_tokens = layer.sequences.num_positions
    tokens = replace(layer.append(random(2, 1, 3, RANK), random(2, 1, 3, ROPE)), is_latent=True)
    query, chosen = random(2, 3, 3, RANK + ROPE, seed=5), choices(2, 3, 23, 9)
    out = attend_chosen(tokens, query, chosen, ops.Scores(0.1))
    mask = mask_of(chosen, 23, 23, torch.tensor([7, 0]))
    wanted = tokens.attend(query, ops.Scores(0.1, is_causal=False), mask=mask)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["auto", "int4,recent=7"])
def test_fixed_storage_has_free_columns(kind: str) -> None:
    tokens = filled(layer_of(kind, max_tokens=40), (20, 1))
    paged = filled(layer_of(kind), (20, 1))
    query, chosen = random(2, 3, 1, RANK + ROPE, seed=5), choices(2, 1, 40, 30)
    out = attend_chosen(tokens, query, chosen, ops.Scores(0.1))
    seen = chosen.masked_fill(chosen >= 21, -1)
    torch.testing.assert_close(out, attend_chosen(paged, query, seen, ops.Scores(0.1)))


@pytest.mark.parametrize("max_tokens", [None, 40])
@pytest.mark.parametrize("kind", ["auto", "int8", "int4,recent=7"])
def test_latents_without_rope_keys_are_kept_alone(kind: str, max_tokens: int | None) -> None:
    layer = layer_of(kind, rope=0, max_tokens=max_tokens)
    tokens = filled(layer, (20, 1), rope=0)
    assert layer.storage is not None and layer.storage.entry.value is None
    keys, values = tokens.gather(torch.float32)
    assert values.shape == (2, 1, 40 if max_tokens else 21, 0)
    query, scores = random(2, 3, 1, RANK, seed=5), ops.Scores(0.1)
    wanted = ((query @ keys[:, :, :21].mT) * 0.1).softmax(-1) @ keys[:, :, :21]
    torch.testing.assert_close(tokens.attend(query, scores).transpose(1, 2), wanted, rtol=1e-4, atol=1e-4)
    every = torch.arange(21).expand(2, 1, -1)
    torch.testing.assert_close(attend_chosen(tokens, query, every, scores), tokens.attend(query, scores))
