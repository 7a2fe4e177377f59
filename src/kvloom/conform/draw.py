"""Random arguments from a seed, the same on every machine and with every version of torch."""

import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Draw:
    """Random values from Python's own generator, whose sequence never changes."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def one(self, choices: Sequence[T]) -> T:
        """Choose one of ``choices``."""
        return self.random.choice(choices)

    def integer(self, low: int, high: int) -> int:
        """Random integer from ``low`` to ``high``, both included."""
        return self.random.randint(low, high)

    def distinct(self, count: int, below: int) -> list[int]:
        """``count`` different numbers from 0 to ``below - 1``."""
        return self.random.sample(range(below), count)

    def poison(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Random bytes: NaN, infinities and subnormal numbers among them."""
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        data = torch.frombuffer(bytearray(self.random.randbytes(count)), dtype=torch.uint8)
        return data.view(dtype).reshape(tuple(shape)).clone()

    def numbers(self, shape: Sequence[int], dtype: torch.dtype, edges: bool = False) -> Tensor:
        """Normal numbers of several magnitudes; with ``edges`` a tenth are edge values of ``dtype``."""
        count = math.prod(shape)
        if not dtype.is_floating_point:
            return self.poison(shape, dtype)
        magnitude = 1.0
        values: list[float] = []
        for i in range(count):
            if i % 8 == 0:
                magnitude = 10.0 ** self.random.uniform(-2, 1.5)
            values.append(self.random.gauss(0.0, magnitude))
        x = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(tuple(shape))
        if edges:
            flat = x.view(-1)
            special = edge_values(dtype)
            for i in range(count):
                if self.random.random() < 0.1:
                    flat[i] = special[self.random.randrange(len(special))]
        return x

    def calm(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers with few bits, whose short sums are exact in any order."""
        count = math.prod(shape)
        values = [self.random.randint(-64, 64) / 64 for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(tuple(shape))

    def between(self, low: float, high: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers from ``low`` to ``high`` in the full precision of ``dtype``."""
        values = [self.random.uniform(low, high) for _ in range(math.prod(shape))]
        return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(tuple(shape))

    def ties(self, shape: Sequence[int], dtype: torch.dtype, group: int, bits: int) -> Tensor:
        """Groups along the last axis whose quotients end in exactly 0.5."""
        qmax = 2 ** (bits - 1) - 1
        values: list[float] = []
        for _ in range(math.prod(shape) // group):
            scale = 2.0 ** self.random.randint(-3, 3)
            part = [(self.random.randint(-qmax, qmax - 1) + 0.5) * scale for _ in range(group)]
            part[self.random.randrange(group)] = qmax * scale
            values += part
        return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(tuple(shape))

    def strided(self, x: Tensor) -> Tensor:
        """Copy of ``x`` at an offset and with gaps, in memory filled with poison."""
        if x.ndim == 0 or x.numel() == 0:
            return x
        wide = self.poison((x.shape[0] * 2 + 1, *(n + 2 for n in x.shape[1:])), x.dtype)
        inside = (slice(1, None, 2), *(slice(1, n + 1) for n in x.shape[1:]))
        view = wide[inside][: x.shape[0]]
        view.copy_(x)
        return view


def edge_values(dtype: torch.dtype) -> Tensor:
    """0, -0, the smallest subnormal, the largest number, NaN and infinities, with both signs."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.max, info.min, info.tiny]
    if info.dtype != "float8_e4m3fn":
        values += [math.inf, -math.inf]
    smallest = torch.tensor([1], dtype=getattr(torch, f"int{info.bits}")).view(dtype)
    return torch.cat((torch.tensor([*values, math.nan], dtype=torch.float64).to(dtype), smallest, -smallest))


def ints(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
    """Tensor of integers, from flat or nested lists."""
    return torch.tensor(values, dtype=dtype)


def starts(lengths: Sequence[int]) -> list[int]:
    """Prefix sums that begin with 0."""
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found
