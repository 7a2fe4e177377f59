"""Key smoothing of a model, computed once for each state of the model."""

from threading import RLock
from typing import Any, Final

from kvloom.integrations.transformers.smoothing.calibration import calibrate
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing
from kvloom.integrations.transformers.watch import ModelWatch

_ATTRIBUTE: Final = "_kvloom_smoothing"
_KEPT: Final = 4
"""States whose smoothing is not computed again when the model returns to them."""
_LOCK: Final = RLock()


def smoothing_of(model: Any) -> tuple[LayerSmoothing, ...]:
    """The key smoothing of each layer of a model's cache, by ``layer_idx``; tensors are on the CPU.

    The model reads 256 pseudo-random tokens, as it is now: with its weights, adapters and hooks. What is
    found is kept beside the model for each of its last states, so an unchanged model has the same objects.
    Numbers are rounded to coarse steps, so that in another process they are most often the same. They need
    not be, as models round otherwise with other threads, processors and dtypes: who shares keys must compare
    ``KeySmoothing.digest``.

    Nothing of the model changes: training mode, configuration, hooks and the state of random numbers are as
    before, also if the model raises.

    Args:
        model: A ``PreTrainedModel`` that generates, or a ``PeftModel`` around one.

    Returns:
        One for each layer. A layer that could not be measured has none, and a reason; so have all layers of a
        model that raises. Never raises for what a model does.
    """
    with _LOCK:
        kept = vars(model).get(_ATTRIBUTE)
        if not isinstance(kept, _Kept) or not kept.is_of(model):
            kept = _Kept(model)
            setattr(model, _ATTRIBUTE, kept)
        return kept.present()


class _Kept:
    """Smoothing by states of a model. A copy of the model, or one that was saved, begins with nothing."""

    def __init__(self, model: Any = None) -> None:
        self._watch = None if model is None else ModelWatch(model)
        self._by_state: dict[str, tuple[LayerSmoothing, ...]] = {}

    def __reduce__(self) -> tuple[type["_Kept"], tuple[()]]:
        return _Kept, ()

    def is_of(self, model: Any) -> bool:
        """Whether it was made for this very object."""
        return self._watch is not None and self._watch.model is model

    def present(self) -> tuple[LayerSmoothing, ...]:
        """That of the present state."""
        assert self._watch is not None  # noqa: S101
        state = self._watch.state()
        if state not in self._by_state:
            self._by_state = dict([*self._by_state.items()][1 - _KEPT :])
            self._by_state[state] = calibrate(self._watch.model)
        return self._by_state[state]
