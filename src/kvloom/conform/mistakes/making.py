"""The class of known mistakes, and two short ways to make one."""

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
"""The dialects of each oracle that mistakes take apart."""


PAIRS: Final = (
    ("current_key", "current_value"),
    ("key", "value"),
    ("append_key", "append_value"),
    ("K", "V"),
    ("key_states", "value_states"),
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake.

    Attributes:
        name: What a report calls it.
        text: One sentence that says what to look at.
        wrong: What it gives for a legal call that has all its attributes; it also gets a copy of the right
            results. ``None`` where it cannot be made.
    """

    name: str
    text: str
    wrong: Callable[[Operator, Call, Results], Results | None]


def by_call(name: str, text: str, change: Change) -> Mistake:
    """A mistake that is the right result of another call."""

    def wrong(operator: Operator, call: Call, results: Results) -> Results | None:
        changed = change(call)
        return None if changed is None else operator.oracle(changed)

    return Mistake(name, text, wrong)


def by_numbers(name: str, text: str, module: Any, **replaced: Any) -> Mistake:
    """A mistake in one step of the oracle's own arithmetic."""

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
