"""Results that are computed once for each state of a model, and kept with the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any, Final, TypeVar

from torch import nn
from torch.nn.modules import module

from kvloom.integrations.transformers.fingerprint.watch import ModelWatch

T = TypeVar("T")
_ATTRIBUTE: Final = "_kvloom_per_state"
_KEPT: Final = 4
"""Number of last states whose results are kept."""
_LOCK: Final = RLock()


def once_per_state(model: Any, compute: Callable[[Any], T]) -> T:
    """Result of a function for the present state of a model: its weights, adapters, hooks and attributes.

    Args:
        model: A module.
        compute: Function of the model that leaves it unchanged. Pass the same object each time, since results
            are kept by it; errors are not kept. Meanwhile hooks of others are not called in this thread.

    Returns:
        The same object as before if the model is unchanged, or has returned to one of its last states.
    """
    with _LOCK:
        kept = vars(model).get(_ATTRIBUTE)
        if not isinstance(kept, _Kept) or not kept.is_of(model):
            kept = _Kept(model)
            setattr(model, _ATTRIBUTE, kept)
        found: T = kept.present(compute)
        return found


def forget_states(model: Any) -> None:
    """Drop all that ``once_per_state`` keeps with a model."""
    vars(model).pop(_ATTRIBUTE, None)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Context in which forwards in this thread call no forward hooks and pre-hooks but kvloom's own.

    What is computed there concerns nobody else: hooks of the caller, of its modules and global ones, would
    see texts that nobody gave. In other threads they are called as before.
    """
    thread, silenced = get_ident(), list[tuple[dict[int, Any], int, Any, Any]]()

    def elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if get_ident() == thread else hook(*args, **kwargs)

    hooks: list[dict[int, Any]] = [module._global_forward_hooks, module._global_forward_pre_hooks]
    for each in model.modules():
        hooks += each._forward_hooks, each._forward_pre_hooks
    for own in hooks:
        for key, hook in [*own.items()]:
            if not str(getattr(hook, "__module__", "")).startswith("kvloom."):
                silenced.append((own, key, hook, elsewhere(hook)))
                own[key] = silenced[-1][-1]
    try:
        yield
    finally:
        for own, key, hook, other in silenced:
            if own.get(key) is other:  # else it was removed meanwhile
                own[key] = hook


class _Kept:
    """Results by states of a model. Copying or saving the model drops them."""

    def __init__(self, model: Any = None) -> None:
        self._watch = None if model is None else ModelWatch(model)
        self._by_state: dict[str, dict[Callable[[Any], Any], Any]] = {}

    def __reduce__(self) -> tuple[type["_Kept"], tuple[()]]:
        return _Kept, ()

    def is_of(self, model: Any) -> bool:
        """Whether it was made for this object."""
        return self._watch is not None and self._watch.model is model

    def present(self, compute: Callable[[Any], Any]) -> Any:
        """The result for the present state."""
        assert self._watch is not None  # noqa: S101
        state = self._watch.state()
        if state not in self._by_state:
            self._by_state = dict([*self._by_state.items()][1 - _KEPT :])
        found = self._by_state.setdefault(state, {})
        if compute not in found:
            with without_hooks(self._watch.model):
                found[compute] = compute(self._watch.model)
        return found[compute]
