"""Known mistakes of ScatterPaKvCache and GatherPaKvCache."""

from typing import Final

from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.mistakes.making import by_call, by_numbers
from kvloom.conform.oracles import ascend

_PIECES: Final = ascend.pieces


def _first_kept(rule: str, length: int, win: int, off: int | None) -> list[ascend.Piece]:
    return [*range(win)] if rule == "Alibi" else _PIECES(rule, length, win, off)


def _tail_from_the_front(rule: str, length: int, win: int, off: int | None) -> list[ascend.Piece]:
    run = _PIECES(rule, length, win, off)
    if off is None or off in (-1, length) or win == 0:
        return run
    tail = length - off - win
    return [*run[: len(run) - tail], *range(tail)]


def _without_mean(rule: str, length: int, win: int, off: int | None) -> list[ascend.Piece]:
    return [piece for piece in _PIECES(rule, length, win, off) if isinstance(piece, int)]


def _sum_for_mean(rows: Tensor) -> Tensor:
    return rows.double().sum(0).to(rows.dtype)


def _kept_for_dropped(call: Call) -> Call | None:
    if "compress_seq_offset" in call:
        return None
    heads = call["key"].shape[-2]
    whole = call["seq_lens"].repeat_interleave(heads).reshape(call["compress_lens"].shape)
    return {**call, "compress_lens": (whole - call["compress_lens"]).clamp(min=0)}


MISTAKES: Final = (
    by_numbers("first tokens kept", "Alibi keeps the last tokens, these are the first ones", ascend,
               pieces=_first_kept),
    by_numbers("tail read from token 0", "tokens after the window are read from the front of the sequence",
               ascend, pieces=_tail_from_the_front),
    by_numbers("mean left out", "Rope writes the mean of the window between its parts", ascend,
               pieces=_without_mean),
    by_numbers("sum for mean", "the sum of the window is stored, not the mean", ascend, mean=_sum_for_mean),
    by_call("stride of keys for values", "Nct reads values by strides[0], they have strides[1]",
            lambda c: {**c, "strides": [c["strides"][0]] * 2}),
    by_call("offsets ignored", "Nct starts at offsets, not at 0",
            lambda c: {**c, "offsets": [0, 0]} if any(c["offsets"]) else None),
    by_call("kept for dropped", "compress_lens of Alibi is tokens kept, not dropped", _kept_for_dropped),
)  # fmt: skip
