"""Latents with rope keys, and the keys and values that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from ops.attention import Case, make_case, normal
from ops.pools import PLAIN, Kind

from kvloom import KVView, ops

NEW, STORED, HEADS = [3, 1, 20], [7, 530, 60], 4


def latent_case(
    rank: int = 64,
    rope: int = 32,
    kind: Kind = PLAIN,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
    new: list[int] = NEW,
    stored: list[int] = STORED,
    **how: int,
) -> Case:
    """Latents of a kind as keys, rope keys of it as values, and queries for both."""
    how = {"kv_heads": 1, "head_dim": rank, "value_dim": rope, **how}
    case = make_case(new, stored, kind=kind, dtype=dtype, axes="B S H D", **how)
    query = normal((sum(new), heads, rank + rope), 3).to(dtype)
    return replace(case, query=query)


def joined(case: Case) -> KVView:
    """The same keys and values, dequantized, in one piece each: slots that are not used are NaN."""
    slots = case.kv.num_slots
    used = torch.tensor(sorted(slot for row in case.slots for slot in row))
    latent, rope = ops.load(used, case.kv, dtype=case.query.dtype)
    whole = torch.full((slots, 1, case.query.shape[2]), math.nan, dtype=case.query.dtype)
    whole[used] = torch.cat((latent, rope), -1)
    return KVView.split("T H D", whole, whole[..., : latent.shape[2]].contiguous())
