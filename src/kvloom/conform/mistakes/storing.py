"""Known mistakes of slots, layers and layouts, and of the strides of inputs."""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.leaving import TABLES
from kvloom.conform.mistakes.making import PAIRS, Change, Mistake, by_call, changed


def _heads_reversed(call: Call) -> Call | None:
    for pair, axis in ((("current_key", "current_value"), -2), (("key", "value"), -2),
                       (("append_key", "append_value"), -2), (("K", "V"), 1)):  # fmt: skip
        x = call.get(pair[0])
        if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[axis] > 1:
            return {**call, **{name: call[name].flip(axis) for name in pair if name in call}}
    return None


def _heads_transposed(call: Call) -> Call | None:
    """Tokens and heads of the new rows are read in the other order."""
    for pair in PAIRS[:3]:
        x = call.get(pair[0])
        if isinstance(x, Tensor) and x.ndim >= 3 and x.shape[-2] > 1 and x.shape[-3] > 1:

            def other(y: Tensor) -> Tensor:
                return (
                    y.contiguous()
                    .view(*y.shape[:-3], y.shape[-2], y.shape[-3], y.shape[-1])
                    .transpose(-3, -2)
                )

            return {**call, **{name: other(call[name]) for name in pair if name in call}}
    return None


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


def _start_ignored(call: Call) -> Call | None:
    start = call.get("start_pos")
    if isinstance(start, Tensor) and bool(start.any()):
        return {**call, "start_pos": torch.zeros_like(start)}
    return None


def _start_later(call: Call) -> Call | None:
    start = call.get("start_pos")
    return {**call, "start_pos": start + 1} if isinstance(start, Tensor | int) else None


def _static_start_ignored(operator: Operator, call: Call, results: Results) -> Results | None:
    start = call.get("start_pos")
    if not isinstance(start, int) or start == 0:
        return None
    at_zero = operator.oracle({**call, "start_pos": 0})
    return {**results, **{k: at_zero[k] for k in ("cache", "scale") if k in at_zero}}


def _layer_zero(call: Call) -> Call | None:
    return {**call, "layer_idx": 0} if call.get("layer_idx") else None


def _last_layer(call: Call) -> Call | None:
    layers, layer = call.get("num_layer", 1), call.get("layer_idx", 0)
    return {**call, "layer_idx": layers - 1 - layer} if layers > 1 else None


def _column(name: str, by: int) -> Change:
    def changed(call: Call) -> Call | None:
        x = call.get(name)
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] < 2:
            return None
        return {**call, name: x.roll(by, dims=1)}

    return changed


def _layout_confused(operator: Operator, call: Call) -> Iterator[Results]:
    """The bytes of the cache are read in another layout."""
    table = TABLES.get(operator.name)
    if table is None:
        return
    mine = table[call["cache_layout"]]
    for layout, axes in table.items():
        if axes == mine:
            continue
        other = {**call, "cache_layout": layout}
        for name in ("cache", "scale"):
            x = call.get(name)
            if x is not None:
                sizes = dict(zip(mine, x.shape, strict=True))
                other[name] = x.reshape([sizes[axis] for axis in axes])
        found = operator.oracle(other)
        yield {k: x.reshape(call[k].shape) if k in ("cache", "scale") else x for k, x in found.items()}


def wrong_layouts() -> list[Mistake]:
    """Mistakes for each other number that a layout may be confused with."""

    def nth(n: int) -> Callable[[Operator, Call, Results], Results | None]:
        return lambda operator, call, results: next(
            (x for i, x in enumerate(_layout_confused(operator, call)) if i == n), None
        )

    text = "the cache is written in the axis order of another cache_layout"
    return [Mistake("another cache_layout", text, nth(n)) for n in range(3)]


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
    by_call("off by one page", "tokens go to the next page of the table", _column("cachestarts", -1)),
    by_call("off by one page", "tokens go to the next page of the table", _column("block_table", -1)),
    by_call("off by one page", "tokens are read from the next page of the table",
            _column("block_tables", -1)),
    by_call("off by one page", "tokens go to the next page of the list",
            changed("kv_indices", lambda x, call: x.roll(-1))),
    by_call("start_pos ignored", "new tokens are written at the front of their sequence", _start_ignored),
    Mistake("start_pos ignored", "new tokens are written at position 0", _static_start_ignored),
    by_call("position off by one", "new tokens are written one position late", _start_later),
    by_call("position off by one", "new tokens are written one position late",
            changed("positions", lambda x, call: x + 1)),
    by_call("position off by one", "new tokens are written one position late",
            changed("past_seqlens", lambda x, call: x + 1)),
    by_call("position off by one", "new tokens are written one position early",
            changed("positions", lambda x, call: (x - 1).clamp(min=0))),
    by_call("layer_idx ignored", "layer 0 is written and read, whatever layer_idx says", _layer_zero),
    by_call("layers in reverse", "layers are counted from the last one", _last_layer),
    *wrong_layouts(),
)  # fmt: skip
