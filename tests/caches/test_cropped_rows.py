"""Rows that were cropped apart end together: masks, first columns and gathered columns follow them."""

from __future__ import annotations

import pytest
import torch
from oracles.bits import generator
from torch import Tensor

from kvloom.caches import CacheFormat, PagedLayer

KEPT = [9, 12, 5]
"""Tokens of each row; the longest begins in column 0, the others behind it."""


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 2, count, 8, generator=generator(seed))


def cropped(page_size: int) -> tuple[PagedLayer, Tensor]:
    """A layer, and all keys that were stored; the values are the keys."""
    layer, key = PagedLayer(CacheFormat(page_size=page_size)), tokens(3, 12)
    layer.append(key, key)
    layer.sequences.remove([12 - n for n in KEPT])
    layer.num_tokens = 12
    return layer, key


def columns(key: Tensor, new: Tensor) -> Tensor:
    """What each row has in each column, ``[B, H, N, D]``; 0 in front."""
    rows = [torch.cat([key[b, :, :n], new[b]], dim=1) for b, n in enumerate(KEPT)]
    width = 12 + new.shape[2]
    return torch.stack([torch.nn.functional.pad(x, (0, 0, width - x.shape[1], 0)) for x in rows])


def expected(query: Tensor, dense: Tensor, mask: Tensor) -> Tensor:
    """Attention under a mask ``[B, 1, Q, N]``, columns in front hidden, ``[B, Q, Hq, D]``."""
    num_columns, num_new = dense.shape[2], query.shape[2]
    start = torch.tensor([12 - n for n in KEPT]).view(3, 1, 1, 1)
    column = torch.arange(num_columns)
    mask = mask & (column >= start) & (column <= num_columns - num_new + torch.arange(num_new)[:, None])
    scores = (query @ dense.mT / 8**0.5).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ dense).transpose(1, 2)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_mask_of_columns_meets_the_tokens_in_them(page_size: int) -> None:
    layer, key = cropped(page_size)
    new, query = tokens(3, 2, 1), tokens(3, 2, 2)
    stored = layer.append(new, new)
    dense = columns(key, new)
    mask = torch.rand(3, 1, 2, 14, generator=generator(3)) < 0.6
    mask[..., -1] = True
    mask[:, :, 0, -2] = True
    causal = torch.ones(2, 14, dtype=torch.bool).tril(12)
    out = stored.attend(query, mask=mask & causal)
    torch.testing.assert_close(out, expected(query, dense, mask), rtol=1e-4, atol=1e-5)
    added = torch.zeros(mask.shape).masked_fill(~(mask & causal), float("-inf"))
    torch.testing.assert_close(stored.attend(query, mask=added), out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_first_column_counts_in_columns(page_size: int) -> None:
    layer, key = cropped(page_size)
    new, query = tokens(3, 2, 1), tokens(3, 2, 2)
    stored, first = layer.append(new, new), torch.tensor([5, 2, 9])
    mask = (torch.arange(14) >= first.view(3, 1, 1, 1)).expand(3, 1, 2, 14)
    out = stored.attend(query, first=first)
    torch.testing.assert_close(out, expected(query, columns(key, new), mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 4])
def test_gathered_columns_hold_the_tokens_of_their_row(page_size: int) -> None:
    layer, key = cropped(page_size)
    new = tokens(3, 2, 1)
    gathered, _ = layer.append(new, new).gather(torch.float32)
    dense = columns(key, new)
    for b, n in enumerate(KEPT):
        assert torch.equal(gathered[b, :, 12 - n :], dense[b, :, 12 - n :])
