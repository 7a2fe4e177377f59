"""A filled cache once more in the order of integer dot products."""

from __future__ import annotations

import math

import torch
from ops.attention import Case
from oracles.bits import filled

from kvloom import ops
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES
from kvloom.core.views import KVView


def native(case: Case, block_size: int = 32) -> KVView:
    """The case's cache in native order, every slot at its number; poison where the case has no token."""
    num_slots = -(-case.kv.num_slots // block_size) * block_size
    sides = []
    for layout, cache, scale in (
        (NATIVE_KEYS, case.kv.tensors[0], case.kv.tensors[2]),
        (NATIVE_VALUES, case.kv.tensors[1], case.kv.tensors[3]),
    ):
        assert cache is not None
        assert scale is not None
        sizes = {"B": num_slots // block_size, "S": block_size, "H": cache.shape[3]}
        codes = filled(layout.shape(D=cache.shape[4:].numel(), **sizes), 0x77, cache.dtype)
        shape = layout.for_scale().shape(D=scale.shape[4:].numel(), **sizes)
        sides.append((codes, torch.full(shape, math.nan, dtype=scale.dtype)))
    (key, key_scale), (value, value_scale) = sides
    kv = KVView.split(NATIVE_KEYS, key, value, key_scale, value_scale, value_layout=NATIVE_VALUES)
    used = torch.tensor([slot for row in case.slots for slot in row])
    ops.copy(case.kv, used, kv, used)
    return kv
