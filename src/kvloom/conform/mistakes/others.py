"""Known mistakes of other pages and rows: vLLM, FlashInfer, ONNX, transformers."""

from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.judging import named
from kvloom.conform.mistakes.making import Change, Mistake, by_call, changed, without, zeroed


def _piece_transposed(operator: Operator, call: Call, results: Results) -> Results | None:
    """Chunks of keys are transposed: element d is at [d % n, d // n]."""
    cache = call["key_cache"]
    if cache.ndim != 5:
        return None
    pieces, width = cache.shape[2], cache.shape[4]
    order = torch.arange(pieces * width).view(width, pieces).t().reshape(-1)
    return operator.oracle({**call, "key": call["key"][..., order]})


def _values_as_rows(operator: Operator, call: Call, results: Results) -> Results | None:
    if operator.name != "vllm.reshape_and_cache":
        return None
    cache = call["value_cache"]
    blocks, heads, dim, size = cache.shape
    out = cache.clone().view(blocks, heads, size, dim)
    for t, slot in enumerate(call["slot_mapping"].tolist()):
        if slot >= 0:
            out[slot // size, :, slot % size] = call["value"][t]
    return {**results, "value_cache": out.view_as(cache)}


def _one_source(x: Tensor, call: Call) -> Tensor:
    return torch.stack((x[:1, 0].expand(len(x)), x[:, 1]), dim=1)


def _in_order(is_sorted: bool) -> Change:
    """New tokens count as the last ones of their request, in order; ``positions`` is ignored."""

    def change(call: Call) -> Call | None:
        rows = call["batch_indices"]
        rows = rows.sort().values if is_sorted else rows
        size = call["paged_kv_cache"].shape[2 if call["kv_layout"] == "NHD" else 3]
        length = (call["kv_indptr"].diff() - 1) * size + call["kv_last_page_len"]
        places = length[rows] - torch.bincount(rows, minlength=len(length))[rows]
        earlier = [int((rows[:t] == b).sum()) for t, b in enumerate(rows)]
        return {**call, "batch_indices": rows, "positions": places + torch.tensor(earlier)}

    return change


def _first_layer_only(operator: Operator, call: Call, results: Results) -> Results | None:
    before = named(call)
    late = [name for name in results if name.endswith(".1") and name in before]
    return {**results, **{name: before[name] for name in late}} if late else None


def _layout_of_pages(operator: Operator, call: Call, results: Results) -> Results | None:
    pages, layout = call["paged_kv_cache"], "HND" if call["kv_layout"] == "NHD" else "NHD"
    other = pages.reshape(*pages.shape[:2], pages.shape[3], pages.shape[2], pages.shape[4])
    found = operator.oracle({**call, "kv_layout": layout, "paged_kv_cache": other})
    return {"paged_kv_cache": found["paged_kv_cache"].reshape(pages.shape)}


_WINDOWS: Final = ("local_window_size", "left_window_size", "right_window_size")


def _window(by: int) -> Change:
    def change(call: Call) -> Call | None:
        if call.get("kind") == "sliding":
            return {**call, "max_length": call["max_length"] + by}
        for name in _WINDOWS[:2]:
            if call.get(name, -1) > 0:
                return {**call, name: call[name] + by}
        return None

    return change


def _window_ignored(call: Call) -> Call | None:
    if call.get("kind") == "sliding":
        return {**call, "kind": "dynamic"}
    windows = {name: -1 for name in _WINDOWS if call.get(name, -1) >= 0}
    return {**call, **windows} if windows else None


def _new_only(operator: Operator, call: Call, results: Results) -> Results | None:
    new = named({"keys": call["key_states"], "values": call["value_states"]})
    return {name: new[name] for name in results}


def _new_first(operator: Operator, call: Call, results: Results) -> Results | None:
    if call.get("kind") == "dynamic":
        for name, states in (("keys", call["key_states"]), ("values", call["value_states"])):
            for step in range(len(states)):
                results[f"{name}.{step}"] = torch.cat(states[: step + 1][::-1], dim=2)
        return results
    for side, new in (("key", "K"), ("value", "V")):
        results[f"present_{side}"] = torch.cat((call[new], call[f"past_{side}"]), dim=2)
    return results


def _clamped(call: Call) -> Call | None:
    """A circular write stops at the end instead of continuing at the front."""
    if call["mode"] != "circular":
        return None
    axis = call["axis"]
    room = call["past_cache"].shape[axis] - call["update"].shape[axis]
    return {**call, "mode": "linear", "write_indices": call["write_indices"].clamp(max=room)}


def _scales_swapped(call: Call) -> Call | None:
    return {**call, "k_scale": call["v_scale"], "v_scale": call["k_scale"]}


def _one_scale_for_all(call: Call) -> Call | None:
    scales = {name: call[name] for name in ("k_scale", "v_scale")}
    return {**call, **{name: torch.full_like(x, x.flatten()[0].item()) for name, x in scales.items()}}


MISTAKES: Final = (
    by_call("past length ignored", "new tokens are written at the front of their sequence",
            changed("past_seqlens", zeroed)),
    by_call("window off by one", "the window has one token more", _window(1)),
    by_call("window off by one", "the window has one token less", _window(-1)),
    by_call("window ignored", "tokens outside the window are kept", _window_ignored),
    by_call("scale of keys for values", "k_scale and v_scale are swapped", _scales_swapped),
    by_call("one scale for all channels", "the first channel's scale is used for all", _one_scale_for_all),
    by_call("seq_offset ignored", "blocks are read from the front of each row of the table",
            changed("seq_offset", zeroed)),
    Mistake("pieces transposed", "element d is at [d // x, d % x]", _piece_transposed),
    Mistake("values as rows", "values are [blocks, H, D, slots], not [blocks, H, slots, D]",
               _values_as_rows),
    by_call("positions ignored", "tokens are written after those of their request as they come",
            _in_order(False)),
    by_call("positions ignored", "tokens are taken request by request and written after those of each",
            _in_order(True)),
    by_call("one source for all", "every block is a copy of the source of the first pair",
            changed("block_mapping", _one_source)),
    by_call("copied backwards", "a pair is (from, to)",
            changed("block_mapping", lambda x, call: x.flip(1))),
    Mistake("only the first layer", "blocks of the other layers were not copied", _first_layer_only),
    Mistake("NHD for HND", "pages are taken for the other kv_layout", _layout_of_pages),
    by_call("write_indices ignored", "rows are written from their front", without("write_indices")),
    by_call("write index off by one", "rows are written one slot late",
            changed("write_indices", lambda x, call: x + 1)),
    by_call("circular write stops at the end", "positions wrap around at the end of the row", _clamped),
    by_call("static as dynamic", "static storage is returned whole",
            lambda c: {**c, "kind": "dynamic"} if c["kind"] == "static" else None),
    Mistake("history not returned", "only the new tokens are returned", _new_only),
    Mistake("new tokens first", "new tokens come after the old ones", _new_first),
)  # fmt: skip
