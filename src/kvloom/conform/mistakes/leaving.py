"""Known mistakes in slots that a call must not change."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.judging import named
from kvloom.conform.mistakes.making import Mistake
from kvloom.conform.oracles import pmx

TABLES: Final = {
    "pmx.key_value_cache": pmx.STATIC_AXES,
    "pmx.dynamic_batching.key_value_cache": pmx.DYNAMIC_AXES,
    **{f"{s}.dynamic_batching.multi_head_cache_attention": axes for s, axes in pmx.FUSED_AXES.items()},
}
"""Axes of each layout of each PMX operator."""


def _not_updated(operator: Operator, call: Call, results: Results) -> Results | None:
    before = named(call)
    if "present_cache" in results:
        return {"present_cache": before["past_cache"]}
    if "past_key" in before and "present_key" in results:
        past = {f"present_{side}": before[f"past_{side}"] for side in ("key", "value")}
        return {**results, **past} if past["present_key"].shape == results["present_key"].shape else None
    if "past_state" in before:
        return {**results, "present_state": before["past_state"]}
    changed = {name: before[name] for name in results if name.split(".")[0] in operator.updated}
    return {**results, **changed} if changed else None


def _not_updated_side(side: str) -> Callable[[Operator, Call, Results], Results | None]:
    def change(operator: Operator, call: Call, results: Results) -> Results | None:
        before = named(call)
        names = [n for n in results if n.split(".")[0] in operator.updated and n.startswith(side)]
        return {**results, **{n: before[n] for n in names}} if names else None

    return change


def _cleared(operator: Operator, call: Call, results: Results) -> Results | None:
    """Updated arguments are cleared before the call."""
    names = [n for n in (*operator.updated, "past_cache", "past_key", "past_value") if n in call]
    zeros = {name: _zero(call[name]) for name in names}
    return operator.oracle({**call, **zeros}) if zeros else None


def _zero(x: Any) -> Any:
    return [_zero(each) for each in x] if isinstance(x, list) else torch.zeros_like(x)


def _tail_zeroed(operator: Operator, call: Call, results: Results) -> Results | None:
    if operator.name in TABLES:
        return _pmx_tail_zeroed(operator, call, results)
    if "present_cache" in results:
        x = results["present_cache"].movedim(call.get("axis", -2), 1)
        count = call["update"].shape[call.get("axis", -2)]
        first = call["write_indices"].tolist() if "write_indices" in call else [0] * len(x)
        for row, at in zip(x, first, strict=True):
            row[at + count :] = 0
    elif "kv_indptr" in call:
        ends, last = call["kv_indptr"].tolist()[1:], call["kv_last_page_len"].tolist()
        axis = 2 if call["kv_layout"] == "NHD" else 3
        for end, used in zip(ends, last, strict=True):
            results["paged_kv_cache"][int(call["kv_indices"][end - 1])].movedim(axis - 1, 0)[used:] = 0
    elif "past_seqlens" in call:
        for block, used in _last_blocks(call):
            for name in ("key_cache", "value_cache"):
                results[name][block, used:] = 0
    else:
        return None
    return results


def _last_blocks(call: Call) -> Iterator[tuple[int, int]]:
    """Last block of each sequence, and its number of slots with a token."""
    size, starts = call["key_cache"].shape[1], call["cumulative_sequence_length"].tolist()
    for b, past in enumerate(call["past_seqlens"].tolist()):
        length = past + starts[b + 1] - starts[b]
        if length % size:
            yield int(call["block_table"][b, length // size]), length % size


def _pmx_tail_zeroed(operator: Operator, call: Call, results: Results) -> Results | None:
    """Slots after the last token of each row, or of its last page."""
    axes = TABLES[operator.name][call["cache_layout"]]
    places: list[dict[str, int]] = []
    if "seqstarts" not in call:
        slots, batch = call["cache"].shape[axes.index("S")], len(call["current_key"])
        first = call["start_pos"] + call["current_key"].shape[1]
        places = [{"B": b, "S": s} for b in range(batch) for s in range(first, slots)]
    elif call["cachestarts"].ndim == 2 and call["cache_mode"] == 1:
        size, slots = call["page_size"], call["cache"].shape[axes.index("T")]
        for row, length in zip(call["cachestarts"].tolist(), call["kvstarts"].diff().tolist(), strict=True):
            if length % size:
                first = row[length // size]
                places += [{"T": first + i} for i in range(length % size, size) if first + i < slots]
    if not places:
        return None
    for place in places:
        for name in ("cache", "scale"):
            if name in results:
                index = [place.get(axis, slice(None)) for axis in axes]
                index[axes.index("L")] = call["layer_idx"]
                results[name][tuple(index)] = 0
    return results


MISTAKES: Final[tuple[Mistake, ...]] = (
    Mistake("state not updated", "the cache is as it was before the call", _not_updated),
    Mistake("keys not updated", "only the values were written", _not_updated_side("key")),
    Mistake("values not updated", "only the keys were written", _not_updated_side("value")),
    Mistake("cache cleared", "what the call does not write is 0, it must stay as it was", _cleared),
    Mistake("tail zeroed", "slots after the last token are 0, they must stay as they were",
               _tail_zeroed),
)  # fmt: skip
