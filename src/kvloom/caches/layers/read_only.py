"""Tensor subclasses for copies gathered from a cache: read-only, or written back when changed."""

from collections.abc import Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kvloom.errors import UnsupportedError

_WRITING_DUNDERS: Final = {"__setitem__", "__set__", "__delete__", "__ilshift__", "__irshift__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}

_OTHER_TENSORS: Final = {
    "__set__", "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_",
    "share_memory_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
}  # fmt: skip
"""Methods that change a tensor's shape or memory, not its elements."""


class ReadOnly(Tensor):
    """Gathered keys or values. Writing them would not change the cache, so it raises UnsupportedError.

    Tensors that share memory with one are read-only, too; results computed from it are ordinary tensors.
    ``clone`` it for one that can be written.

    Attributes:
        refusal: Error message: the reason, and what to do instead.
    """

    refusal = (
        "keys and values that were gathered from a cache cannot be changed in place, since that "
        "would not change the cache: clone them, and assign layer.keys or layer.values"
    )

    @classmethod
    def of(cls, x: Tensor) -> "ReadOnly":
        """Make a read-only tensor with the same memory."""
        return x.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            written = _written(func, args, kwargs)
            for x in written:
                x._expect_writable(func)
            memory = {x.untyped_storage().data_ptr(): x for x in inputs}
            result = func(*args, **kwargs)
            if func in (Tensor.numpy, Tensor.__array__):
                result.flags.writeable = False
            cls._write(written)

            def protected(x: Tensor) -> Tensor:
                source = memory.get(x.untyped_storage().data_ptr())
                is_other = source is None or isinstance(x, ReadOnly) or not x.numel()
                return x if source is None or is_other else source._protect(x)

            return pytree.tree_map_only(Tensor, protected, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain().clone()

    def _expect_writable(self, func: Any) -> None:
        """Raise UnsupportedError before a call writes this tensor."""
        raise UnsupportedError(self.refusal)

    @classmethod
    def _write(cls, written: Iterable["ReadOnly"]) -> None:
        """Hook after a call that wrote these tensors."""

    def _protect(self, x: Tensor) -> "ReadOnly":
        """Protect a tensor that shares memory with this one in the same way."""
        return self.of(x)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class Reading(Protocol):
    """Source of gathered keys or values, which takes changes back."""

    def expect_current(self) -> None:
        """Raise UnsupportedError if the layer no longer holds them, StateError if it cannot be changed."""

    def write(self) -> None:
        """Write the changed keys or values back to the layer."""


class WrittenBack(ReadOnly):
    """Gathered keys or values that are written back to their layer whenever they are changed in place.

    So a caller can treat them as the layer's own tensors.

    Attributes:
        refusal: Error message for calls that change more than elements.
        reading: Source that takes changes back.
    """

    refusal = (
        "keys and values that were gathered from a cache can be changed in place, but not their shape or "
        "memory: assign layer.keys or layer.values"
    )
    reading: Reading

    @classmethod
    def read(cls, x: Tensor, reading: Reading) -> "WrittenBack":
        """Make a tensor with the same memory that is written back to ``reading``."""
        result = x.as_subclass(cls)
        result.reading = reading
        return result

    def _expect_writable(self, func: Any) -> None:
        if str(getattr(func, "__name__", "")) in _OTHER_TENSORS:
            raise UnsupportedError(self.refusal)
        self.reading.expect_current()

    @classmethod
    def _write(cls, written: Iterable[ReadOnly]) -> None:
        for reading in dict.fromkeys(x.reading for x in written if isinstance(x, WrittenBack)):
            reading.write()

    def _protect(self, x: Tensor) -> ReadOnly:
        return self.read(x, self.reading)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ReadOnly]:
    """Find protected tensors that a call changes, by its name, its ``out`` or its ``inplace``."""
    name = str(getattr(func, "__name__", ""))
    if name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__")):
        targets: Any = args[:1]
    elif kwargs.get("inplace") is True:
        targets = (args[:1], kwargs.get("input"))
    else:
        targets = kwargs.get("out")
    return [x for x in pytree.tree_leaves(targets) if isinstance(x, ReadOnly)]
