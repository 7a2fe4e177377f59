"""Legal calls of operators that attend over rows of a batch: ONNX and ONNX Runtime."""

import math

import torch
from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.draw import Draw, ints
from kvloom.core.specs import dtype_name


def draw_attention(opset: int, draw: Draw) -> tuple[str, Call]:
    """``Attention`` of ``opset``: with its own cache, with one by ``TensorScatter``, or with none."""
    dtype = draw.one([torch.float32, torch.float32, torch.float16])
    batch, heads, per_head = draw.integer(1, 2), draw.integer(1, 2), draw.one([1, 2])
    count, dim = draw.integer(1, 3), 8
    kind = draw.one(["past", "stored", "stored", "none"] if opset >= 24 else ["past", "past", "none"])
    past = draw.integer(0, 3) if kind == "past" else 0
    given = count if kind == "past" else draw.integer(1, count + 3)
    dims = {"key": dim, "value": draw.one([dim, 4])}
    causal = draw.one([0, 1])
    call: Call = {
        "Q": draw.calm([batch, heads * per_head, count, dim], dtype),
        **{name[0].upper(): draw.calm([batch, heads, given, n], dtype) for name, n in dims.items()},
        "is_causal": causal,
        "softcap": draw.one([0.0, 0.0, 2.0]),
    }
    about, needed = f"{count} queries over {given} keys", 2
    if kind == "past":
        call |= {f"past_{name}": draw.calm([batch, heads, past, n], dtype) for name, n in dims.items()}
        about = f"{count} new tokens behind {past}"
    elif kind == "stored":
        lengths = [draw.integer(0, given) for _ in range(batch)]
        call["nonpad_kv_seqlen"] = ints(lengths)
        about, needed = f"{count} queries over {lengths} of {given} stored tokens", max(2, *lengths)
    windows = {"left_window_size": draw.integer(-1, 2), "right_window_size": draw.integer(-1, 1)}
    if opset >= 25 and draw.integer(0, 2):
        call |= {name: size for name, size in windows.items() if size >= 0}
        about += "".join(f", {name} {size}" for name, size in windows.items() if size >= 0)
    if draw.integer(0, 1):
        total = past + given
        is_narrow = opset >= 24 and needed < total and draw.integer(0, 2) == 0
        width = draw.integer(needed, total - 1) if is_narrow else total
        lead = draw.one([[], [1], [count], [heads * per_head, count], [1, count], [batch, 1, count],
                         [1, heads * per_head, 1]])  # fmt: skip
        # What integers do beside these is open: runtimes make integers of the -inf that hides keys.
        is_alone = kind != "stored" and width == total and not causal and not call.keys() & windows.keys()
        call["attn_mask"], said = _mask(draw, [*lead, width], dtype, is_alone)
        about += f", {said} [{', '.join(map(str, [*lead, width]))}]"
    if draw.integer(0, 1):
        call["scale"] = 0.25
    if draw.integer(0, 2) == 0:
        call["qk_matmul_output_mode"] = draw.integer(0, 3)
        about += f", qk_matmul_output_mode {call['qk_matmul_output_mode']}"
    return f"{about}, {dtype_name(dtype)}{', causal' if causal else ''}", call


def _mask(draw: Draw, shape: list[int], dtype: torch.dtype, may_be_integers: bool) -> tuple[Tensor, str]:
    """Mask of booleans, of numbers, of numbers and -inf, or of integers; it may hide a whole row."""
    kinds = ["boolean", "boolean", "float", "-inf"]
    kind = draw.one([*kinds, *["integer"] * 4] if may_be_integers else kinds)
    hidden = ints([draw.integer(0, 2) == 0 for _ in range(math.prod(shape))], torch.bool).reshape(shape)
    if kind == "boolean":
        return ~hidden, "a boolean mask"
    if kind == "integer":
        values = [draw.integer(0, 2) for _ in range(math.prod(shape))]
        integers = ints(values, draw.one([torch.int64, torch.int32, torch.uint8]))
        return integers.reshape(shape), "an integer mask"
    numbers = draw.calm(shape, dtype)
    if kind == "float":
        return numbers, "a float mask"
    return numbers.masked_fill(hidden, -math.inf), "a float mask with -inf"


def draw_group_query(draw: Draw) -> tuple[str, Call]:
    """``GroupQueryAttention``: float, int8 and int4."""
    bits = draw.one([0, 0, 8, 8, 4, 4])
    kind = draw.one(["PER_TENSOR", "PER_CHANNEL"]) if bits else "NONE"
    batch, heads, per_head, dim, slots = draw.integer(1, 3), draw.integer(1, 2), draw.one([1, 2]), 16, 6
    kind_of_call = draw.one(["prompt", "prompt", "step", "step"] + ["part"] * (batch == 1))
    count = 1 if kind_of_call == "step" else draw.integer(2, 4)
    least = {"prompt": 1, "part": count + 1, "step": 1}[kind_of_call]
    lengths = [draw.integer(least, count if kind_of_call == "prompt" else slots) for _ in range(batch)]
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
        "total_sequence_length": torch.tensor(
            count if kind_of_call == "prompt" else max(lengths), dtype=torch.int32
        ),
        "num_heads": heads * per_head,
        "kv_num_heads": heads,
    }
    if draw.integer(0, 2) == 0:
        call["local_window_size"] = 2
    # What padding sees with both is an accident: ONNX Runtime then shows it keys before its window, too.
    is_padded = kind_of_call == "prompt" and min(lengths) < count
    if draw.integer(0, 2) == 0 and not (is_padded and "local_window_size" in call):
        call["softcap"] = 0.5
    if draw.integer(0, 3) == 0:
        call["scale"] = 0.5
    if bits:
        shape = [1, heads, 1, dim] if kind == "PER_CHANNEL" else [1]
        for name in ("key", "value"):
            scales = _scales(draw, shape, bits)
            call[f"{name[0]}_scale"] = scales
            call[name] = _near_ties(draw, call[name], scales, bits)
        call |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    stored = f"int{bits} {kind}" if bits else "float32"
    said = "".join(f", {name} {call[name]}" for name in ("softcap", "scale") if name in call)
    return f"{stored}, {count} new tokens of {lengths}{said}", call


def _scales(draw: Draw, shape: list[int], bits: int) -> Tensor:
    """Scales at which some numbers exceed the codes: powers of two, whose quotients are ties, or others."""
    if draw.integer(0, 2) == 0:
        scale = 2.0 ** draw.integer(-7, -6) if bits == 8 else 2.0 ** draw.integer(-3, -2)
        return torch.full(shape, scale) * (1 + draw.calm(shape, torch.float32).abs().round())
    low, high = (1 / 128, 1 / 32) if bits == 8 else (1 / 8, 1 / 2)
    return draw.between(low, high, shape, torch.float32)


def _near_ties(draw: Draw, x: Tensor, scales: Tensor, bits: int) -> Tensor:
    """``x``, half of whose numbers are nearest to the middle of two codes: ties, or beside one."""
    largest = 2 ** (bits - 1) - 1
    codes = [draw.integer(-largest - 1, largest - 1) + 0.5 for _ in range(x.numel())]
    middles = torch.tensor(codes, dtype=torch.float64).view(x.shape) * scales.double().flatten()
    is_middle = ints([draw.integer(0, 1) for _ in range(x.numel())], torch.bool).view(x.shape)
    return torch.where(is_middle, middles.to(x.dtype), x)
