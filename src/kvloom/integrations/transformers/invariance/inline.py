"""Batch invariance of experts, routers and gates, which call matrix products and activations as functions.

Within their forward a torch function mode replaces these calls by functions whose results do not depend on
the number of rows. It costs about a microsecond per torch call, so linear layers and activations that are
modules get other classes instead.

Shapes: M rows, K inputs, N outputs, E experts.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kvloom.integrations.transformers.invariance.elementwise import elementwise
from kvloom.integrations.transformers.invariance.rules import Product, linear, matmul, rule_of

_within = local()
"""Whether a thread computes a module within ``invariant_calls``."""


@contextmanager
def invariant_calls() -> Iterator[None]:
    """Context in which functions of torch give a row the same bits among any other rows."""
    if getattr(_within, "it", False):  # a second mode would replace the calls of the first
        yield
        return
    _within.it = True
    try:
        with _Calls():
            yield
    finally:
        _within.it = False


class _Calls(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        invariant = _INVARIANT.get(func)
        if invariant is None:
            return func(*args, **(kwargs or {}))
        return invariant(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(input, weight, bias, linear)


def _rows_by(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows ``[..., K]`` times a matrix ``[K, N]``."""
    return _product(rows, matrix.t(), bias, matmul)


def _product(
    input: Tensor, weight: Tensor, bias: Tensor | None, prepare: Callable[[Tensor, Tensor | None], Product]
) -> Tensor:
    rule = rule_of(weight, bias, prepare)
    product, rows = prepare(weight, bias), input.reshape(-1, input.shape[-1])
    return rule.apply(product, rows).view(*input.shape[:-1], weight.shape[0])


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """Products of rows by a matrix, or of matrices by as many matrices."""
    if other.dim() == 2 and input.dim() >= 2:
        return _rows_by(input, other)
    if input.dim() == other.dim() == 3 and input.shape[0] == other.shape[0]:
        return _bmm(input, other)
    return torch.matmul(input, other)


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    return _rows_by(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Tensor:
    if kwargs or input.dim() != 1:
        return torch.addmm(input, mat1, mat2, **kwargs)
    return _rows_by(mat1, mat2, input)


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """Matrices ``[E, M, K]`` times ``[E, K, N]``, one by one, since batched products use other kernels.

    Matrices times vectors are sums over K, each in an order of its own length.
    """
    if not input.shape[0]:
        return torch.bmm(input, mat2)
    if mat2.shape[2] == 1:  # as many as recurrent states have heads
        dtype = torch.promote_types(input.dtype, torch.float32)
        products = input.to(dtype) * mat2.transpose(1, 2).to(dtype)
        return products.sum(-1, keepdim=True).to(input.dtype)
    return torch.stack([_rows_by(rows, matrix) for rows, matrix in zip(input, mat2, strict=True)])


def _grouped_mm(input: Tensor, mat2: Tensor, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """Groups of rows ``[M, K]``, which end at ``offs`` ``[E]``, times ``[E, K, N]``."""
    if offs is None or input.dim() != 2 or mat2.dim() != 3 or any(x is not None for x in kwargs.values()):
        result: Tensor = torch._grouped_mm(input, mat2, offs, **kwargs)
        return result
    out, start = input.new_zeros(input.shape[0], mat2.shape[2]), 0
    for matrix, end in zip(mat2, offs.tolist(), strict=True):
        if end > start:
            out[start:end] = _rows_by(input[start:end], matrix)
        start = end
    return out


_ELEMENTWISE: Final = (
    F.silu,
    F.gelu,
    F.softplus,
    F.mish,
    F.sigmoid,
    torch.sigmoid,
    torch.Tensor.sigmoid,
    torch.exp2,
    torch.Tensor.exp2,
)
_INVARIANT: Final[dict[Any, Callable[..., Tensor]]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch._grouped_mm: _grouped_mm,
    **{function: partial(elementwise, function) for function in _ELEMENTWISE},
}
INLINE: Final = frozenset(getattr(function, "__name__", "") for function in _INVARIANT)
"""Names by which code calls these functions."""
