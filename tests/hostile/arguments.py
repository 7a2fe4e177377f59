"""Arguments that no caller should pass, made from those of a good call."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

INTEGERS = (
    0,
    -1,
    1,
    7,
    2**31,
    2**40,
    2**62,
    2**63 - 2,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**13,
    True,
    1.5,
    None,
)
FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, None, "1")
EXTREMES = (-1, 0, 2**31 - 1, 2**62, 2**63 - 1, -(2**63))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16,
          torch.int32, torch.int64, torch.bool)  # fmt: skip
ENDLESS = 1 << 48  # elements that no memory holds


def hostile(rng: random.Random, value: Any, others: list[Tensor]) -> Any:
    """Something like ``value``, wrong in one way; ``others`` are the tensors of the same call."""
    if isinstance(value, Tensor):
        change = rng.choice(_CHANGES)
        if value.dtype != torch.bits2x4:
            return change(rng, value, others)
        changed = change(rng, value.view(torch.uint8), others)  # of these bits torch computes nothing
        is_of_bytes = isinstance(changed, Tensor) and changed.dtype == torch.uint8
        return changed.view(torch.bits2x4) if is_of_bytes else changed
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(("", "?", value.lower(), None, 3))
    return rng.choice(INTEGERS)


def _other_dtype(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.to(rng.choice(DTYPES))


def _extreme_values(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if not x.numel() or x.dtype == torch.bool:
        return x
    place = rng.randrange(x.numel())
    if x.is_floating_point():
        x.view(-1)[place] = rng.choice((math.nan, math.inf, -math.inf, torch.finfo(x.dtype).max))
    else:
        bounds = torch.iinfo(x.dtype)
        x.view(-1)[place] = min(max(rng.choice(EXTREMES), bounds.min), bounds.max)
    return x


def _cut(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    if not x.ndim:
        return x
    axis = rng.randrange(x.ndim)
    return x.narrow(axis, 0, rng.randrange(x.shape[axis] + 1))


def _longer(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return torch.cat((x, x), dim=rng.randrange(x.ndim)) if x.ndim else x


def _other_rank(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return rng.choice((x.unsqueeze(0), x.unsqueeze(-1), x.flatten(), x.reshape(-1)[:1].squeeze()))


def _permuted(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.permute(rng.sample(range(x.ndim), x.ndim)) if x.ndim else x


def _expanded(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    if not x.numel():
        return x
    axis, size = rng.randrange(max(x.ndim, 1)), rng.choice((2, 5, ENDLESS))
    first = x.unsqueeze(0) if not x.ndim else x.narrow(axis, 0, 1)
    return first.expand(*(size if i == axis else n for i, n in enumerate(first.shape)))


def _strided(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    if not x.numel():
        return x
    wide = torch.zeros([2 * n for n in x.shape], dtype=x.dtype)[tuple(slice(None, None, 2) for _ in x.shape)]
    wide.copy_(x)
    return wide


def _alias(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    """The memory of another argument, read as what ``x`` is."""
    other = rng.choice(others)
    if not other.is_contiguous() or other.nbytes < x.nbytes:
        return x
    return other.view(-1).view(torch.uint8)[: x.nbytes].view(x.dtype).view(x.shape)


def _numpy_alias(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    """As ``_alias``, by a storage of its own."""
    alias = _alias(rng, x, others)
    if alias is x or alias.dtype == torch.bfloat16:
        return x
    return torch.from_numpy(alias.detach().numpy())


def _elsewhere(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.to("meta")


def _learning(rng: random.Random, x: Tensor, others: list[Tensor]) -> Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() else x


def _no_tensor(rng: random.Random, x: Tensor, others: list[Tensor]) -> object:
    return rng.choice((None, 1, [1, 2], "x"))


_CHANGES = (_other_dtype, _extreme_values, _extreme_values, _cut, _cut, _longer, _other_rank, _permuted,
            _expanded, _strided, _alias, _numpy_alias, _elsewhere, _learning, _no_tensor)  # fmt: skip
