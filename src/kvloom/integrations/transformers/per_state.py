"""Results that are computed once for each state of a model, and kept with the model."""

from collections.abc import Callable
from threading import RLock
from typing import Any, Final, TypeVar

from kvloom.integrations.transformers.watch import ModelWatch

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
            are kept by it; errors are not kept.

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
            found[compute] = compute(self._watch.model)
        return found[compute]
