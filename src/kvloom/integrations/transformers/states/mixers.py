"""Mixers, the modules that keep recurrent states in a cache: hooks on their calls, and their arguments.

Shapes: B rows, T new tokens of each.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import cache as cached
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch

_METHODS: Final = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
"""Methods of a cache; a module that calls one of them is a mixer."""
_STATES: Final = {"conv_states", "recurrent_states"}
"""Attributes of a layer; a module that reads them directly is no mixer, since the cache cannot notice it."""
_TOKENS: Final = {"position_ids": -1, "cache_position": 0}
"""Axis of the tokens, of arguments for which it is not 1."""
_HIDDEN: Final = "hidden_states"


class CacheOfMixers(ABC):
    """Base of caches that are no subclass of transformers' ``Cache`` and record the calls of mixers."""

    @property
    @abstractmethod
    def recording(self) -> Any:
        """Object whose ``before`` and ``after`` are called around each mixer; ``None`` for none."""


class _Cache:
    """Placeholder of the cache in kept arguments."""


class Inputs(NamedTuple):
    """Arguments of a call of a mixer.

    Attributes:
        name: Name of the mixer's class.
        args: Positional arguments, with ``_Cache`` in the place of the cache.
        kwargs: Keyword arguments, likewise.
        num_tokens: T.
        device: Type of the device.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_tokens: int
    device: str

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Inputs":
        """Arguments of a call, whose tensors are not copied yet.

        Raises:
            UnsupportedError: they have no hidden states.
        """
        hidden = kwargs.get(_HIDDEN, args[0] if args else None)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise UnsupportedError(f"{type(module).__name__} must be given {_HIDDEN} [B, T, C] first")
        inputs = cls(type(module).__name__, args, kwargs, hidden.shape[1], hidden.device.type)
        return inputs._mapped(lambda _, x: _Cache() if isinstance(x, (Cache, CacheOfMixers)) else x)

    def copied(self) -> "Inputs":
        """Arguments with copied tensors, which no forward changes."""
        return self._mapped(lambda _, x: x.detach().clone() if isinstance(x, Tensor) else x)

    def cut(self, start: int, end: int) -> "Inputs":
        """Arguments of the tokens ``start`` to ``end`` alone.

        Raises:
            UnsupportedError: an argument cannot be cut.
        """
        return self._mapped(lambda name, x: self._cut(name, x, start, end))._replace(num_tokens=end - start)

    def pieces(self, num_first: int) -> "tuple[Inputs, Inputs] | None":
        """Arguments of the first tokens and of the rest; ``None`` if an argument cannot be cut."""
        try:
            return self.cut(0, num_first), self.cut(num_first, self.num_tokens)
        except UnsupportedError:
            return None

    def rows(self, index: Tensor) -> "Inputs":
        """Arguments of some tokens of one row, arranged as several rows.

        Args:
            index: ``[B, N]``, the N tokens of each of B rows.

        Raises:
            UnsupportedError: an argument cannot be cut.
        """
        picked = self._mapped(lambda name, x: self._picked(name, x, index))
        return picked._replace(num_tokens=index.shape[1])

    def without(self, names: Collection[str]) -> "Inputs":
        """Arguments without the keyword arguments ``names``."""
        return self._replace(kwargs={name: x for name, x in self.kwargs.items() if name not in names})

    def given(self, cache: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with ``cache`` in the place of the cache."""
        inputs = self._mapped(lambda _, x: cache if isinstance(x, _Cache) else x)
        return inputs.args, inputs.kwargs

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        found = list[int]()
        self._mapped(lambda _, x: found.append(x.nbytes) if isinstance(x, Tensor) else None)
        return sum(found)

    def _mapped(self, change: Callable[[str, Any], Any]) -> "Inputs":
        args = tuple(_mapped(f"argument {i}", x, change) for i, x in enumerate(self.args))
        return self._replace(
            args=args, kwargs={name: _mapped(name, x, change) for name, x in self.kwargs.items()}
        )

    def _cut(self, name: str, x: Any, start: int, end: int) -> Any:
        if x is None or isinstance(x, (bool, int, float, str, _Cache)):
            return x
        axis = _TOKENS.get(name, 1)
        if isinstance(x, Tensor) and abs(axis) < x.ndim <= 3 and x.shape[axis] == self.num_tokens:
            return x.narrow(axis, start, end - start)
        raise self._uncut(name, x)

    def _picked(self, name: str, x: Any, index: Tensor) -> Any:
        if x is None or isinstance(x, (bool, int, float, str, _Cache)):
            return x
        axis = _TOKENS.get(name, 1)
        if not isinstance(x, Tensor) or not 1 < x.ndim <= 3 or axis == 0:
            raise self._uncut(name, x)
        axis %= x.ndim
        if x.shape[axis - 1 : axis + 1] != (1, self.num_tokens):
            raise self._uncut(name, x)
        return x.index_select(axis, index.flatten()).squeeze(axis - 1).unflatten(axis - 1, index.shape)

    def _uncut(self, name: str, x: Any) -> UnsupportedError:
        what = f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        return UnsupportedError(
            f"{self.name} was given {name} {what}, which cannot be cut to fewer than {self.num_tokens} tokens"
        )


def _mapped(name: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_mapped(name, x, change) for x in value)
    return change(name, value)


def joined(name: str, first: Any, rest: Any) -> Any:
    """The output of a mixer, joined from its calls with the first tokens and with the rest."""
    if isinstance(first, Tensor):
        return torch.cat([first, rest], 1)
    if first is None and rest is None:
        return None
    if isinstance(first, tuple):
        return tuple(joined(name, *pair) for pair in zip(first, rest, strict=True))
    raise UnsupportedError(f"{name} returns {type(first).__name__}, which cannot be joined of two pieces")


def watch_mixers(model: nn.Module) -> None:
    """Register hooks by which caches see each call of a model and of its mixers; once for all caches."""
    for module in model.modules():
        kind: Any = type(module)
        if isinstance(module, PreTrainedModel) and _BeforeModel not in map(type, _pre_hooks_of(module)):
            module.register_forward_pre_hook(_BeforeModel(), with_kwargs=True)
        if is_mixer(kind) and _hook_of(module) is None:
            module.register_forward_pre_hook(_BeforeMixer(), with_kwargs=True)
            module.register_forward_hook(_AfterMixer(), with_kwargs=True, always_call=True)


def state_of(module: nn.Module, quick: bool = True) -> str:
    """The state name of a mixer by ``ModelWatch``: its weights, adapters, hooks and attributes."""
    hook = _hook_of(module)
    if hook is None:
        return ""
    hook.watch = hook.watch or ModelWatch(module)
    return hook.watch.quick_state() if quick else hook.watch.state()


def _hook_of(module: nn.Module) -> "_BeforeMixer | None":
    return next((x for x in _pre_hooks_of(module) if isinstance(x, _BeforeMixer)), None)


def _pre_hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values()]


@cached
def is_mixer(kind: Any) -> bool:
    """Whether modules of a class keep recurrent states in a cache, and only through methods of the cache."""
    names = set(_names_in(kind))
    return bool(names & _METHODS) and not names & _STATES


def _names_in(kind: Any) -> Iterator[str]:
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            continue
        for function in vars(owner).values():
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            yield from () if code is None else code.co_names


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache among arguments; ``None`` if there is none."""
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, (Cache, CacheOfMixers))), None)


class _BeforeModel:
    """Forward pre-hook by which a cache knows that a forward begins, before any layer asks it for sizes."""

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begin = getattr(cache_in(args, kwargs), "begin_forward", None)
        if begin is not None and not torch.compiler.is_compiling():
            begin()


class _BeforeMixer:
    """Forward pre-hook by which a cache records a mixer's arguments."""

    def __init__(self) -> None:
        self.watch: ModelWatch | None = None

    def __reduce__(self) -> Any:
        """Reduce to a new hook, so that a copy of the mixer has its own watch."""
        return type(self), ()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        rollback = _rollback_of(args, kwargs)
        if rollback is None:
            return None
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = rollback.before(module, args, kwargs)
        return given


class _AfterMixer:
    """Forward hook by which a cache records that the call ended, also by an error."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        rollback = _rollback_of(args, kwargs)
        return None if rollback is None else rollback.after(output)


def _rollback_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``recording`` of the cache among arguments; ``None`` without one, and while compiling."""
    if torch.compiler.is_compiling():
        return None
    return getattr(cache_in(args, kwargs), "recording", None)
