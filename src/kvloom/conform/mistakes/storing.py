"""Known mistakes of slots, layers and layouts, and of the strides of inputs."""

from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.leaving import TABLES
from kvloom.conform.mistakes.making import Mistake, by_call, changed, new_names, set_to, zeroed


def _heads_reversed(call: Call) -> Call | None:
    names = new_names(call)
    x, axis = call[names[0]], 1 if names[0] == "K" else -2
    return {**call, **{name: call[name].flip(axis) for name in names}} if x.ndim >= 3 else None


def _heads_transposed(call: Call) -> Call | None:
    """Tokens and heads of the new rows are read in the other order."""
    names = new_names(call)
    if names[0] == "K":
        return None

    def read(x: Tensor) -> Tensor:
        *lead, tokens, heads, dim = x.shape
        return x.reshape(*lead, heads, tokens, dim).transpose(-3, -2)

    return {**call, **{name: read(call[name]) for name in names}}


def _strides_ignored(call: Call) -> Call | None:
    found = {
        name: x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
        for name, x in call.items()
        if isinstance(x, Tensor) and not x.is_contiguous()
    }
    return {**call, **found} if found else None


def _offset_ignored(call: Call) -> Call | None:
    found = {
        name: x.as_strided(x.shape, x.stride(), 0)
        for name, x in call.items()
        if isinstance(x, Tensor) and x.storage_offset()
    }
    return {**call, **found} if found else None


def _slots_of(call: Call) -> int:
    cache = call["key_cache"]
    paged_keys = cache.ndim == 5
    nz = call.get("cache_mode") == "PA_NZ"
    return int(cache.shape[0] * (cache.shape[3] if paged_keys else cache.shape[2] if nz else cache.shape[1]))


def _slot_wraps(x: Tensor, call: Call) -> Tensor:
    return torch.where(x < 0, x + _slots_of(call), x)


def _block_and_offset_swapped(x: Tensor, call: Call) -> Tensor:
    size = _slots_of(call) // call["key_cache"].shape[0]
    blocks = call["key_cache"].shape[0]
    return torch.where(x < 0, x, x % blocks * size + x // blocks % size)


def _next_column(x: Tensor, call: Call) -> Tensor:
    return x.roll(-1, dims=1)


def _static_start_ignored(operator: Operator, call: Call, results: Results) -> Results | None:
    if call["start_pos"] == 0:
        return None
    at_zero = operator.oracle({**call, "start_pos": 0})
    return {**results, **{k: at_zero[k] for k in ("cache", "scale") if k in at_zero}}


def _last_layer(call: Call) -> Call | None:
    layers = call["num_layer"]
    return {**call, "layer_idx": layers - 1 - call["layer_idx"]} if layers > 1 else None


def _another_layout(n: int) -> Mistake:
    """The bytes of the cache are read in the layout that is number n of the others."""

    def wrong(operator: Operator, call: Call, results: Results) -> Results | None:
        table = TABLES[operator.name]
        mine = table[call["cache_layout"]]
        other = {**call, "cache_layout": [layout for layout, axes in table.items() if axes != mine][n]}
        stored = {name: call[name] for name in ("cache", "scale") if name in call}
        for name, x in stored.items():
            sizes = dict(zip(mine, x.shape, strict=True))
            other[name] = x.reshape([sizes[axis] for axis in table[other["cache_layout"]]])
        found = operator.oracle(other)
        return {k: x.reshape(stored[k].shape) if k in stored else x for k, x in found.items()}

    text = "the cache is written in the axis order of another cache_layout"
    return Mistake("another cache_layout", text, wrong)


MISTAKES: Final = (
    by_call("heads in reverse", "the heads of the new tokens are in reverse order", _heads_reversed),
    by_call("transposed heads", "rows are read as [heads, tokens], they are [tokens, heads]",
            _heads_transposed),
    by_call("strides ignored", "an input is read as if it were contiguous", _strides_ignored),
    by_call("storage offset ignored", "an input is read from the start of its storage", _offset_ignored),
    by_call("slot off by one", "tokens are written one slot further on",
            changed("slot_mapping", lambda x, call: torch.where(x < 0, x, (x + 1) % _slots_of(call)))),
    by_call("negative slot wraps", "a negative slot, which skips its token, counts from the end",
            changed("slot_mapping", _slot_wraps)),
    by_call("negative slot is slot 0", "a negative slot, which skips its token, is taken for slot 0",
            changed("slot_mapping", lambda x, call: x.clamp(min=0))),
    by_call("only -1 is skipped", "any negative slot skips its token, others than -1 are taken for slots",
            changed("slot_mapping", lambda x, call: torch.where(x < -1, x % _slots_of(call), x))),
    by_call("only -1 is skipped", "any negative slot skips its token, others than -1 are taken for slot 0",
            changed("slot_mapping", lambda x, call: x.clamp(min=0).where(x < -1, x))),
    by_call("block and offset swapped", "slot // and % are taken by the number of blocks, not by their size",
            changed("slot_mapping", _block_and_offset_swapped)),
    by_call("off by one page", "tokens go to the next page of the table",
            changed("cachestarts", _next_column)),
    by_call("off by one page", "tokens go to the next page of the table",
            changed("block_table", _next_column)),
    by_call("off by one page", "tokens are read from the next page of the table",
            changed("block_tables", _next_column)),
    by_call("off by one page", "tokens go to the next page of the list",
            changed("kv_indices", lambda x, call: x.roll(-1))),
    by_call("start_pos ignored", "new tokens are written at the front of their sequence",
            changed("start_pos", zeroed)),
    Mistake("start_pos ignored", "new tokens are written at position 0", _static_start_ignored),
    by_call("position off by one", "new tokens are written one position late",
            lambda c: {**c, "start_pos": c["start_pos"] + 1}),
    by_call("position off by one", "new tokens are written one position late",
            changed("positions", lambda x, call: x + 1)),
    by_call("position off by one", "new tokens are written one position late",
            changed("past_seqlens", lambda x, call: x + 1)),
    by_call("position off by one", "new tokens are written one position early",
            changed("positions", lambda x, call: (x - 1).clamp(min=0))),
    by_call("layer_idx ignored", "layer 0 is written and read, whatever layer_idx says",
            set_to("layer_idx", 0)),
    by_call("layers in reverse", "layers are counted from the last one", _last_layer),
    *map(_another_layout, range(3)),
)  # fmt: skip
