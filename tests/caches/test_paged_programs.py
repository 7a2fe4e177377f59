"""Random programs on a paged layer against a list of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom.caches import PagedLayer
from kvloom.caches.layers.paged import CacheFormat
from kvloom.core.specs import QuantSpec
from kvloom.errors import OutOfPages, ShapeError
from kvloom.quant.affine import dequantize, quantize

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
QUANTS = (None, QuantSpec(8, 4), QuantSpec(8, 2, torch.float32), QuantSpec(4, 4, torch.bfloat16))


class Model:
    """What a paged layer should hold: every appended tensor, and how many pages that takes."""

    def __init__(self, format: CacheFormat) -> None:
        self.format = format
        self.batch = 0
        self.chunks: list[tuple[Tensor, Tensor]] = []

    @property
    def num_tokens(self) -> int:
        return sum(key.shape[2] for key, _ in self.chunks)

    def fits(self, batch: int, count: int) -> bool:
        """Whether ``count`` more tokens of each sequence stay within ``max_tokens``."""
        size, limit = self.format.page_size, self.format.max_tokens
        return limit is None or batch * -(-(self.num_tokens + count) // size) <= limit // size

    def append(self, key: Tensor, value: Tensor) -> None:
        self.batch = key.shape[0]
        self.chunks.append((key, value))

    def truncate(self, count: int) -> None:
        key, value = (torch.cat(parts, dim=2)[:, :, :count] for parts in zip(*self.chunks, strict=True))
        self.chunks = [(key, value)]

    def kept(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` as it comes back from storage."""
        quant = self.format.quant
        if quant is None:
            return x.to(self.kept_dtype).to(dtype)
        codes, scale = quantize(x, quant.bits, quant.group, quant.scale_dtype)
        return dequantize(codes, scale, quant.bits, dtype)

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.format.dtype or self.chunks[0][0].dtype

    def check(self, layer: PagedLayer, dtype: torch.dtype) -> None:
        """Same length, same bits; bytes as counted from the tensors."""
        assert layer.num_tokens == self.num_tokens
        if not self.chunks:
            assert layer.nbytes == 0
            return
        kv = layer.sequences.storages[layer.index].view
        tensors = [x for x in kv.tensors if x is not None]
        assert layer.nbytes == sum(x.untyped_storage().nbytes() for x in tensors)
        for got, parts in zip(layer.gather(dtype), zip(*self.chunks, strict=True), strict=True):
            want = torch.cat([self.kept(x, dtype) for x in parts], dim=2)
            assert_same_bits(got.contiguous(), want, "tokens")


@given(st.data())
def test_program_agrees_with_a_list_of_tensors(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 5), label="page_size")
    quant = data.draw(st.sampled_from(QUANTS), label="quant")
    kept = data.draw(st.sampled_from([None, torch.float16]), label="kept") if quant is None else None
    max_tokens = data.draw(st.sampled_from([None, None, page_size, 7 * page_size, 40]), label="max_tokens")
    format = CacheFormat(kept, quant, page_size, max_tokens)
    layer, model = PagedLayer(format), Model(format)
    dtype = data.draw(st.sampled_from(FLOATS), label="dtype")
    for step in range(data.draw(st.integers(1, 12), label="steps")):
        action = data.draw(
            st.sampled_from(["append", "append", "append", "truncate", "reset", "wrong batch"])
        )
        batch = model.batch or data.draw(st.integers(1, 3), label="batch")
        rng = generator(step)
        key = torch.randn(batch, HEADS, data.draw(st.integers(0, 6)), KEY_DIM, generator=rng).to(dtype)
        value = torch.randn(*key.shape[:3], VALUE_DIM, generator=rng).to(dtype)
        if action == "append" and model.fits(batch, key.shape[2]):
            layer.append(key, value)
            model.append(key, value)
        elif action == "append":
            with pytest.raises(OutOfPages, match="max_tokens must be at least"):
                layer.append(key, value)
        elif action == "truncate" and model.chunks:
            count = data.draw(st.integers(0, model.num_tokens))
            layer.truncate(count)
            model.truncate(count)
        elif action == "reset":
            layer.reset()
            model = Model(format)
        elif action == "wrong batch" and model.batch:
            with pytest.raises(ShapeError, match=r"key must be .* B="):
                layer.append(torch.cat([key, key[:1]]), torch.cat([value, value[:1]]))
        model.check(layer, data.draw(st.sampled_from(FLOATS), label="gathered as"))
