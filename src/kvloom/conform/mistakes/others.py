"""Known mistakes of other pages and rows: vLLM, FlashInfer, ONNX, transformers."""

from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.judging import named
from kvloom.conform.mistakes.making import Change, Mistake, by_call, changed, without


def _piece_transposed(operator: Operator, call: Call, results: Results) -> Results | None:
    """Chunks of keys are transposed: element d is at [d % n, d // n]."""
    cache = call.get("key_cache")
    if cache is None or cache.ndim != 5:
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


def _copied_back(call: Call) -> Call | None:
    return {**call, "block_mapping": call["block_mapping"].flip(1)} if "block_mapping" in call else None


def _one_source(x: Tensor, call: Call) -> Tensor:
    return torch.stack((x[:1, 0].expand(len(x)), x[:, 1]), dim=1)


def _in_order(is_sorted: bool) -> Change:
    """New tokens count as the last ones of their request, in order; ``positions`` is ignored."""

    def change(call: Call) -> Call | None:
        rows = call.get("batch_indices")
        if rows is None:
            return None
        rows = rows.sort().values if is_sorted else rows
        size = call["paged_kv_cache"].shape[2 if call["kv_layout"] == "NHD" else 3]
        length = (call["kv_indptr"].diff() - 1) * size + call["kv_last_page_len"]
        places = length[rows] - torch.bincount(rows, minlength=len(length))[rows]
        earlier = [int((rows[:t] == b).sum()) for t, b in enumerate(rows)]
        return {**call, "batch_indices": rows, "positions": places + torch.tensor(earlier)}

    return change


def _first_layer_only(operator: Operator, call: Call, results: Results) -> Results | None:
    before = {k: x for k, x in named(call).items() if isinstance(x, Tensor)}
    late = [name for name in results if name.endswith(".1") and name in before]
    return {**results, **{name: before[name] for name in late}} if late else None


def _transposed_pages(call: Call) -> Call | None:
    if "kv_layout" not in call:
        return None
    return {**call, "kv_layout": "HND" if call["kv_layout"] == "NHD" else "NHD"}


def _layout_of_pages(operator: Operator, call: Call, results: Results) -> Results | None:
    transposed = _transposed_pages(call)
    if transposed is None:
        return None
    pages = call["paged_kv_cache"]
    other = pages.reshape(*pages.shape[:2], pages.shape[3], pages.shape[2], pages.shape[4])
    found = operator.oracle({**transposed, "paged_kv_cache": other})
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


def _filled_only(call: Call) -> Call | None:
    return {**call, "kind": "dynamic"} if call.get("kind") == "static" else None


def _new_only(operator: Operator, call: Call, results: Results) -> Results | None:
    if "key_states" not in call:
        return None
    new = named({"keys": call["key_states"], "values": call["value_states"]})
    return {name: new[name] for name in results}


def _new_first(operator: Operator, call: Call, results: Results) -> Results | None:
    if "key_states" in call and call["kind"] == "dynamic":
        for name, states in (("keys", call["key_states"]), ("values", call["value_states"])):
            for step in range(len(states)):
                results[f"{name}.{step}"] = torch.cat(states[: step + 1][::-1], dim=2)
        return results
    if "past_key" in call and "K" in call:
        for side, new in (("key", "K"), ("value", "V")):
            results[f"present_{side}"] = torch.cat((call[new], call[f"past_{side}"]), dim=2)
        return results
    return None


def _clamped(operator: Operator, call: Call, results: Results) -> Results | None:
    """A circular write stops at the end instead of continuing at the front."""
    if call.get("mode") != "circular" or "write_indices" not in call:
        return None
    axis = call.get("axis", -2)
    room = call["past_cache"].shape[axis] - call["update"].shape[axis]
    return operator.oracle({**call, "mode": "linear", "write_indices": call["write_indices"].clamp(max=room)})


def _scales_swapped(call: Call) -> Call | None:
    if call.get("k_scale") is None or call["k_scale"].shape != call["v_scale"].shape:
        return None
    return {**call, "k_scale": call["v_scale"], "v_scale": call["k_scale"]}


def _one_scale_for_all(call: Call) -> Call | None:
    if call.get("k_scale") is None or call["k_scale"].numel() == 1:
        return None
    names = ("k_scale", "v_scale")
    return {
        **call,
        **{n: call[n].flatten()[:1].expand(call[n].numel()).reshape(call[n].shape) for n in names},
    }


def _tables_from_the_front(call: Call) -> Call | None:
    return {**call, "seq_offset": torch.zeros_like(call["seq_offset"])} if "seq_offset" in call else None


def _past_ignored(call: Call) -> Call | None:
    past = call.get("past_seqlens")
    return (
        {**call, "past_seqlens": torch.zeros_like(past)} if isinstance(past, Tensor) and past.any() else None
    )


MISTAKES: Final = (
    by_call("past length ignored", "new tokens are written at the front of their sequence", _past_ignored),
    by_call("window off by one", "the window has one token more", _window(1)),
    by_call("window off by one", "the window has one token less", _window(-1)),
    by_call("window ignored", "tokens outside the window are kept", _window_ignored),
    by_call("scale of keys for values", "k_scale and v_scale are swapped", _scales_swapped),
    by_call("one scale for all channels", "the first channel's scale is used for all", _one_scale_for_all),
    by_call("seq_offset ignored", "blocks are read from the front of each row of the table",
            _tables_from_the_front),
    Mistake("pieces transposed", "element d is at [d // x, d % x]", _piece_transposed),
    Mistake("values as rows", "values are [blocks, H, D, slots], not [blocks, H, slots, D]",
               _values_as_rows),
    by_call("positions ignored", "tokens are written after those of their request as they come",
            _in_order(False)),
    by_call("positions ignored", "tokens are taken request by request and written after those of each",
            _in_order(True)),
    by_call("one source for all", "every block is a copy of the source of the first pair",
            changed("block_mapping", _one_source)),
    by_call("copied backwards", "a pair is (from, to)", _copied_back),
    Mistake("only the first layer", "blocks of the other layers were not copied", _first_layer_only),
    Mistake("NHD for HND", "pages are taken for the other kv_layout", _layout_of_pages),
    by_call("write_indices ignored", "rows are written from their front", without("write_indices")),
    by_call("write index off by one", "rows are written one slot late",
            changed("write_indices", lambda x, call: x + 1)),
    Mistake("circular write stops at the end", "positions wrap around at the end of the row", _clamped),
    by_call("static as dynamic", "static storage is returned whole", _filled_only),
    Mistake("history not returned", "only the new tokens are returned", _new_only),
    Mistake("new tokens first", "new tokens come after the old ones", _new_first),
)  # fmt: skip
