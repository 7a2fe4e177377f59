"""Legal calls of operators that write pages: Ascend, vLLM, FlashInfer, ONNX Runtime's PagedAttention."""

import torch
from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.draw import FLOATS, Draw, ints, starts
from kvloom.core.specs import dtype_name

INDICES = (torch.int32, torch.int64)


def _slots(draw: Draw, count: int, total: int, dtype: torch.dtype) -> Tensor:
    found = draw.distinct(count, total)
    return ints([_skipped(draw, total, dtype) if draw.integer(0, 5) == 0 else slot for slot in found], dtype)


def _skipped(draw: Draw, total: int, dtype: torch.dtype) -> int:
    """Any negative slot, which skips its token."""
    return draw.one([-1, -1, -2, -total, torch.iinfo(dtype).min])


def _new(draw: Draw, shape: list[int], dtype: torch.dtype) -> Tensor:
    x = draw.numbers(shape, dtype, edges=True)
    return draw.strided(x) if draw.integer(0, 3) == 0 else x


def draw_scatter(draw: Draw) -> tuple[str, Call]:
    """ScatterPaKvCache, each of its six scenarios."""
    scenario = draw.integer(1, 6)
    index = draw.one(INDICES)
    dtype = draw.one([*FLOATS, torch.int8, torch.int8])
    blocks, size, heads = draw.integer(2, 3), draw.one([2, 4]), draw.integer(1, 2)
    about = f"scenario {scenario}, {dtype_name(dtype)}"
    if scenario in (1, 2, 6):
        count = draw.integer(0, blocks * size)
        dims = (
            [32 * draw.integer(1, 2) // dtype.itemsize] * 2
            if scenario == 1
            else [draw.integer(1, 6), draw.integer(1, 6)]
        )
        new = [_new(draw, [count, heads, dim], dtype) for dim in dims]
        if scenario == 1:
            last = 32 // dtype.itemsize
            shapes = [[blocks, heads * dim // last, size, last] for dim in dims]
        else:
            shapes = [[blocks, size, heads, dim] for dim in dims]
        caches = [draw.poison(shape, dtype) for shape in shapes]
        call: Call = {
            "key": new[0],
            "value": new[1],
            "key_cache": caches[0],
            "value_cache": caches[1],
            "slot_mapping": _slots(draw, count, blocks * size, index),
            "cache_mode": "PA_NZ" if scenario == 1 else "Norm",
        }
        if scenario == 6:
            del call["value"], call["value_cache"]
        elif scenario == 2 and count and draw.integer(0, 2) == 0:
            return f"{about}, Nct", call | _uncollected(draw, count, heads, dims, dtype)
        return f"{about}, {count} tokens", call
    return _compressed(draw, scenario, about, dtype, index, size)


def _uncollected(draw: Draw, count: int, heads: int, dims: list[int], dtype: torch.dtype) -> Call:
    """Keys and values as columns of a fused projection, described by strides and offsets."""
    widths = [heads * dim + draw.integer(0, 3) for dim in dims]
    offsets = [draw.integer(0, 2) for _ in dims]
    new = []
    for dim, width, offset in zip(dims, widths, offsets, strict=True):
        memory = draw.poison([offset + count * width], dtype)
        new.append(memory[: count * heads * dim].view(count, heads, dim))
    return {"key": new[0], "value": new[1], "scatter_mode": "Nct", "strides": widths, "offsets": offsets}


def _compressed(
    draw: Draw, scenario: int, about: str, dtype: torch.dtype, index: torch.dtype, size: int
) -> tuple[str, Call]:
    batch, heads = draw.integer(1, 2), draw.integer(1, 2)
    lengths = [draw.integer(0, 5) for _ in range(batch)]
    mode = {3: draw.one(["Alibi", "Rope"]), 4: "Alibi", 5: draw.one(["Rope", "Omni"])}[scenario]
    wins, offs, slots, at = [], [], [], 0
    for b in range(batch):
        for _ in range(heads):
            off = draw.one([-1, draw.integer(0, lengths[b])])
            win = draw.integer(0, lengths[b] - max(off, 0))
            whole = off == -1 or win == 0 or off == lengths[b]
            run = win if mode == "Alibi" else lengths[b] if whole else lengths[b] - win + (mode == "Rope")
            skipped = draw.integer(0, 7) == 0
            slots.append(_skipped(draw, size, index) if skipped else at)
            at += 0 if skipped else run + draw.integer(0, 1)
            wins.append(win)
            offs.append(off)
    dims = [draw.integer(1, 4), draw.integer(1, 4)]
    lead = [batch, max(lengths) + 1, heads] if scenario == 3 else [sum(lengths), heads]
    new = [
        draw.calm([*lead, dim], dtype) if mode == "Rope" else _new(draw, [*lead, dim], dtype) for dim in dims
    ]
    blocks = -(-max(at, 1) // size)
    shape = [batch, heads] if scenario == 3 else [batch * heads]
    call: Call = {
        "key": new[0],
        "value": new[1],
        "key_cache": draw.poison([blocks, size, 1, dims[0]], dtype),
        "value_cache": draw.poison([blocks, size, 1, dims[1]], dtype),
        "slot_mapping": ints(slots, index).reshape(shape),
        "compress_lens": ints(wins, index).reshape(shape),
        "seq_lens": ints(lengths, index),
    }
    if mode != "Alibi":
        call["compress_seq_offset"] = ints(offs, index)
    if scenario != 3:
        call["scatter_mode"] = mode
    return f"{about}, {mode}, lengths {lengths}", call


def draw_gather(draw: Draw) -> tuple[str, Call]:
    """GatherPaKvCache."""
    index, dtype = draw.one(INDICES), draw.one([*FLOATS, torch.int8])
    nz = draw.integer(0, 1) == 1
    batch, heads, size, blocks = draw.integer(1, 3), draw.integer(1, 2), draw.one([2, 4]), draw.integer(2, 4)
    lengths = [draw.one([0, 1, size - 1, size, size + 1]) for _ in range(batch)]
    columns = max(-(-max(lengths) // size), 1)
    offsets = [draw.integer(0, 2 * size) for _ in range(batch)] if draw.integer(0, 2) == 0 else None
    if offsets:
        columns += max(offsets) // size
    table = [[draw.integer(0, blocks - 1) for _ in range(columns)] for _ in range(batch)]
    last = 32 // dtype.itemsize
    dims = [last, last] if nz else [draw.integer(1, 5), draw.integer(1, 5)]
    shapes = [[blocks, heads * d // last, size, last] if nz else [blocks, size, heads, d] for d in dims]
    rows = sum(lengths) + draw.integer(0, 1)
    cumulative = draw.integer(0, 1) == 1
    call: Call = {
        "key_cache": draw.poison(shapes[0], dtype),
        "value_cache": draw.poison(shapes[1], dtype),
        "block_tables": ints(table, index),
        "seq_lens": ints(starts(lengths) if cumulative else lengths, index),
        "key": draw.poison([rows, heads * dims[0]] if nz else [rows, heads, dims[0]], dtype),
        "value": draw.poison([rows, heads * dims[1]] if nz else [rows, heads, dims[1]], dtype),
        "cache_mode": "PA_NZ" if nz else "Norm",
        "is_seq_lens_cumsum": cumulative,
    }
    if offsets:
        call["seq_offset"] = ints(offsets, index)
    return f"{'PA_NZ' if nz else 'Norm'}, {dtype_name(dtype)}, lengths {lengths}", call


def draw_reshape(draw: Draw) -> tuple[str, Call]:
    """vLLM's ``reshape_and_cache``."""
    dtype = draw.one(FLOATS)
    blocks, size, heads = draw.integer(2, 3), draw.one([2, 4]), draw.integer(1, 2)
    dim, piece, count = 16, 16 // dtype.itemsize, draw.integer(0, 4)
    return f"{dtype_name(dtype)}, {count} tokens", {
        "key": _new(draw, [count, heads, dim], dtype),
        "value": _new(draw, [count, heads, dim], dtype),
        "key_cache": draw.poison([blocks, heads, dim // piece, size, piece], dtype),
        "value_cache": draw.poison([blocks, heads, dim, size], dtype),
        "slot_mapping": _slots(draw, count, blocks * size, torch.int64),
    }


def draw_reshape_flash(draw: Draw) -> tuple[str, Call]:
    """vLLM's ``reshape_and_cache_flash``."""
    dtype = draw.one(FLOATS)
    blocks, size, heads, dim = draw.integer(2, 3), draw.one([2, 4]), draw.integer(1, 2), draw.one([4, 8])
    count, padding = draw.integer(0, min(5, blocks * size)), draw.one([0, 0, 2])
    return f"{dtype_name(dtype)}, {count} tokens, {padding} of padding", {
        "key": _new(draw, [count + padding, heads, dim], dtype),
        "value": _new(draw, [count + padding, heads, dim], dtype),
        "key_cache": draw.poison([blocks, size, heads, dim], dtype),
        "value_cache": draw.poison([blocks, size, heads, dim], dtype),
        "slot_mapping": _slots(draw, count, blocks * size, torch.int64),
    }


def draw_copy_blocks(draw: Draw) -> tuple[str, Call]:
    """vLLM's ``copy_blocks``."""
    dtype, layers, blocks = draw.one([*FLOATS, torch.uint8]), draw.integer(1, 2), draw.integer(3, 5)
    shape = [blocks, 2, draw.integer(1, 2), 4]
    count = draw.integer(0, 2)
    ids = draw.distinct(blocks, blocks)
    pairs = [[draw.one(ids[count:]), target] for target in ids[:count]]
    return f"{dtype_name(dtype)}, {layers} layers, {count} blocks", {
        "key_caches": [draw.poison(shape, dtype) for _ in range(layers)],
        "value_caches": [draw.poison(shape, dtype) for _ in range(layers)],
        "block_mapping": ints(pairs).reshape(-1, 2),
    }


def draw_append(draw: Draw) -> tuple[str, Call]:
    """FlashInfer's ``append_paged_kv_cache``."""
    dtype, layout = draw.one([torch.float16, torch.bfloat16]), draw.one(["NHD", "HND"])
    batch, heads, size, dim = draw.integer(1, 3), draw.integer(1, 2), draw.one([2, 4]), draw.one([4, 8])
    total = [draw.one([1, size - 1, size, size + 1]) or 1 for _ in range(batch)]
    new = [draw.integer(0, n) for n in total]
    need = [-(-n // size) for n in total]
    pages = sum(need) + 1
    shape = [pages, 2, size, heads, dim] if layout == "NHD" else [pages, 2, heads, size, dim]
    rows = [(b, p) for b, n in enumerate(new) for p in range(total[b] - n, total[b])]
    order = ""
    if draw.integer(0, 1):  # each token has its position, so they come in any order, not only at the end
        rows = [(b, p) for b, n in enumerate(new) for p in draw.distinct(n, total[b])]
        draw.random.shuffle(rows)
        order = ", in any order"
    return f"{layout}, {dtype_name(dtype)}, new {new} of {total}{order}", {
        "append_key": _new(draw, [sum(new), heads, dim], dtype),
        "append_value": _new(draw, [sum(new), heads, dim], dtype),
        "batch_indices": ints([b for b, _ in rows], torch.int32),
        "positions": ints([p for _, p in rows], torch.int32),
        "paged_kv_cache": draw.poison(shape, dtype),
        "kv_indices": ints(draw.distinct(sum(need), pages), torch.int32),
        "kv_indptr": ints(starts(need), torch.int32),
        "kv_last_page_len": ints([(n - 1) % size + 1 for n in total], torch.int32),
        "kv_layout": layout,
    }


def draw_paged_write(draw: Draw) -> tuple[str, Call]:
    """ONNX Runtime's ``PagedAttention``, of which only the updated cache is compared."""
    dtype = draw.one([torch.float16, torch.bfloat16])
    batch, heads, size, dim = draw.integer(1, 3), draw.integer(1, 2), draw.one([2, 4]), 8
    new = [draw.integer(0, 3) for _ in range(batch)]
    past = [draw.one([0, 1, size - 1, size]) for _ in range(batch)]
    need = [-(-(a + b) // size) for a, b in zip(new, past, strict=True)]
    blocks, width = sum(need) + 1, max(*need, 1)
    ids = iter(draw.distinct(sum(need), blocks))
    table = [[next(ids) for _ in range(n)] + [-1] * (width - n) for n in need]
    return f"{dtype_name(dtype)}, new {new} behind {past}", {
        "key": _new(draw, [sum(new), heads * dim], dtype),
        "value": _new(draw, [sum(new), heads * dim], dtype),
        "key_cache": draw.poison([blocks, size, heads, dim], dtype),
        "value_cache": draw.poison([blocks, size, heads, dim], dtype),
        "cumulative_sequence_length": ints(starts(new), torch.int32),
        "past_seqlens": ints(past, torch.int32),
        "block_table": ints(table, torch.int32),
    }
