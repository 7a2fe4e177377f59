"""What becomes of the results of implementations that are right, to look as if they made a mistake."""

from __future__ import annotations

import torch

from kvloom.conform.describe import Call, Results


def short_steps(call: Call, results: Results, after: Call) -> Results:
    found = {}
    for side, name in (("key_states", "keys"), ("value_states", "values")):
        found |= {f"{name}.{i}": x for i, x in enumerate(call[side])}
    return found


def newest_first(before: Call, results: Results, call: Call) -> Results:
    if "past_key" not in before:
        return results
    past, new = before["past_key"].shape[2], before["K"].shape[2]
    order = [*range(past, past + new), *range(past)]
    return {**results, **{n: results[n][:, :, order] for n in ("present_key", "present_value")}}


def without_padding(before: Call, results: Results, call: Call) -> Results:
    """What a row of a prompt has behind its tokens is what it had."""
    for side in ("key", "value"):
        for b, last in enumerate(before["seqlens_k"].tolist()):
            results[f"present_{side}"][b, :, last + 1 :] = before[f"past_{side}"][b, :, last + 1 :]
    return results


def lowest_scores(before: Call, results: Results, call: Call) -> Results:
    if before.get("qk_matmul_output_mode") != 2:
        return results
    scores = results["qk_matmul_output"]
    return {**results, "qk_matmul_output": scores.clamp(min=torch.finfo(scores.dtype).min)}


def capped_scores(before: Call, results: Results, call: Call) -> Results:
    if before.get("qk_matmul_output_mode") != 0 or not before["softcap"]:
        return results
    cap = before["softcap"]
    return {**results, "qk_matmul_output": cap * (results["qk_matmul_output"] / cap).tanh()}


def transposed(before: Call, results: Results, call: Call) -> Results:
    """Pieces of keys with the lane outside."""
    cache, slots = before["key_cache"], before["slot_mapping"]
    pieces, size, width = cache.shape[2:]
    key = before["key"].unflatten(2, (width, pieces)).transpose(2, 3)  # [T, H, pieces, width]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // size, :, :, slot % size] = key[t]
    return {**results, "key_cache": cache}


def as_rows(before: Call, results: Results, call: Call) -> Results:
    cache, slots = before["value_cache"], before["slot_mapping"]
    size, rows = cache.shape[3], cache.view(cache.shape[0], cache.shape[1], cache.shape[3], cache.shape[2])
    kept = slots >= 0
    rows[slots[kept] // size, :, slots[kept] % size] = before["value"][kept]
    return {**results, "value_cache": cache}


def static_tail(before: Call, results: Results, call: Call) -> Results:
    """Positions behind the last one of the rows of the call."""
    count = before["current_key"].shape[1]
    for name in ("cache", "scale"):
        if name in results:
            x, layer, batch = results[name], before["layer_idx"], len(before["current_key"])
            rows = (
                x[:batch, layer].transpose(1, 2)
                if before["cache_layout"] == 0
                else x[layer, :batch].movedim(3, 1)
            )
            rows[:, before["start_pos"] + count :] = 0
    return results


def page_tail(before: Call, results: Results, call: Call) -> Results:
    axis = 1 if before["kv_layout"] == "NHD" else 2
    for end, used in zip(before["kv_indptr"][1:].tolist(), before["kv_last_page_len"].tolist(), strict=True):
        page = results["paged_kv_cache"][before["kv_indices"][end - 1]]
        page.narrow(axis, used, page.shape[axis] - used).zero_()
    return results


def row_tail(before: Call, results: Results, call: Call) -> Results:
    axis, count = before["axis"], before["update"].shape[before["axis"]]
    first = before.get("write_indices")
    for b, row in enumerate(results["present_cache"]):
        at = (0 if first is None else int(first[b])) + count
        along = axis if axis < 0 else axis - 1
        row.narrow(along, min(at, row.shape[along]), max(row.shape[along] - at, 0)).zero_()
    return results


def unsigned(before: Call, results: Results, call: Call) -> Results:
    """Nibbles without their offset: weights stay, since every score moves by as much."""
    if before.get("kv_cache_bit_width") != 4 or before.get("softcap"):
        return results
    heads, kv_heads = before["num_heads"], before["kv_num_heads"]
    out = results["output"].unflatten(2, (heads, -1))
    scale = before["v_scale"].expand(1, kv_heads, 1, out.shape[3]) if before["v_scale"].ndim > 1 else (
        before["v_scale"].view(1, 1, 1, 1).expand(1, kv_heads, 1, out.shape[3]))  # fmt: skip
    more = 8 * scale[0, :, 0].repeat_interleave(heads // kv_heads, dim=0)
    sees_keys = (out != 0).any(dim=-1, keepdim=True)  # a window of padding may have none
    return {**results, "output": torch.where(sees_keys, out + more, out).flatten(2)}


def put_back_state(before: Call, results: Results, call: Call) -> Results:
    return {**results, "present_state": before["past_state"]} if "past_state" in before else results
