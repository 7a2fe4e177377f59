"""``LazyTensor``: an object that becomes a tensor when torch computes with it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors of several dtypes in that of ``torch.autocast``, in which attention computes; else as they are.

    Under autocast RoPE leaves queries and keys in float32 beside values in its dtype.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == dtype else x.to(dtype) for x in tensors)


class LazyTensor:
    """Placeholder of a tensor, replaced by the tensor wherever torch computes with it.

    It is no ``ABC``, since ``isinstance(x, LazyTensor)`` in each layer would take longer.
    """

    def gather(self) -> Tensor:
        """The tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(
            lambda x: x.gather() if isinstance(x, LazyTensor) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up before there are attributes, as by ``copy``
            raise AttributeError(name)
        return getattr(self.gather(), name)


def _operator(name: str) -> Any:
    def call(self: LazyTensor, *args: Any) -> Any:
        return getattr(self.gather(), name)(*args)

    return call


# Python looks operators up in the class, where ``__getattr__`` does not apply.
for _name in (
    "getitem", "len", "iter", "neg", "invert", "add", "sub", "mul", "truediv", "matmul", "and", "or",
    "radd", "rsub", "rmul", "rtruediv", "rmatmul", "rand", "ror", "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))
