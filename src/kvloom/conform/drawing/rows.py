"""Legal calls of operators whose caches are rows of a batch: ONNX, ONNX Runtime and transformers."""

import torch

from kvloom.conform.describe import Call
from kvloom.conform.draw import FLOATS, Draw, ints
from kvloom.core.specs import dtype_name


def draw_tensor_scatter(draw: Draw) -> tuple[str, Call]:
    """``TensorScatter-24``."""
    dtype = draw.one([*FLOATS, torch.int8])
    mode, rank, count = draw.one(["linear", "circular"]), draw.one([3, 4]), draw.integer(1, 3)
    batch, slots = draw.integer(1, 3), draw.integer(3, 5)
    first = [draw.integer(0, slots - count if mode == "linear" else slots - 1) for _ in range(batch)]
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


def draw_attention(draw: Draw) -> tuple[str, Call]:
    """``Attention-24`` with its own cache, or with one by ``TensorScatter``."""
    dtype = draw.one([torch.float32, torch.float32, torch.float16])
    batch, heads, per_head, count, dim = (
        draw.integer(1, 2),
        draw.integer(1, 2),
        draw.one([1, 2]),
        draw.integer(1, 3),
        8,
    )
    past, causal = draw.integer(0, 3), draw.one([0, 1])
    call: Call = {
        "Q": draw.calm([batch, heads * per_head, count, dim], dtype),
        "is_causal": causal,
        "softcap": draw.one([0.0, 0.0, 2.0]),
    }
    if draw.integer(0, 1):
        call["scale"] = 0.25
    own = draw.integer(0, 1) == 1
    stored = count if own else count + past + 2
    dims = {"key": dim, "value": draw.one([dim, 4])}
    call |= {name[0].upper(): draw.calm([batch, heads, stored, n], dtype) for name, n in dims.items()}
    if own:
        call |= {f"past_{name}": draw.calm([batch, heads, past, n], dtype) for name, n in dims.items()}
        about = f"{count} new tokens behind {past}"
    else:
        lengths = [draw.integer(count, stored) for _ in range(batch)]
        call["nonpad_kv_seqlen"] = ints(lengths)
        about = f"{count} queries over {lengths} of {stored} stored tokens"
    if draw.integer(0, 2) == 0:
        width = past + count if own else stored
        lead = draw.one([[], [heads * per_head], [batch, 1], [1, heads * per_head]])
        call["attn_mask"] = draw.calm([*lead, count, width], dtype)
        about += f", a mask of {2 + len(lead)} axes"
    return f"{about}, {dtype_name(dtype)}{', causal' if causal else ''}", call


def draw_group_query(draw: Draw) -> tuple[str, Call]:
    """``GroupQueryAttention``: float, int8 and int4."""
    bits = draw.one([0, 0, 8, 8, 4, 4])
    kind = draw.one(["PER_TENSOR", "PER_CHANNEL"]) if bits else "NONE"
    batch, heads, per_head, dim, slots = draw.integer(1, 3), draw.integer(1, 2), draw.one([1, 2]), 16, 6
    prompt = draw.integer(0, 1) == 1
    count = draw.integer(2, 4) if prompt else 1
    lengths = [count] * batch if prompt else [draw.integer(1, slots) for _ in range(batch)]
    if prompt and batch == 1:  # a later part of a prompt
        lengths = [draw.integer(count, slots)]
    dtype = {0: torch.float32, 8: torch.int8, 4: torch.uint8}[bits]
    shape = [batch, heads, slots, dim // 2 if bits == 4 else dim]
    past = [draw.calm(shape, dtype) if bits == 0 else draw.poison(shape, dtype) for _ in "kv"]
    call: Call = {
        "query": draw.calm([batch, count, heads * per_head * dim], torch.float32),
        "key": draw.calm([batch, count, heads * dim], torch.float32),
        "value": draw.calm([batch, count, heads * dim], torch.float32),
        "past_key": past[0],
        "past_value": past[1],
        "seqlens_k": ints([n - 1 for n in lengths], torch.int32),
        "total_sequence_length": ints(max(lengths), torch.int32),  # type: ignore[arg-type]
        "num_heads": heads * per_head,
        "kv_num_heads": heads,
    }
    if draw.integer(0, 2) == 0:
        call["local_window_size"] = 2
    if draw.integer(0, 2) == 0:
        call["softcap"] = 0.5
    if draw.integer(0, 3) == 0:
        call["scale"] = 0.5
    if bits:
        shape = [1, heads, 1, dim] if kind == "PER_CHANNEL" else [1]
        for name in ("k_scale", "v_scale"):
            # Powers of two, so that some quotients are ties; some numbers exceed the codes.
            scale = 2.0 ** draw.integer(-7, -6) if bits == 8 else 2.0 ** draw.integer(-3, -2)
            call[name] = torch.full(shape, scale) * (1 + draw.calm(shape, torch.float32).abs().round())
        call |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    stored = f"int{bits} {kind}" if bits else "float32"
    said = "".join(f", {name} {call[name]}" for name in ("softcap", "scale") if name in call)
    return f"{stored}, {count} new tokens of {lengths}{said}", call


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
