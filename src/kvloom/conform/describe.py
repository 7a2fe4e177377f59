"""Descriptions of operators as data: arguments, dtypes, symbolic shapes, rules; and checks of calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.conform.draw import Draw
from kvloom.core.specs import dtype_name

Call = dict[str, Any]
"""Arguments by name: tensors, lists of tensors, numbers and strings."""
Results = dict[str, Tensor]
"""Outputs and arguments that were updated, by name; ``name@padding`` marks elements that may also be 0."""
COMPARED: Final = {
    "bits": "by bits",
    "padded": "by bits; behind what is stored of a row, 0 is right, too",
    "values": "by bits, where every NaN is NaN",
    "close": "within a tolerance",
    "rounded": "within a tolerance, in its dtype",
}
"""Ways to compare a result, with descriptions."""
Spoil = Callable[[Call, Draw], Call]
"""Function that returns the changes that make a legal call one that must be refused."""

_NAMES: Final = {
    f.__name__: f for f in (max, min, sum, all, any, len, zip, range, abs, int, sorted, set, enumerate)
}
_ABSENT: Final = (NameError, IndexError, TypeError, ValueError)
"""Exceptions of a rule that names something that a call does not have."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Argument of an operator.

    Attributes:
        name: As in the document.
        shape: Axes, such as ``"B S H D"``: each a symbol, ``B+1``, a number, ``S?`` for S or 1, or ``_`` for
            any. Alternatives are separated by ``|``. ``None`` if it is no tensor. A mapping has the shape for
            each value of the attribute ``shape_of``.
        dtypes: Legal dtypes; ``=name`` is the dtype of another argument.
        is_updated: Whether the operator writes it in place.
        is_optional: Whether it may be ``None`` or missing.
        is_list: Whether it is a list of such tensors.
        is_input: Whether it is a number that is an input of the ONNX node.
        default: Default of an attribute; ``None`` if it is required.
        only: Legal values of an attribute, if they are few.
        low: Smallest legal value.
    """

    name: str
    shape: str | Mapping[Any, str] | None = None
    dtypes: str = ""
    shape_of: str = ""
    is_updated: bool = False
    is_optional: bool = False
    is_list: bool = False
    is_input: bool = False
    default: Any = None
    only: tuple[Any, ...] = ()
    low: float | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, or a list of them."""
        return self.shape is not None


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of an argument: ``holds``, an expression of symbols, attributes and index tensors, is true."""

    argument: str
    holds: str


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator of a standard.

    Attributes:
        name: Name of the dialect, as for ``kvloom conform --dialect``.
        document: Source of the description.
        arguments: Arguments in the order of the document.
        outputs: Outputs in order, each with its comparison (see ``how``) and its axes.
        rules: Constraints beyond shapes and dtypes.
        oracle: Function that returns the results of a legal call, which it does not change.
        draw: Function that draws a legal call, with a description.
        spoils: Changes that break a rule, by argument.
        count: Number of vectors in the published set.
        domain: Domain of its ONNX node; ``None`` if it has none.
        node_inputs: Inputs of that node, ``""`` for those not used here; in the order of arguments if empty.
        opset: Opset of its ONNX model.
    """

    name: str
    document: str
    arguments: tuple[Argument, ...]
    outputs: Mapping[str, str]
    oracle: Callable[[Call], Results]
    draw: Callable[[Draw], tuple[str, Call]]
    rules: tuple[Rule, ...] = ()
    spoils: tuple[tuple[str, Spoil], ...] = ()
    count: int = 100
    domain: str | None = None
    node_inputs: tuple[str, ...] = ()
    opset: int = 24
    compared: Mapping[str, str] = field(default_factory=dict)
    """Comparison of an updated argument; ``bits`` by default."""
    asked_by: Mapping[str, str] = field(default_factory=dict)
    """Argument of which a call that wants an optional output must give a value."""

    @property
    def node_type(self) -> str:
        """Type of its ONNX node: the name in camel case, without the number of an opset."""
        words = self.name.rpartition(".")[2].split("_")
        return "".join(word.title() for word in words if not word.isdigit())

    def wanted(self, call: Call) -> tuple[str, ...]:
        """Outputs that ``call`` asks for, in order."""
        return tuple(
            name
            for name in self.outputs
            if name not in self.asked_by or call.get(self.asked_by[name]) is not None
        )

    @property
    def updated(self) -> tuple[str, ...]:
        """Arguments that are written in place."""
        return tuple(a.name for a in self.arguments if a.is_updated)

    def how(self, result: str) -> str:
        """Comparison of ``result``: a key of ``COMPARED``."""
        name = result.split(".")[0]
        return self.outputs[name].split()[0] if name in self.outputs else self.compared.get(name, "bits")

    @property
    def axes(self) -> dict[str, str]:
        """Axes of each output."""
        return {name: text.partition(" ")[2] for name, text in self.outputs.items()}

    def complete(self, call: Call) -> Call:
        """``call`` with the defaults of omitted attributes."""
        defaults = {a.name: a.default for a in self.arguments if not a.is_tensor and a.default is not None}
        return {**defaults, **{name: x for name, x in call.items() if x is not None}}


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """Call of an operator, and its expected results.

    Attributes:
        name: ``DIALECT/NUMBER``.
        dialect: Name of its operator.
        about: Short description.
        call: Arguments by name.
        expected: Results by name; ``None`` for a call that must be refused.
        refused: Name of the wrong argument; ``""`` for a legal call.
    """

    name: str
    dialect: str
    about: str
    call: Call
    expected: Results | None
    refused: str = ""


def problems(operator: Operator, call: Call) -> list[tuple[str, str]]:
    """Problems of ``call``, as (argument, sentence)."""
    call = operator.complete(call)
    found, symbols = _argument_problems(operator, call)
    if found:
        return found
    scope = _scope(operator, call, symbols)
    for rule in operator.rules:
        if not _holds(rule.holds, scope):
            return [(rule.argument, f"must be such that {rule.holds}")]
    return []


def result_shape(operator: Operator, result: str, call: Call) -> list[int] | None:
    """Shape of an output, by its axes; ``None`` if the arguments do not determine it."""
    call = operator.complete(call)
    scope = _scope(operator, call, _argument_problems(operator, call)[1])
    forms = sorted((form.split() for form in operator.axes[result].split("|")), key=len, reverse=True)
    for form in forms:
        try:
            return [int(eval(axis, scope)) for axis in form]  # text of this package
        except _ABSENT:
            continue
    return None


def _argument_problems(operator: Operator, call: Call) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Problems of single arguments, and the sizes of symbols."""
    known = {a.name for a in operator.arguments}
    found = [(name, "is no argument of this operator") for name in call if name not in known]
    symbols: dict[str, int] = {}
    for argument in operator.arguments:
        x = call.get(argument.name)
        if x is None:
            if not argument.is_optional and (argument.is_tensor or argument.default is None):
                found.append((argument.name, "must be given"))
        elif argument.is_tensor:
            for each in x if argument.is_list and isinstance(x, list) else [x]:
                found += [(argument.name, text) for text in _tensor_problems(argument, each, call, symbols)]
        else:
            found += [(argument.name, text) for text in _attribute_problems(argument, x)]
    return found, symbols


def _scope(operator: Operator, call: Call, symbols: dict[str, int]) -> dict[str, Any]:
    """Names that rules and axes may use, with their values."""
    values = {
        name: x.tolist() if isinstance(x, Tensor) and not x.is_floating_point() and x.numel() < 4096 else x
        for name, x in call.items()
    }
    return {**{a.name: None for a in operator.arguments}, **values, **symbols, "__builtins__": _NAMES}


def _holds(text: str, scope: dict[str, Any]) -> bool:
    try:
        return bool(eval(text, scope))  # text of this package
    except _ABSENT:
        return False


def _tensor_problems(argument: Argument, x: object, call: Call, symbols: dict[str, int]) -> list[str]:
    if not isinstance(x, Tensor):
        return [f"must be a tensor, got {type(x).__name__}"]
    dtypes = {
        dtype_name(call[word[1:]].dtype)
        if word[0] == "=" and isinstance(call.get(word[1:]), Tensor)
        else word
        for word in argument.dtypes.split()
    }
    if dtype_name(x.dtype) not in dtypes:
        return [f"must be {' or '.join(sorted(dtypes))}, got {dtype_name(x.dtype)}"]
    shape = argument.shape
    if isinstance(shape, Mapping):
        shape = shape.get(call.get(argument.shape_of), "")
    forms = [form.split() for form in (shape or "").split("|")]
    fitting = [form for form in forms if len(form) == x.ndim]
    if not fitting:
        return [f"must be [{shape}], got {list(x.shape)}"]
    for letter, extent in zip(fitting[0], x.shape, strict=True):
        if letter == "_" or (letter.endswith("?") and extent == 1):
            continue
        name, _, more = letter.removesuffix("?").partition("+")
        plus = int(more or 0)
        wanted = int(name) if name.isdigit() else symbols.setdefault(name, extent - plus) + plus
        if wanted != extent:
            return [f"must be [{shape}] with {letter} = {wanted}, got {list(x.shape)}"]
    return []


def _attribute_problems(argument: Argument, x: object) -> list[str]:
    if argument.only:
        return [] if x in argument.only else [f"must be one of {list(argument.only)}, got {x!r}"]
    if argument.low is not None and (not isinstance(x, int | float) or x < argument.low):
        return [f"must be at least {argument.low}, got {x!r}"]
    return []


def bad_calls(operator: Operator, call: Call, draw: Draw) -> list[tuple[str, str, Call]]:
    """Calls like ``call`` that must be refused: description, argument and call of each."""
    tried: list[tuple[str, str, Call]] = []
    for argument in operator.arguments:
        x, name = call.get(argument.name), argument.name
        if argument.is_tensor and isinstance(x, Tensor):
            tried.append(("has one axis more", name, {**call, name: x.unsqueeze(0)}))
            tried.append(("is float64", name, {**call, name: x.double()}))
            for axis in range(x.ndim):
                wider = torch.cat((x, x.narrow(axis, 0, min(1, x.shape[axis]))), dim=axis)
                tried.append((f"is longer by one on axis {axis}", name, {**call, name: wider}))
        elif argument.only:
            tried.append(("has a value of none", name, {**call, name: _none_of(argument.only)}))
        elif argument.low is not None:
            tried.append(("is less than its least value", name, {**call, name: argument.low - 1}))
        if not argument.is_optional and argument.default is None and name in call:
            tried.append(("is missing", name, {k: v for k, v in call.items() if k != name}))
    for name, spoil in operator.spoils:
        tried.append(("breaks a rule", name, {**call, **spoil(call, draw)}))
    return [each for each in tried if problems(operator, each[2])]


def _none_of(values: tuple[Any, ...]) -> Any:
    return max(values) + 5 if all(isinstance(v, int) for v in values) else "nonsense"


def describe_tensor(x: Tensor) -> str:
    """Describe a tensor, such as ``float16 [2, 3]``."""
    return f"{dtype_name(x.dtype)} {list(x.shape)}"
