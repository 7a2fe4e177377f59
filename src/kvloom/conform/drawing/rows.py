"""Legal calls of operators that write rows of a batch: ONNX and transformers."""

import torch

from kvloom.conform.describe import Call
from kvloom.conform.draw import FLOATS, Draw, ints
from kvloom.core.specs import dtype_name


def draw_tensor_scatter(draw: Draw) -> tuple[str, Call]:
    """``TensorScatter-24``."""
    dtype = draw.one([*FLOATS, torch.int8])
    mode, rank, count = draw.one(["linear", "circular"]), draw.one([3, 4]), draw.integer(1, 3)
    batch, slots = draw.integer(1, 3), draw.integer(3, 5)
    first = [draw.integer(0, slots - count if mode == "linear" else 2 * slots) for _ in range(batch)]
    shape = [batch, 2, slots, 4] if rank == 4 else [batch, slots, 6]
    axis = draw.one([-2, rank - 2])
    update = [*shape[:-2], count, shape[-1]]
    call: Call = {
        "past_cache": draw.poison(shape, dtype),
        "update": draw.poison(update, dtype),
        "mode": mode,
        "axis": axis,
    }
    if draw.integer(0, 4):
        call["write_indices"] = ints(first)
    return (
        f"{mode}, {rank}-D, {dtype_name(dtype)}, {count} at {first if 'write_indices' in call else 0}",
        call,
    )


def draw_update(draw: Draw) -> tuple[str, Call]:
    """``Cache.update``, several steps of one layer."""
    kind, dtype = draw.one(["dynamic", "static", "sliding"]), draw.one(FLOATS)
    batch, heads = draw.integer(1, 2), draw.integer(1, 2)
    steps = [draw.integer(1, 4), *(draw.one([1, 1, 2, 3]) for _ in range(draw.integer(0, 3)))]
    length = {"dynamic": 0, "static": sum(steps) + draw.integer(0, 2), "sliding": draw.integer(2, 5)}[kind]
    dims = [4, draw.one([4, 6])]
    states = [[draw.numbers([batch, heads, n, dim], dtype, edges=True) for n in steps] for dim in dims]
    return f"{kind} {length or ''}, {dtype_name(dtype)}, steps of {steps}", {
        "key_states": states[0],
        "value_states": states[1],
        "kind": kind,
        "max_length": length,
    }
