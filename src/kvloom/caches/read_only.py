"""Tensors that were made from a cache and are not part of it."""

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
"""Methods that change what a tensor is and not the numbers in it."""


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
        """Pass on what a call wrote to these."""

    def _protect(self, x: Tensor) -> "ReadOnly":
        """A tensor that shares memory with this one."""
        return self.of(x)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class Reading(Protocol):
    """Keys or values as they were read from a layer."""

    def expect_current(self) -> None:
        """Raise UnsupportedError if the layer no longer holds them, StateError if it cannot be changed."""

    def write(self) -> None:
        """Let the layer hold what they are now."""


class WrittenBack(ReadOnly):
    """Keys or values that were gathered for the caller, which a layer takes back whenever they are changed.

    So changing them in place changes the layer, as where they are its own tensors.

    Attributes:
        refusal: As of ``ReadOnly``, for calls that change more than numbers.
        reading: What takes them back.
    """

    refusal = (
        "keys and values that were gathered from a cache can be changed in place, but not their shape or "
        "memory: assign layer.keys or layer.values"
    )
    reading: Reading

    @classmethod
    def read(cls, x: Tensor, reading: Reading) -> "WrittenBack":
        """The same tensor, which is written back to what was read."""
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
    """Protected tensors that a call changes: by its name, its ``out`` or its ``inplace``."""
    name = str(getattr(func, "__name__", ""))
    if name in _WRITING_DUNDERS or (name.endswith("_") and not name.endswith("__")):
        targets: Any = args[:1]
    elif kwargs.get("inplace") is True:
        targets = (args[:1], kwargs.get("input"))
    else:
        targets = kwargs.get("out")
    return [x for x in pytree.tree_leaves(targets) if isinstance(x, ReadOnly)]
