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
from kvloom.integrations.vllm.pages import PageFormat

KINDS = [None, QuantSpec(8), QuantSpec(4), QuantSpec(8, 16), QuantSpec(4, 32)]
BLOCKS, HEADS, SIZE, DIM = 3, 2, 32, 64


def ids(value: Any) -> str | None:
    return str(value) if isinstance(value, QuantSpec | torch.dtype) or value is None else None


def allocate(quant: QuantSpec | None, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Poisoned memory, and the pages ``[B, H, S, C]`` in it, blocks ``padding`` bytes apart."""
    content = PageFormat.heads(DIM, dtype, quant).content_bytes
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
    assert PageFormat.heads(128, torch.bfloat16, quant).content_bytes == expected


@pytest.mark.parametrize("padding", [0, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("quant", KINDS, ids=ids)
def test_the_planes_fill_every_page_and_nothing_else(
    quant: QuantSpec | None, dtype: torch.dtype, padding: int
) -> None:
    memory, kept = allocate(quant, dtype, padding)
    view = PageFormat.heads(DIM, dtype, quant).view(kept)
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
        for x in PageFormat.heads(DIM, torch.bfloat16, quant).view(kept).tensors
        if x is not None
    ]
    assert starts == sorted(starts) and all(start % 64 == 0 for start in starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
@pytest.mark.parametrize("quant", KINDS, ids=ids)
def test_attention_in_pages_is_attention_in_a_plain_cache(
    quant: QuantSpec | None, dtype: torch.dtype
) -> None:
    memory, kept = allocate(quant, dtype, 64)
    view = PageFormat.heads(DIM, dtype, quant).view(kept)
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


RANK, ROPE, LATENT_SIZE = 512, 64, 32
LATENTS = [None, QuantSpec(8), QuantSpec(4, full_range=True), QuantSpec(8, 32)]


def latent_pages(quant: QuantSpec | None, dtype: torch.dtype) -> tuple[PageFormat, Tensor]:
    """A format of latents, and poisoned pages ``[B, S, C]`` of it."""
    format = PageFormat.latents(RANK, ROPE, dtype, quant)
    return format, torch.full((BLOCKS, LATENT_SIZE, format.content_bytes), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("quant", "expected"),
    [(None, 1152), (QuantSpec(8), 594), (QuantSpec(4), 338), (QuantSpec(8, 32), 612)],
    ids=ids,
)
def test_a_latent_takes_the_bytes_of_its_codes_and_rope_keys_those_of_eight_bits(
    quant: QuantSpec | None, expected: int
) -> None:
    assert latent_pages(quant, torch.bfloat16)[0].content_bytes == expected


@pytest.mark.parametrize("quant", LATENTS, ids=ids)
def test_latents_in_pages_are_those_of_a_plain_cache(quant: QuantSpec | None) -> None:
    format, kept = latent_pages(quant, torch.float32)
    generator = torch.Generator().manual_seed(0)
    latents, rope = (torch.randn(70, 1, n, generator=generator) for n in (RANK, ROPE))
    query = torch.randn(5, 4, RANK + ROPE, generator=generator)
    index = CacheIndex.blocks(torch.tensor([[2, 0, 1]]), LATENT_SIZE)
    slots = index.slots(torch.zeros(70, dtype=torch.int64), torch.arange(70))
    batch = ops.Batch(index, torch.tensor([0, 5]), torch.tensor([0, 70]))
    num_slots, outs = BLOCKS * LATENT_SIZE, []
    full_range = quant is not None and quant.full_range
    of_sides = (format.key.empty(num_slots), format.value.empty(num_slots))
    plain = KVView.split("T H D", *(x for pair in zip(*of_sides, strict=True) for x in pair))
    for kv in (format.view(kept), plain):
        ops.store(latents, rope, slots, kv, full_range=full_range)
        outs.append(ops.attend(query, kv, batch, is_latent=True))
    assert torch.equal(*outs)
    unwritten = kept.flatten(0, 1).float()[torch.tensor([i for i in range(num_slots) if i not in slots])]
    if quant is None:  # a token is one run of bytes
        assert (unwritten == 0xFF).all()


def test_floats_of_latents_lie_as_vllms_own() -> None:
    format, kept = latent_pages(None, torch.bfloat16)
    latents, rope = torch.randn(1, 1, RANK).bfloat16(), torch.randn(1, 1, ROPE).bfloat16()
    ops.store(latents, rope, torch.tensor([LATENT_SIZE + 3]), format.view(kept))
    assert torch.equal(kept.view(torch.bfloat16)[1, 3], torch.cat((latents, rope), -1).flatten())


@pytest.mark.parametrize("quant", LATENTS, ids=ids)
def test_planes_of_latents_begin_at_cache_lines(quant: QuantSpec | None) -> None:
    format, kept = latent_pages(quant, torch.bfloat16)
    starts = [x.data_ptr() - kept.data_ptr() for x in format.view(kept).tensors if x is not None]
    assert all(start % 64 == 0 for start in starts)


def test_without_codes_a_format_of_latents_is_that_of_its_residual_window() -> None:
    format, _ = latent_pages(QuantSpec(4), torch.bfloat16)
    assert format.unquantized == PageFormat.latents(RANK, ROPE, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("tokens", "most", "expected"), [(128, 34, 32), (32, 8, 8), (96, 25, 24), (32, 100, 32), (32, 0, 1)]
)
def test_a_block_of_more_bytes_a_token_has_fewer_tokens(tokens: int, most: int, expected: int) -> None:
    assert pages.largest_block(tokens, most) == expected


def test_pages_of_another_size_are_refused() -> None:
    _, kept = allocate(QuantSpec(8), torch.bfloat16)
    with pytest.raises(ShapeError, match="pages must have 136 bytes a token, got 132"):
        PageFormat.heads(DIM, torch.bfloat16, QuantSpec(8, 32)).view(kept)


def test_pages_that_are_not_dense_are_refused() -> None:
    _, kept = allocate(None, torch.bfloat16)
    with pytest.raises(ShapeError, match="pages must be dense in tokens and content, got strides"):
        PageFormat.heads(DIM, torch.bfloat16, None).view(kept[:, :, ::2])


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim must be a multiple of group 64, got 80"):
        PageFormat.heads(80, torch.bfloat16, QuantSpec(8, 64))
