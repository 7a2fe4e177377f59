"""Class of known mistakes, and two functions to make one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

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


@dataclass(frozen=True, slots=True)
class Mistake:
    """Known mistake.

    Attributes:
        name: Name in reports.
        text: One sentence that says what to look at.
        wrong: Function that returns the wrong results of a legal call with all its attributes, given also a
            copy of the right results; ``None`` if the mistake does not apply.
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


def changed(name: str, change: Callable[[Tensor, Call], Tensor]) -> Change:
    def changed(call: Call) -> Call | None:
        x = call.get(name)
        return None if not isinstance(x, Tensor) or x.numel() == 0 else {**call, name: change(x, call)}

    return changed


def set_to(name: str, value: Any) -> Change:
    return lambda call: {**call, name: value} if name in call and call[name] is not value else None


def without(name: str) -> Change:
    return lambda call: {k: x for k, x in call.items() if k != name} if call.get(name) is not None else None
