"""Views of vLLM's pages; without vLLM."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.memory import span_of
from kvloom.core.specs import QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ConfigError, ShapeError
from kvloom.integrations.vllm import pages

KINDS = [None, QuantSpec(8), QuantSpec(4), QuantSpec(8, 16), QuantSpec(4, 32)]
BLOCKS, HEADS, SIZE, DIM = 3, 2, 32, 64


def ids(value: Any) -> str | None:
    return str(value) if isinstance(value, QuantSpec | torch.dtype) or value is None else None


def allocate(quant: QuantSpec | None, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Poisoned memory, and the pages ``[B, H, S, C]`` in it, blocks ``padding`` bytes apart."""
    content = pages.content_bytes(DIM, dtype, quant)
    block = HEADS * SIZE * content + padding
    memory = torch.full((BLOCKS * block,), 0x55, dtype=torch.uint8)
    shape, strides = (BLOCKS, HEADS, SIZE, content), (block, SIZE * content, content, 1)
    kept = dtype if quant is None else torch.int8 if quant.bits == 8 else torch.uint8
    return memory, memory.as_strided(shape, strides).view(kept)


@pytest.mark.parametrize(
    ("quant", "expected"),
    [(None, 512), (QuantSpec(8), 264), (QuantSpec(4), 136), (QuantSpec(8, 32), 272)],
    ids=ids,
)
def test_a_token_takes_the_bytes_of_its_codes_and_scales(quant: QuantSpec | None, expected: int) -> None:
    assert pages.content_bytes(128, torch.bfloat16, quant) == expected


@pytest.mark.parametrize("padding", [0, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("quant", KINDS, ids=ids)
def test_the_planes_fill_every_page_and_nothing_else(
    quant: QuantSpec | None, dtype: torch.dtype, padding: int
) -> None:
    memory, kept = allocate(quant, dtype, padding)
    view = pages.view(kept, DIM, dtype, quant)
    written = torch.zeros_like(memory)
    for plane in view.tensors:
        if plane is not None:
            part = written.view(plane.dtype)
            offset = (span_of(plane)[0] - memory.data_ptr()) // plane.itemsize
            ours = part.as_strided(plane.shape, plane.stride(), offset)
            assert not ours.view(torch.uint8).any(), "planes overlap"
            ours.view(torch.uint8).fill_(1)
    used = kept.shape[1:].numel() * kept.itemsize
    blocks = written.view(BLOCKS, -1)
    assert blocks[:, :used].all() and not blocks[:, used:].any()


@pytest.mark.parametrize("quant", KINDS, ids=ids)
def test_planes_begin_at_cache_lines(quant: QuantSpec | None) -> None:
    _, kept = allocate(quant, torch.bfloat16)
    starts = [
        x.data_ptr() - kept.data_ptr()
        for x in pages.view(kept, DIM, torch.bfloat16, quant).tensors
        if x is not None
    ]
    assert starts == sorted(starts) and all(start % 64 == 0 for start in starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("quant", KINDS, ids=ids)
def test_attention_in_pages_is_attention_in_a_plain_cache(
    quant: QuantSpec | None, dtype: torch.dtype
) -> None:
    memory, kept = allocate(quant, dtype, 64)
    view = pages.view(kept, DIM, dtype, quant)
    rows = [torch.zeros(BLOCKS, SIZE, HEADS, n, dtype=x.dtype) for x, n in widths(quant, dtype)]
    plain = KVView.split("B S H D", *rows)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 70, HEADS, DIM, generator=generator).to(dtype)
    query = torch.randn(5, 4, DIM, generator=generator).to(dtype)
    index = CacheIndex.blocks(torch.tensor([[2, 0, 1]]), SIZE)
    slots = index.slots(torch.zeros(70, dtype=torch.int64), torch.arange(70))
    batch = ops.Batch(index, torch.tensor([0, 5]), torch.tensor([0, 70]))
    before = memory.clone()
    outs = []
    for kv in (view, plain):
        ops.store(key, value, slots, kv)
        outs.append(ops.attend(query, kv, batch))
    assert torch.equal(*outs)
    assert torch.equal(memory.view(BLOCKS, -1)[:, -64:], before.view(BLOCKS, -1)[:, -64:])


def widths(quant: QuantSpec | None, dtype: torch.dtype) -> list[tuple[Tensor, int]]:
    """An element of each tensor of a cache, and its last extent."""
    if quant is None:
        return [(torch.empty(0, dtype=dtype), DIM)] * 2
    code = torch.empty(0, dtype=torch.int8 if quant.bits == 8 else torch.uint8)
    scale = torch.empty(0, dtype=quant.scale_dtype)
    return [(code, DIM * quant.bits // 8)] * 2 + [(scale, DIM // (quant.group or 64))] * 2


@pytest.mark.parametrize(
    ("tokens", "most", "expected"), [(128, 34, 32), (32, 8, 8), (96, 25, 24), (32, 100, 32), (32, 0, 1)]
)
def test_a_block_of_more_bytes_a_token_has_fewer_tokens(tokens: int, most: int, expected: int) -> None:
    assert pages.largest_block(tokens, most) == expected


def test_pages_of_another_size_are_refused() -> None:
    _, kept = allocate(QuantSpec(8), torch.bfloat16)
    with pytest.raises(ShapeError, match="pages must have 136 bytes a token, got 132"):
        pages.view(kept, DIM, torch.bfloat16, QuantSpec(8, 32))


def test_pages_that_are_not_dense_are_refused() -> None:
    _, kept = allocate(None, torch.bfloat16)
    with pytest.raises(ShapeError, match="pages must be dense in tokens and content, got strides"):
        pages.view(kept[:, :, ::2], DIM, torch.bfloat16, None)


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim must be a multiple of group 64, got 80"):
        pages.content_bytes(80, torch.bfloat16, QuantSpec(8, 64))
