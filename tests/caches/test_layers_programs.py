"""Random programs on layers against tensors that are only ever concatenated and indexed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom.caches import (
    DynamicLayer,
    Layer,
    QuantizedLayer,
    SlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from kvloom.caches.format import num_exact
from kvloom.core.specs import QuantSpec
from kvloom.errors import StateError
from kvloom.quant.affine import dequantize, quantize

HEADS, KEY_DIM, VALUE_DIM, GROUP = 2, 8, 4, 4
SCALE = torch.float16


def tokens(batch: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = generator(seed)
    key, value = (torch.randn(batch, HEADS, count, d, generator=rng) for d in (KEY_DIM, VALUE_DIM))
    return key, value


def codes(bits: int) -> str:
    return str(QuantSpec(bits, GROUP))


def as_kept(x: Tensor, bits: int) -> Tensor:
    """What a round trip through codes makes of ``x``."""
    packed, scale = quantize(x, bits, GROUP, SCALE)
    return dequantize(packed, scale, bits, x.dtype)


class Model:
    """Every token of every sequence, and what a layer should return of them."""

    def __init__(self) -> None:
        self.sides: tuple[Tensor, Tensor] | None = None

    @property
    def seen(self) -> int:
        return 0 if self.sides is None else self.sides[0].shape[2]

    @property
    def batch(self) -> int:
        return 0 if self.sides is None else self.sides[0].shape[0]

    def make(self) -> Layer:
        return DynamicLayer()

    def fits(self, count: int) -> bool:
        return True

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Expected result of ``update``."""
        old = self.sides
        self.sides = (
            (key, value) if old is None else (torch.cat([old[0], key], 2), torch.cat([old[1], value], 2))
        )
        return self.stored()

    def stored(self) -> tuple[Tensor, Tensor]:
        assert self.sides is not None
        return self.sides

    def mask_sizes(self, count: int) -> tuple[int, int]:
        return self.seen + count, 0

    def can_crop(self, kept: int) -> bool:
        return True

    def crop(self, kept: int) -> None:
        if self.sides is not None:
            self.sides = self.sides[0][:, :, :kept], self.sides[1][:, :, :kept]

    def take(self, rows: list[int]) -> None:
        if self.sides is not None:
            self.sides = self.sides[0][rows], self.sides[1][rows]

    def reset(self) -> None:
        self.sides = None


@dataclass
class StaticModel(Model):
    size: int

    def __post_init__(self) -> None:
        super().__init__()

    def make(self) -> Layer:
        return StaticLayer(self.size)

    def fits(self, count: int) -> bool:
        return self.seen + count <= self.size

    def stored(self) -> tuple[Tensor, Tensor]:
        key, value = (
            torch.cat([x, torch.zeros(*x.shape[:2], self.size - x.shape[2], x.shape[3])], 2)
            for x in super().stored()
        )
        return key, value

    def mask_sizes(self, count: int) -> tuple[int, int]:
        return self.size, 0

    def reset(self) -> None:
        self.crop(0)


@dataclass
class SlidingModel(Model):
    window: int
    rollback: int

    def __post_init__(self) -> None:
        super().__init__()
        self.first = 0  # position of the first token held

    def make(self) -> Layer:
        return SlidingWindowLayer(self.window, self.rollback)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first = self.mask_sizes(0)[1]
        super().append(key, value)
        self.first = max(self.first, self.seen - (self.window - 1 + self.rollback))
        assert self.sides is not None
        return self.sides[0][:, :, first:], self.sides[1][:, :, first:]

    def stored(self) -> tuple[Tensor, Tensor]:
        key, value = (x[:, :, self.first :] for x in super().stored())
        return key, value

    def mask_sizes(self, count: int) -> tuple[int, int]:
        first = max(0, self.seen - self.window + 1)
        return self.seen + count - first, first

    def can_crop(self, kept: int) -> bool:
        needed = {kept - i for i in range(1, self.window) if kept - i >= 0}
        return needed <= set(range(self.first, self.seen))

    def crop(self, kept: int) -> None:
        super().crop(kept)
        self.first = min(self.first, kept)

    def reset(self) -> None:
        super().reset()
        self.first = 0


@dataclass
class StaticSlidingModel(SlidingModel):
    """As one that can go back by a token at least, in columns of a fixed number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked, self.rollback = self.rollback, max(self.rollback, 2 - self.window)

    def make(self) -> Layer:
        return StaticSlidingWindowLayer(self.window, self.asked)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        count = self.mask_sizes(key.shape[2])[0]
        keys, values = super().append(key, value)
        return padded(keys, count), padded(values, count)

    def stored(self) -> tuple[Tensor, Tensor]:
        keys, values = super().stored()
        columns = self.window - 1 + self.rollback
        return padded(keys, columns), padded(values, columns)

    def mask_sizes(self, count: int) -> tuple[int, int]:
        return self.window - 1 + count, max(0, self.seen - self.window + 1)

    def reset(self) -> None:
        self.crop(0)


def padded(x: Tensor, columns: int) -> Tensor:
    """With zeros behind the tokens."""
    return torch.cat([x, torch.zeros(*x.shape[:2], max(columns - x.shape[2], 0), x.shape[3])], 2)


@dataclass
class QuantizedModel(Model):
    bits: tuple[int, int]
    recent: int

    def __post_init__(self) -> None:
        super().__init__()
        self.known = 0  # first token that is in the residual window, if it is one of the newest

    def make(self) -> Layer:
        return QuantizedLayer(codes(self.bits[0]), self.recent, values=codes(self.bits[1]), scale_dtype=SCALE)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the first of the new tokens sees unquantized; all of the new ones are."""
        start = self.seen
        super().append(key, value)
        return self.seen_at(start)

    def stored(self) -> tuple[Tensor, Tensor]:
        return self.seen_at(self.seen)

    def seen_at(self, position: int) -> tuple[Tensor, Tensor]:
        exact = max(self.known, position - self.recent + 1, 0) if self.recent else self.seen
        key, value = (
            torch.cat([as_kept(x[:, :, :exact], bits), x[:, :, exact:]], 2)
            for x, bits in zip(super().stored(), self.bits, strict=True)
        )
        return key, value

    def crop(self, kept: int) -> None:
        self.known = min(max(self.known, self.seen - num_exact(self.recent)), kept)
        super().crop(kept)

    def reset(self) -> None:
        super().reset()
        self.known = 0


def both_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, a, b in zip(("keys", "values"), got, expected, strict=True):
        assert_same_bits(a.contiguous(), b.contiguous(), name)


KINDS = {
    "dynamic": st.builds(Model),
    "static": st.builds(StaticModel, st.integers(1, 40)),
    "sliding": st.builds(SlidingModel, st.integers(1, 9), st.integers(0, 3)),
    "static sliding": st.builds(StaticSlidingModel, st.integers(1, 9), st.integers(0, 3)),
    "quantized": st.builds(
        QuantizedModel, st.tuples(st.sampled_from([8, 4]), st.sampled_from([8, 4])), st.integers(0, 5)
    ),
}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.one_of(st.integers(0, 3), st.integers(0, 25))),
        st.tuples(st.just("append"), st.just(1)),
        st.tuples(st.just("crop"), st.integers(-6, 30)),
        st.tuples(st.just("crop"), st.integers(-3, -1)),
        st.tuples(st.just("reorder"), st.integers(0, 99)),
        st.tuples(st.just("select"), st.integers(0, 99)),
        st.tuples(st.just("mask"), st.integers(0, 99)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=25,
)


def run_rows(layer: Layer, model: Model, name: str, argument: int) -> None:
    """One operation on rows; ``argument`` seeds the choice."""
    batch, rng = model.batch, generator(argument)
    if name == "repeat":
        if batch * argument <= 6:
            layer.repeat_interleave(argument)
            model.take([row for row in range(batch) for _ in range(argument)])
        return
    if batch == 0:
        return
    if name == "mask":
        mask = torch.rand(batch, generator=rng) < 0.7
        mask[0] = True
        layer.select(mask)
        model.take(mask.nonzero().flatten().tolist())
        return
    count = batch if name == "reorder" else int(torch.randint(1, 4, (), generator=rng))
    rows = torch.randint(0, batch, (count,), generator=rng)
    (layer.reorder if name == "reorder" else layer.select)(rows)
    model.take(rows.tolist())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), batch=st.integers(1, 3), steps=STEPS)
def test_layer_returns_what_the_model_does(
    kind: str, data: st.DataObject, batch: int, steps: list[tuple[str, int]]
) -> None:
    model = data.draw(KINDS[kind])
    layer = model.make()
    for seed, (name, argument) in enumerate(steps):
        if name == "append":
            key, value = tokens(model.batch or batch, argument, seed)
            if model.fits(argument):
                assert layer.get_mask_sizes(argument) == model.mask_sizes(argument)
                got = layer.update(key, value)
                assert got[0].shape[2] == model.mask_sizes(argument)[0]
                both_same(got, model.append(key, value))
            else:
                with pytest.raises(StateError, match=f"max_length must hold {argument} more token"):
                    layer.update(key, value)
        elif name == "crop":
            kept = min(argument, model.seen) if argument >= 0 else max(model.seen + argument, 0)
            if kept == model.seen or model.can_crop(kept):
                layer.crop(argument)
                model.crop(kept)
            else:
                with pytest.raises(StateError, match="num_tokens must keep at least"):
                    layer.crop(argument)
        elif name == "reset":
            layer.reset()
            model.reset()
        else:
            run_rows(layer, model, name, argument)
        assert int(layer.get_seq_length()) == model.seen
        if model.sides is not None:
            both_same((layer.keys, layer.values), model.stored())


@given(
    bits=st.sampled_from([8, 4]),
    recent=st.integers(0, 6),
    counts=st.lists(st.one_of(st.just(1), st.integers(0, 20)), min_size=1, max_size=20),
)
def test_codes_never_change(bits: int, recent: int, counts: list[int]) -> None:
    layer = QuantizedLayer(codes(bits), recent, values=codes(8))
    before: list[Tensor] = []
    for seed, count in enumerate(counts):
        layer.update(*tokens(2, count, seed))
        now = [x for x in layer.codes() if x is not None]
        for old, new in zip(before, now, strict=bool(before)):
            assert_same_bits(new[:, : old.shape[1]].contiguous(), old.contiguous(), "codes")
        before = [x.clone() for x in now]


@given(recent=st.integers(0, 6), counts=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_split_into_updates_does_not_matter(recent: int, counts: list[int]) -> None:
    key, value = tokens(2, sum(counts), 0)
    once, parts = QuantizedLayer(codes(4), recent), QuantizedLayer(codes(4), recent)
    once.update(key, value)
    for k, v in zip(key.split(counts, 2), value.split(counts, 2), strict=True):
        parts.update(k, v)
    both_same((parts.keys, parts.values), (once.keys, once.values))
    for a, b in zip(parts.codes(), once.codes(), strict=True):
        assert a is not None and b is not None
        assert_same_bits(a.contiguous(), b.contiguous(), "codes")
