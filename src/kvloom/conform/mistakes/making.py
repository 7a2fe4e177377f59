"""Class of known mistakes, and functions to make one.

A mistake names what it changes in a call. A call without that raises ``KeyError``, as which
``Mistake.wrong`` says that the mistake does not apply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.oracles import ascend, attending, pmx, recurrent

Change = Callable[[Call], Call | None]
_JUDGED_BY: Final[dict[Any, tuple[str, ...]]] = {
    pmx: ("pmx.", "opmx."),
    ascend: ("ascend.",),
    attending: ("onnx.attention", "microsoft.group_query"),
    recurrent: ("onnx.linear_attention", "onnx.causal_conv"),
}
"""Dialects of each oracle whose functions mistakes replace."""


PAIRS: Final = (
    ("current_key", "current_value"),
    ("key", "value"),
    ("append_key", "append_value"),
    ("K", "V"),
    ("key_states", "value_states"),
)
"""Names of new keys and values."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Known mistake.

    Attributes:
        name: Name in reports.
        text: One sentence that says what to look at.
        wrong: Function that returns the wrong results of a legal call with all its attributes, given also a
            copy of the right results. ``None``, or any error, if the mistake does not apply.
    """

    name: str
    text: str
    wrong: Callable[[Operator, Call, Results], Results | None]


def by_call(name: str, text: str, change: Change) -> Mistake:
    """Make a mistake whose results are right for another call."""

    def wrong(operator: Operator, call: Call, results: Results) -> Results | None:
        changed = change(call)
        return None if changed is None else operator.oracle(changed)

    return Mistake(name, text, wrong)


def by_numbers(name: str, text: str, module: Any, **replaced: Any) -> Mistake:
    """Make a mistake by replacing functions of an oracle's module."""

    def wrong(operator: Operator, call: Call, results: Results) -> Results | None:
        if not operator.name.startswith(_JUDGED_BY[module]):
            return None
        with mock.patch.multiple(module, **replaced):
            return operator.oracle(call)

    return Mistake(name, text, wrong)


def new_names(call: Call) -> list[str]:
    """Names of the new keys of a call and, if it has them, of the values."""
    pair = next(pair for pair in PAIRS if pair[0] in call)
    return [name for name in pair if name in call]


def changed(name: str, change: Callable[[Tensor, Call], Tensor]) -> Change:
    return lambda call: {**call, name: change(call[name], call)} if call[name].numel() else None


def zeroed(x: Tensor, call: Call) -> Tensor:
    """Change to zeros."""
    return torch.zeros_like(x)


def set_to(name: str, value: Any) -> Change:
    return lambda call: {**call, name: value} if call[name] is not value else None


def without(name: str) -> Change:
    return lambda call: {k: x for k, x in call.items() if k != name} if name in call else None
