"""What implementations that are right are asked, to answer as if they made a mistake."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvloom.conform.describe import Call


def wrapped(call: Call) -> Call:
    cache = call["key_cache"]
    size = cache.shape[2] if call.get("cache_mode") == "PA_NZ" else cache.shape[1]
    slots = call["slot_mapping"]
    return {"slot_mapping": torch.where(slots < 0, slots + cache.shape[0] * size, slots)}


def pages_rolled(x: torch.Tensor) -> torch.Tensor:
    known = (x >= 0) & (x < 1 << 40)
    return torch.where(known, x.roll(-1, dims=1), x) if x.ndim == 2 else x


def first_tokens(call: Call) -> Call:
    """Alibi as if each sequence were only as long as what is kept of it."""
    if "compress_lens" not in call or "compress_seq_offset" in call:
        return {}
    key, lens, count = call["key"], call["compress_lens"].reshape(-1), call["key"].shape[-2]
    if key.ndim == 4:
        starts = [b * key.shape[1] for b in range(key.shape[0])]
    else:
        starts = [0, *call["seq_lens"].cumsum(0).tolist()]
    found = {}
    for name in ("key", "value"):
        x = call[name].clone()
        flat, old = x.flatten(0, -3), call[name].flatten(0, -3)
        for b, length in enumerate(call["seq_lens"].tolist()):
            for h in range(count):
                win = int(lens[b * count + h])
                begin = starts[b]
                flat[begin + length - win : begin + length, h] = old[begin : begin + win, h]
        found[name] = x
    return found


def omni(call: Call) -> Call:
    return {"scatter_mode": "Omni"} if call.get("scatter_mode") == "Rope" else {}


def top_left(call: Call) -> Call:
    if not call.get("is_causal"):
        return {}
    width = call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0)
    mask = torch.full((call["Q"].shape[2], width), float("-inf")).triu(1).to(call["Q"].dtype)
    if "attn_mask" in call:
        given = call["attn_mask"]
        if given.dtype == torch.bool:
            given = torch.where(given, 0.0, float("-inf"))
        mask = mask + torch.nn.functional.pad(given, (0, width - given.shape[-1]), value=float("-inf"))
    return {"is_causal": 0, "attn_mask": mask.to(call["Q"].dtype)}


def added_booleans(call: Call) -> Call:
    mask = call.get("attn_mask")
    return {} if mask is None or mask.dtype != torch.bool else {"attn_mask": mask.to(call["Q"].dtype)}


def booleans_of_integers(call: Call) -> Call:
    mask = call.get("attn_mask")
    is_integer = mask is not None and mask.dtype in (torch.uint8, torch.int32, torch.int64)
    return {"attn_mask": mask != 0} if is_integer else {}


def of_the_last_keys(call: Call) -> Call:
    if "attn_mask" not in call:
        return {}
    mask = call["attn_mask"]
    missing = call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0) - mask.shape[-1]
    hidden = torch.full((*mask.shape[:-1], missing), False if mask.dtype == torch.bool else float("-inf"))
    return {"attn_mask": torch.cat((hidden.to(mask.dtype), mask), dim=-1)} if missing else {}


def of_padding(call: Call) -> Call:
    """A first prompt whose rows are all as long as the longest could be."""
    count = call["query"].shape[1]
    is_first = int(call["total_sequence_length"]) == count
    return {"seqlens_k": torch.full_like(call["seqlens_k"], count - 1)} if is_first else {}


def clamped(call: Call) -> Call:
    if call.get("mode") != "circular" or "write_indices" not in call:
        return {}
    axis = call["axis"]
    room = call["past_cache"].shape[axis] - call["update"].shape[axis]
    return {"mode": "linear", "write_indices": call["write_indices"].clamp(max=room)}


def contiguous_again(*names: str) -> Callable[[Call], Call]:
    """Memory read in order from the first element, whatever the strides."""

    def change(call: Call) -> Call:
        found = {}
        for name in names:
            x = call[name]
            memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize - x.storage_offset(),), (1,))
            found[name] = memory[: x.numel()].view(x.shape)
        return found

    return change


def only_negative_one(skipped: Callable[[torch.Tensor, Call], torch.Tensor]) -> Callable[[Call], Call]:
    """Slots below -1 taken for slots."""
    return lambda c: {
        "slot_mapping": torch.where(c["slot_mapping"] < -1, skipped(c["slot_mapping"], c), c["slot_mapping"])
    }


def total_slots(call: Call) -> int:
    cache = call["key_cache"]
    return int(cache.shape[0] * cache.shape[2 if call.get("cache_mode") == "PA_NZ" else 1])


def rounded_down(call: Call) -> Call:
    table, size = call["cachestarts"], call["page_size"]
    known = (table >= 0) & (table < 1 << 40)
    return {"cachestarts": torch.where(known, table // size * size, table)} if table.ndim == 2 else {}


def as_they_come(call: Call) -> Call:
    """FlashInfer's new tokens behind each other at the end of their request."""
    size = call["paged_kv_cache"].shape[2 if call["kv_layout"] == "NHD" else 3]
    pages, rows = call["kv_indptr"].diff().tolist(), call["batch_indices"].tolist()
    at = [(n - 1) * size + last - rows.count(b) for b, (n, last) in
          enumerate(zip(pages, call["kv_last_page_len"].tolist(), strict=True))]  # fmt: skip
    places = []
    for b in rows:
        places.append(at[b])
        at[b] += 1
    return {"positions": torch.tensor(places, dtype=torch.int32)}


def zeros(sign: float, *names: str) -> Callable[[Call], Call]:
    return lambda c: {n: torch.where(c[n] == 0, torch.full_like(c[n], sign * 0.0), c[n]) for n in names
                      if c[n].is_floating_point()}  # fmt: skip


def coded(
    codes: Callable[[torch.Tensor], torch.Tensor], lowest: int = 0, divided: bool = False
) -> Callable[[Call], Call]:
    """GroupQueryAttention of numbers that are codes already, of which ``codes`` made integers."""

    def change(call: Call) -> Call:
        bits, found = call["kv_cache_bit_width"], {}
        for side in ("key", "value") if bits else ():
            scale, x = call[f"{side[0]}_scale"], call[side].unflatten(2, (call["kv_num_heads"], -1))
            scale = scale.view(1, 1, *scale.shape[1::2]) if scale.ndim > 1 else scale
            low, high = -(2 ** (bits - 1)) + lowest, 2 ** (bits - 1) - 1
            exact = (x / scale if divided else x * (1 / scale)).double()
            found[side] = (codes(exact).clamp(low, high).float() * scale).flatten(2)
        return found

    return change


def cleared(*names: str) -> Callable[[Call], Call]:
    return lambda c: {n: torch.zeros_like(c[n]) for n in names if n in c}


def first_decay(call: Call) -> Call:
    """The decay of the first element of each key for all of its elements."""
    if "decay" not in call:
        return {}
    decay = call["decay"].unflatten(2, (call["kv_num_heads"], -1))
    return {"decay": decay[..., 0]}


def swap_of_one_shape(a: str, b: str) -> Callable[[Call], Call]:
    return lambda c: {a: c[b], b: c[a]} if c[a].shape == c[b].shape else {}
