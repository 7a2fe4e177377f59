"""Classes of batch invariant layers, which give a row the same bits among any other rows.

They are subclasses of the layers' original classes and have the same weights, so ``isinstance(layer,
nn.Linear)`` stays true. In graphs that torch compiles they compute like their parents.

Shapes: M rows, K inputs, N outputs.
"""

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvloom.integrations.transformers.invariance.elementwise import elementwise
from kvloom.integrations.transformers.invariance.inline import INLINE, invariant_calls
from kvloom.integrations.transformers.invariance.rules import Product, RowRule, linear, matmul

_LIBRARY: Final = ("torch.", "transformers.modeling_", "transformers.utils.", "transformers.generation.")
"""Python modules of base classes whose code computes nothing itself."""
_ACTIVATIONS: Final = ("torch.nn.modules.activation", "transformers.activations")


class Invariant:
    """Mixin of the classes that layers are changed into.

    Attributes:
        original: The layer's original class.
        numerics: Word for the change of its results.
    """

    original: type[nn.Module]
    numerics: str = "batch invariant"


class InvariantRows(Invariant):
    """A linear layer whose rows are padded by its ``row_rule``."""

    row_rule: RowRule

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        product: Product = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return product(input)
        out = self.row_rule.apply(product, input.reshape(-1, input.shape[-1]))
        return out.view(*input.shape[:-1], out.shape[-1])


class InvariantLinear(InvariantRows, nn.Linear):
    original = nn.Linear


class InvariantConv1D(InvariantRows, Conv1D):  # type: ignore[misc]
    original = Conv1D


class InvariantActivation(Invariant):
    """An elementwise module, computed by ``elementwise``."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Result for an input of any shape, with the same shape."""
        function = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            result: Tensor = function(input, *args, **kwargs)
            return result
        return elementwise(function, input, *args, **kwargs)


class InvariantModule(Invariant):
    """A module that calls products and activations as functions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's forward within ``invariant_calls``."""
        forward = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with invariant_calls():
            return forward(*args, **kwargs)


class InvariantConvolution(Invariant):
    """A module that keeps the states of a convolution alone, whose result may lie in memory by channels.

    It does so for several tokens and not for one, and sums over channels have other bits in other orders.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's result, in the usual order."""
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        return out.contiguous() if isinstance(out, Tensor) else out


LINEAR: Final = {nn.Linear: (InvariantLinear, linear), Conv1D: (InvariantConv1D, matmul)}
"""For each class of linear layers, its batch invariant class and its product."""


def matrix_of(layer: Any) -> Tensor:
    """The weight of a linear layer, ``[N, K]``."""
    weight: Tensor = layer.weight
    return weight.t() if isinstance(layer, Conv1D) else weight


def invariant_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The batch invariant class for a class of layers that are not linear; ``None`` if none is needed."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _make_class(kind)
    return _CLASSES[kind]


_CLASSES: Final[dict[type[nn.Module], type[nn.Module] | None]] = {}


def _make_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    is_activation = kind.__module__ in _ACTIVATIONS and kind is not nn.MultiheadAttention
    is_own_linear = issubclass(kind, nn.Linear)  # it may call the product as an operator
    if kind.__module__.startswith("torch.") and not is_activation:
        return None
    names = _names(kind)
    is_recurrent = (
        "update_recurrent_state" in names
    )  # its recurrence is in functions, which may call products
    is_convolution = "update_conv_state" in names and not is_recurrent
    if not (is_own_linear or is_convolution or is_recurrent) and INLINE.isdisjoint(names):
        return None
    mixin: type[Invariant] = InvariantModule
    if is_activation:
        mixin = InvariantActivation
    elif is_convolution and INLINE.isdisjoint(names):
        mixin = InvariantConvolution
    # It has the name of its kind, which errors say, and which transformers saves as the model's architecture.
    members = {"original": kind, "__reduce_ex__": _reduce, "__module__": kind.__module__}
    return type(kind.__name__, (mixin, kind), members)


def _names(kind: type) -> set[str]:
    """Names that the code of a class refers to, without code that it inherits from libraries."""
    names: set[str] = set()
    for owner in kind.__mro__:
        if owner is kind or not f"{owner.__module__}.".startswith(_LIBRARY):
            for member in vars(owner).values():
                names.update(*map(names_in, _codes(member)))
    return names


def computes_attention(kind: type[nn.Module]) -> bool:
    """Whether a class of layers stores keys in a cache and attends to them by code of its own."""
    names = _names(kind)
    return "update" in names and not {"ALL_ATTENTION_FUNCTIONS", "get_interface"} & names


def _codes(member: Any) -> Iterator[CodeType]:
    function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else member
    if isinstance(function, FunctionType):
        yield function.__code__


@functools.lru_cache(8192)  # code does not change, and to read it takes a millisecond
def names_in(code: CodeType) -> frozenset[str]:
    """Names that code and the functions in it refer to; the operator ``@`` counts as ``matmul``."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    products = (x for x in dis.get_instructions(code) if "MATRIX_MULTIPLY" in x.opname or x.argrepr == "@")
    return frozenset(code.co_names).union(*map(names_in, inner), ("matmul" for _ in products))


def _reduce(self: Any, _protocol: Any) -> tuple[Any, ...]:
    """Reduction for ``copy`` and ``pickle``, which cannot import a class that is made here."""
    return _new, (type(self).original,), vars(self)


def _new(kind: type[nn.Module]) -> nn.Module:
    made = invariant_class(kind) or kind
    return made.__new__(made)
