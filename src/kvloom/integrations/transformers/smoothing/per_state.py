"""Key smoothing of a model, computed once for each state of the model."""

from typing import Any

from kvloom.integrations.transformers.per_state import once_per_state
from kvloom.integrations.transformers.smoothing.calibration import calibrate
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing


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
    return once_per_state(model, calibrate)
