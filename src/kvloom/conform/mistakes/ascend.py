"""Known mistakes of ScatterPaKvCache and GatherPaKvCache."""

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.mistakes.making import by_call, by_numbers
from kvloom.conform.oracles import ascend


def _pieces(how: str) -> Callable[[str, int, int, int | None], list[Any]]:
    def pieces(rule: str, length: int, win: int, off: int | None) -> list[Any]:
        if how == "first" and rule == "Alibi":
            return list(range(win))
        if rule == "Alibi" or off is None:
            return _PIECES(rule, length, win, off)
        whole = off == -1 or win == 0 or off == length
        if how == "tail from 0" and not whole:
            run: list[Any] = [*range(off), *([range(off, off + win)] if rule == "Rope" else [])]
            return run + list(range(length - off - win))
        if how == "no mean" and rule == "Rope" and not whole:
            return [*range(off), *range(off + win, length)]
        return _PIECES(rule, length, win, off)

    return pieces


_PIECES: Final = ascend.pieces


def _sum_for_mean(rows: Tensor) -> Tensor:
    return rows.double().sum(0).to(rows.dtype)


def _stride_of_keys(call: Call) -> Call | None:
    strides = call.get("strides")
    if not strides or strides[0] == strides[1]:
        return None
    return {**call, "strides": [strides[0], strides[0]]}


def _offsets_ignored(call: Call) -> Call | None:
    return {**call, "offsets": [0, 0]} if call.get("offsets") and any(call["offsets"]) else None


def _kept_for_dropped(call: Call) -> Call | None:
    if "compress_lens" not in call or "compress_seq_offset" in call:
        return None
    heads = call["key"].shape[-2]
    whole = call["seq_lens"].repeat_interleave(heads).reshape(call["compress_lens"].shape)
    return {**call, "compress_lens": (whole - call["compress_lens"]).clamp(min=0)}


MISTAKES: Final = (
    by_numbers("first tokens kept", "Alibi keeps the last tokens, these are the first ones", ascend,
               pieces=_pieces("first")),
    by_numbers("tail read from token 0", "tokens after the window are read from the front of the sequence",
               ascend, pieces=_pieces("tail from 0")),
    by_numbers("mean left out", "Rope writes the mean of the window between its parts", ascend,
               pieces=_pieces("no mean")),
    by_numbers("sum for mean", "the sum of the window is stored, not the mean", ascend, mean=_sum_for_mean),
    by_call("stride of keys for values", "Nct reads values by strides[0], they have strides[1]", 
            _stride_of_keys),
    by_call("offsets ignored", "Nct starts at offsets, not at 0", _offsets_ignored),
    by_call("kept for dropped", "compress_lens of Alibi is tokens kept, not dropped", _kept_for_dropped),
)  # fmt: skip
