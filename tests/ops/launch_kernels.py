"""Launches steps on a driver that only notes them: prints whether each launch is the one that Triton chooses.

A step launches machine code that Triton chose for another layer. For each launch of a step the same call is
made alone, for which Triton looks at all arguments.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from ops.attention import Case, make_case
from ops.latents import latent_case
from ops.pools import Kind
from oracles.no_device import LAUNCHED, install
from torch import Tensor

from kvloom import KVView, ops
from kvloom.ops import Batch, KeySmoothing, PositionalBias, Scores
from kvloom.ops.impl.triton.vectors import transform

NEW, STORED = [1, 1, 1], [30, 7, 20]


def described(x: Any) -> Any:
    """An argument without the place of its data."""
    if isinstance(x, Tensor):
        return str(x.dtype), tuple(x.shape), x.stride(), x.data_ptr() % 16
    return tuple(map(described, x)) if isinstance(x, tuple) else x


def shifted(x: Tensor) -> Tensor:
    """A copy of which the first element is not aligned."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def noted() -> list[Any]:
    """Launches since the last call, without the places of tensors."""
    found = [(function, grid, described(arguments)) for function, grid, arguments in LAUNCHED]
    LAUNCHED.clear()
    return found


def launches(query: Tensor, kv: KVView, batch: Batch, scores: Scores, **how: Any) -> list[Any]:
    """Launches of attention, but for those of plans."""
    LAUNCHED.clear()
    ops.attend(query, kv, batch, scores, **how)
    return [x for x in noted() if len(x[2]) > 6]


def attended(cases: list[Case], scores: list[Scores], **how: Any) -> list[bool]:
    """Whether layers are launched as alone."""
    batch = replace(cases[0].batch(), is_fixed=True)
    found = []
    for case, own in zip(cases, scores, strict=True):
        of_step, alone = (launches(case.query, case.kv, x, own, **how) for x in (batch, replace(batch)))
        found.append(len(alone) == 2 and of_step == alone)
    return found


def stored(kind: Kind) -> list[bool]:
    """Whether later stores to one cache are launched as to a new view of it."""
    case, found = make_case(NEW, STORED, kind=kind, head_dim=64), []
    for count, is_shifted in ((3, False), (3, False), (5, False), (16, False), (3, True), (3, True)):
        key = torch.zeros(count, 2, 64, dtype=torch.bfloat16)
        key = shifted(key) if is_shifted else key
        LAUNCHED.clear()
        for kv in (case.kv, replace(case.kv)):
            ops.store(key, key, torch.arange(count), kv)
        launched = noted()
        found.append(len(launched) == 2 and launched[0] == launched[1])
    return found


def turned() -> list[bool]:
    """Whether vectors are smoothed and rotated as by a launcher of their own."""
    keys, found = KeySmoothing(torch.ones(2, 64)), []
    some, few = torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    for x in (some, some.clone(), shifted(some), few, some.transpose(0, 1).contiguous().transpose(0, 1)):
        LAUNCHED.clear()
        for _ in range(2):
            keys.smoothed(x, None, 64)
            keys.query(x)
            ops.rotate(x, 32)
            transform._launcher.cache_clear()
        launched = noted()
        found.append(len(launched) == 6 and launched[:3] == launched[3:])
        for call in (keys.query, lambda x: keys.smoothed(x, None, 64), lambda x: ops.rotate(x, 32)):
            call(some)  # others have been launched before the next
    return found


def main() -> None:
    """Launch each case, and print what was found."""
    install()
    found = {}
    with torch.no_grad():
        for name, kind in {"bfloat16": Kind(torch.bfloat16), "int4": Kind(torch.uint8, 4, 32)}.items():
            cases = [
                make_case(NEW, STORED, kind=kind, dtype=torch.bfloat16, head_dim=64, contiguous=True, seed=i)
                for i in range(3)
            ]
            cases.append(replace(cases[0], query=shifted(cases[0].query)))
            found[name] = attended(cases, [Scores()] * 4)
            found[f"store {name}"] = stored(kind)
            sinks = [torch.zeros(5)[:4], torch.zeros(5)[1:], torch.zeros(5)[1:].bfloat16(), torch.zeros(4)]
            waves = [
                torch.zeros(3, 4, 6),
                torch.zeros(3, 4, 6),
                torch.zeros(3, 6, 4).mT,
                torch.zeros(3, 4, 6),
            ]
            biases = [PositionalBias(x, torch.zeros(2, 3)) for x in waves]
            scores = [Scores(sinks=s, positional_bias=b) for s, b in zip(sinks, biases, strict=True)]
            found[f"{name} with sinks and coefficients"] = attended(cases, scores)
        latents = [
            latent_case(new=NEW, stored=STORED, contiguous=True, seed=i, dtype=torch.bfloat16) for i in (0, 1)
        ]
        found["vectors"] = turned()
        found["latents"] = attended(latents, [Scores()] * 2, is_latent=True)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
