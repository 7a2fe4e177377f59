"""Known mistakes that confuse keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.making import PAIRS, Change, Mistake, by_call, by_numbers, new_names
from kvloom.conform.oracles import pmx

Sides = Mapping[int, int | None]
"""Side to which keys (0) and values (1) are written, or from which they are read; ``None`` for none."""


def _swapped(call: Call) -> Call | None:
    a, b = new_names(call)
    return {**call, a: call[b], b: call[a]}


def _twice(which: int) -> Change:
    def change(call: Call) -> Call | None:
        pair = new_names(call)
        return {**call, pair[1 - which]: call[pair[which]]}

    return change


class _At(tuple[int, ...]):
    """Index of a head vector with its side, and the index on the other side."""

    side: int
    sides: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, axes: str, **coordinates: int) -> _At:
        at = cls(_INDEX(axes, **coordinates))
        at.side = coordinates["K"]
        at.sides = tuple(_INDEX(axes, **{**coordinates, "K": side}) for side in (0, 1))
        return at


_INDEX: Final = pmx.index_of
_STORE: Final = pmx.store_vector
_LOAD: Final = pmx.load_vector
AS_THEY_ARE: Final[Sides] = {0: 0, 1: 1}


def _planes(name: str, text: str, writes: Sides = AS_THEY_ARE, reads: Sides = AS_THEY_ARE) -> Mistake:
    """Mistake for PMX, whose caches have keys and values in one tensor."""

    def store(x: Tensor, cache: Tensor, scale: Tensor | None, at: _At, bit: int, group: int) -> None:
        side = writes[at.side]
        if side is not None:
            _STORE(x, cache, scale, at.sides[side], bit, group)

    def load(cache: Tensor, scale: Tensor | None, at: _At, *how: Any) -> Tensor:
        return _LOAD(cache, scale, at.sides[reads[at.side] or 0], *how)

    return by_numbers(name, text, pmx, index_of=_At.of, store_vector=store, load_vector=load)


def _written_over(side: int) -> Callable[[Operator, Call, Results], Results | None]:
    """Tokens of ``side`` are written to the slots of the other side, and not to their own."""

    def change(operator: Operator, call: Call, results: Results) -> Results | None:
        pair = new_names(call)
        if "paged_kv_cache" in results:
            pages = operator.oracle({**call, pair[1 - side]: call[pair[side]]})["paged_kv_cache"]
            pages[:, side] = call["paged_kv_cache"][:, side]
            return {"paged_kv_cache": pages}
        caches = [name for name in ("key_cache", "value_cache") if name in results]
        if len(caches) < 2 or call[pair[0]].shape != call[pair[1]].shape:
            return None
        found = operator.oracle({**call, pair[1 - side]: call[pair[side]]})
        return {caches[1 - side]: found[caches[1 - side]], caches[side]: call[caches[side]]}

    return change


def _read_from(order: tuple[int, int]) -> Change:
    """Mistake for GatherPaKvCache, which only reads."""

    def change(call: Call) -> Call | None:
        caches = call["key_cache"], call["value_cache"]
        if "block_tables" not in call or caches[0].shape != caches[1].shape:
            return None
        return {**call, "key_cache": caches[order[0]], "value_cache": caches[order[1]]}

    return change


def _zeros(sign: float) -> Change:
    """Zeros of new tokens all have one sign."""

    def change(call: Call) -> Call | None:
        new = {name: call[name] for pair in (*PAIRS, ("update",)) for name in pair if name in call}
        found: Call = {}
        for name, x in new.items():
            if isinstance(x, list):
                found[name] = [_zeros_of(each, sign) for each in x]
            elif x.is_floating_point():
                found[name] = _zeros_of(x, sign)
        return {**call, **found} if found else None

    return change


def _zeros_of(x: Tensor, sign: float) -> Tensor:
    return torch.where(x == 0, torch.full_like(x, sign * 0.0), x)


OVER: Final = ("values written over keys", "values are written to the slots of the keys, not to their own")
UNDER: Final = ("keys written over values", "keys are written to the slots of the values, not to their own")
OF_KEYS: Final = ("values read from the slots of keys", "the slots of the keys are read for both")
OF_VALUES: Final = ("keys read from the slots of values", "the slots of the values are read for both")
EXCHANGED: Final = (
    "exchanged when read",
    "keys are read from the slots of values, values from those of keys",
)
MISTAKES: Final = (
    by_call("value for key", "keys are stored where values belong and values where keys belong", _swapped),
    by_call("key stored twice", "the keys are stored for the values, too", _twice(0)),
    by_call("value stored twice", "the values are stored for the keys, too", _twice(1)),
    _planes(*OVER, writes={0: None, 1: 0}),
    _planes(*UNDER, writes={0: 1, 1: None}),
    _planes(*OF_KEYS, reads={0: 0, 1: 0}),
    _planes(*OF_VALUES, reads={0: 1, 1: 1}),
    _planes(*EXCHANGED, reads={0: 1, 1: 0}),
    _planes("keys and values in the same slots", "both are written to and read from the slots of the keys",
            writes={0: None, 1: 0}, reads={0: 0, 1: 0}),
    _planes("keys and values in the same slots", "both are written to and read from the slots of the values",
            writes={0: None, 1: 1}, reads={0: 1, 1: 1}),
    Mistake(*OVER, _written_over(1)),
    Mistake(*UNDER, _written_over(0)),
    by_call(*OF_KEYS, _read_from((0, 0))),
    by_call(*OF_VALUES, _read_from((1, 1))),
    by_call(*EXCHANGED, _read_from((1, 0))),
    by_call("0 for -0", "zeros lose their sign", _zeros(1.0)),
    by_call("-0 for 0", "zeros get a sign", _zeros(-1.0)),
)  # fmt: skip
