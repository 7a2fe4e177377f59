"""What a known mistake is, and three ways to make one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.vectors import Vector

Change = Callable[[Call], Call | None]


PAIRS: Final = (
    ("current_key", "current_value"),
    ("key", "value"),
    ("append_key", "append_value"),
    ("K", "V"),
    ("key_states", "value_states"),
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: a name, one sentence that says what to look at, and what it gives."""

    name: str
    text: str
    wrong: Callable[[Operator, Vector], Results | None]


def by_call(name: str, text: str, change: Change) -> Mistake:
    """A mistake that is the right result of another call."""

    def wrong(operator: Operator, vector: Vector) -> Results | None:
        changed = change(dict(vector.call))
        return None if changed is None else operator.oracle(changed)

    return Mistake(name, text, wrong)


def by_numbers(name: str, text: str, module: Any, **replaced: Any) -> Mistake:
    """A mistake in one step of the oracle's own arithmetic."""

    def wrong(operator: Operator, vector: Vector) -> Results | None:
        with mock.patch.multiple(module, **replaced):
            return operator.oracle(vector.call)

    return Mistake(name, text, wrong)


def by_results(
    name: str, text: str, change: Callable[[Operator, Vector, Results], Results | None]
) -> Mistake:
    """A mistake in the results."""

    def wrong(operator: Operator, vector: Vector) -> Results | None:
        return change(operator, vector, {k: x.clone() for k, x in (vector.expected or {}).items()})

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
