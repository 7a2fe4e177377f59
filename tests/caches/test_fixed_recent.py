"""The newest tokens as they were computed in fixed storage: what pages of any number make of them."""

from __future__ import annotations

import pytest
import torch
from caches.mixed import DIM, HEADS, INT4, RECENT, tokens
from oracles.bits import assert_same_bits
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, PagedLayer
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
    assert fixed.nbytes_recent == 2 * 2 * HEADS * (-(-recent // 16) * 16 + 16) * DIM * 4
    assert fixed.nbytes_recent <= paged.nbytes_recent <= 3 * fixed.nbytes_recent


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


@pytest.mark.compile
def test_every_step_is_one_graph() -> None:
    layer, eager = FixedLayer(FORMAT), FixedLayer(FORMAT)
    for x in (layer, eager):
        x.append(tokens(2, 7, 1), tokens(2, 7, 2))
    counter = CompileCounter()

    def attend(key: Tensor, query: Tensor) -> Tensor:
        return layer.append(key, -key).attend(query, ops.Scores())

    torch._dynamo.reset()
    step = torch.compile(attend, fullgraph=True, backend=counter)
    where = [x.data_ptr() for x in layer._recent.storage.tensors[:2]]
    for i in range(50):
        key, query = tokens(2, 1, i), tokens(2, 1, 100 + i, 4)
        assert_same_bits(step(key, query), eager.append(key, -key).attend(query), "out")
    assert counter.frame_count == 1
    assert [x.data_ptr() for x in layer._recent.storage.tensors[:2]] == where
    long = tokens(2, 50, 1)
    assert_same_bits(step(long, long), eager.append(long, -long).attend(long), "a long step")
