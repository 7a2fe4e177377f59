"""Tensors that were made from a cache and are not part of it."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kvloom.errors import UnsupportedError

_WRITING_DUNDERS: Final = {"__setitem__", "__set__", "__delete__", "__ilshift__", "__irshift__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


class ReadOnly(Tensor):
    """Keys or values that were gathered for the caller. Writing them would change no cache, so that raises.

    What shares memory with one is one too; all that is computed from it is a tensor as any other. ``clone``
    it to have one that can be written.

    Attributes:
        refusal: Why it cannot be changed in place, and what to do instead.
    """

    refusal = (
        "keys and values that were gathered from a cache cannot be changed in place, since that "
        "would not change the cache: clone them, and assign layer.keys or layer.values"
    )

    @classmethod
    def of(cls, x: Tensor) -> "ReadOnly":
        """The same tensor, protected."""
        return x.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            if _writes(func, args, kwargs):
                raise UnsupportedError(cls.refusal)
            memory = {x.untyped_storage().data_ptr() for x in inputs}
            result = func(*args, **kwargs)
            if func in (Tensor.numpy, Tensor.__array__):
                result.flags.writeable = False
            return pytree.tree_map_only(
                Tensor,
                lambda x: cls.of(x) if x.untyped_storage().data_ptr() in memory and x.numel() else x,
                result,
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain().clone()

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes a protected tensor: by its name, its ``out`` or its ``inplace``."""
    name = str(getattr(func, "__name__", ""))
    if name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__")):
        targets: Any = args[:1]
    elif kwargs.get("inplace") is True:
        targets = (args[:1], kwargs.get("input"))
    else:
        targets = kwargs.get("out")
    return any(isinstance(x, ReadOnly) for x in pytree.tree_leaves(targets))
