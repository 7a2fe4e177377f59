"""Known mistakes of ragged batches: the order of effects among entries, and the start of their pages."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.mistakes.making import Change, by_call, by_numbers, set_to
from kvloom.conform.oracles import pmx

_STORED: Final = pmx.dynamic_key_value_cache


def _entry(call: Call, b: int) -> Call:
    """Call with entry ``b`` alone."""
    seq, kv = call["seqstarts"].tolist(), call["kvstarts"].tolist()
    table: Tensor = call["cachestarts"]
    is_ragged = call["cache_mode"] == 1 and table.ndim == 1
    return {
        **call,
        "current_key": call["current_key"][seq[b] : seq[b + 1]],
        "current_value": call["current_value"][seq[b] : seq[b + 1]],
        "seqstarts": torch.tensor([0, seq[b + 1] - seq[b]]),
        "kvstarts": torch.tensor([0, kv[b + 1] - kv[b]]),
        "cachestarts": table[kv[b] : kv[b + 1]] if is_ragged else table[b : b + 1],
        "start_pos": call["start_pos"][b : b + 1],
    }


def _one_after_another(**given: Any) -> pmx.PmxStored:
    call = {"scale": None, "cache_mode": 0, **given}
    cache, scale = call["cache"], call["scale"]
    keys, values = [], []
    for b in range(len(call["start_pos"])):
        key, value, cache, scale = _STORED(**{**_entry(call, b), "cache": cache, "scale": scale})
        keys.append(key)
        values.append(value)
    return pmx.PmxStored(torch.cat(keys), torch.cat(values), cache, scale)


def _history_first(**given: Any) -> pmx.PmxStored:
    """History is read before the call's stores, then the new tokens follow."""
    call = {"cache_mode": 0, **given}
    stored = _STORED(**call)
    first = call["kvstarts"].tolist()
    for b, past in enumerate(call["start_pos"].tolist()):
        alone = _entry(call, b)
        none = {"current_key": alone["current_key"][:0], "current_value": alone["current_value"][:0]}
        history = {"seqstarts": torch.tensor([0, 0]), "kvstarts": torch.tensor([0, past])}
        before = _STORED(**{**alone, **none, **history})
        stored.key[first[b] : first[b] + past] = before.key
        stored.value[first[b] : first[b] + past] = before.value
    return stored


def _pages(change: Callable[[Tensor, Call], Tensor]) -> Change:
    def changed(call: Call) -> Call | None:
        table = call["cachestarts"]
        if table.ndim != 2:
            return None
        known = (table >= 0) & (table < 1 << 40)
        return {**call, "cachestarts": torch.where(known, change(table.clamp(0, 1 << 40), call), table)}

    return changed


MISTAKES: Final = (
    by_numbers("entries one after another", "an entry is read before later entries of the call are written",
               pmx, dynamic_key_value_cache=_one_after_another),
    by_numbers("history read before the call writes", "history is read before other entries are written", pmx,
               dynamic_key_value_cache=_history_first),
    by_call("page index for slot", "page entries are slots of a first token, divided by the page size here",
            _pages(lambda x, call: x // call["page_size"])),
    by_call("page starts rounded down", "a page may start at any slot, not only at multiples of its size",
            _pages(lambda x, call: x // call["page_size"] * call["page_size"])),
    by_call("offset in page ignored", "every token of a page goes to its first slot", set_to("page_size", 1)),
)  # fmt: skip
