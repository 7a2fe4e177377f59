"""Runs of an encoder: what it read, and in which state of the model, for outputs that a decoder is given."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from kvloom.core.newest import keep_newest
from kvloom.integrations.transformers.cache.encoder_input import numbers_of
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.encoders import contents_of_given
from kvloom.integrations.transformers.models.found_states import FoundStates
from kvloom.integrations.transformers.models.signatures import parameters_of

_MOST: Final = 4096
"""Number of last rows that are known."""


class EncoderRun(NamedTuple):
    """What is known of a row that an encoder returned.

    Attributes:
        content: What the encoder read, as of ``contents_of_given``; empty if that is not known.
        state: State of the model; ``None`` in training mode.
    """

    content: str
    state: str | None


class EncoderRuns:
    """Forward hook of an encoder that knows the rows it returned of late, by two numbers of each.

    ``generate`` runs an encoder by itself, and repeats and passes on its outputs alone.

    Args:
        watch: Watch of the model.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._watch = watch
        self._known: dict[bytes, EncoderRun] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what a run returned."""
        keys = _keys_of(output)
        if not keys:
            return
        kind: Any = type(module)
        inputs = dict(zip(parameters_of(kind), args, strict=False)) | kwargs
        contents = contents_of_given(inputs, len(keys))
        state = None if self.is_training() else self._watch.quick_state()
        for key, content in zip(keys, contents, strict=True):
            keep_newest(self._known, key, EncoderRun(content, state), _MOST)

    def of_outputs(self, outputs: Any) -> list[EncoderRun | None]:
        """The run that returned each row of ``encoder_outputs``; ``None`` if none did that was seen."""
        return [self._known.get(key) for key in _keys_of(outputs)]

    def is_present(self, run: EncoderRun | None) -> bool:
        """Whether a run was in the present state of the model."""
        return run is not None and run.state is not None and run.state == self._watch.quick_state()

    def is_training(self) -> bool:
        """Whether a part of the encoder is in training mode."""
        model: Any = self._watch.model
        return any(module.training for module in model.get_encoder().modules())


def _keys_of(outputs: Any) -> list[bytes]:
    """Two numbers of each row of an encoder's outputs; none of what are no outputs."""
    if not isinstance(outputs, (Mapping, tuple)) or not outputs or torch.compiler.is_compiling():
        return []
    given: Any = outputs
    states = given[0]
    if not isinstance(states, Tensor) or isinstance(states, FoundStates) or states.ndim < 2:
        return []
    return [row.numpy().tobytes() for row in numbers_of(states)]
