"""Assisted decoding and prompt lookup in models with recurrent states.

``generate`` refuses both by the class of the model, and asks no cache whether it can go back. So an enabled
model lets these modes pass, and looks at the cache.
"""

from typing import Any, Final

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.origin import PoolCache
from kvloom.integrations.transformers.states import why_wrong_in_pieces

VALIDATE: Final = "_validate_generation_mode"
"""The method of ``generate`` that refuses."""


class ValidateMode:
    """In the place of that method, of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, generation_mode: Any, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model
        if generation_mode == GenerationMode.ASSISTED_GENERATION and model._is_stateful:
            model = _WithoutStates(model)
        return getattr(type(self._model), VALIDATE)(model, generation_mode, *args, **kwargs)


class _WithoutStates:
    """A model that says that it has no recurrent states."""

    _is_stateful = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def prepare_drafts(model: PreTrainedModel, cache: Any, generation_config: Any, args: tuple[Any, ...]) -> None:
    """Let a cache record what drafts change, if this generation has any.

    Args:
        model: That generates.
        cache: Its own.
        generation_config: Of this generation.
        args: The mode of generation is among them.

    Raises:
        UnsupportedError: the model computes several tokens at once otherwise than one by one.
        ValueError: the model has recurrent states, and another cache; as transformers says it.
    """
    if GenerationMode.ASSISTED_GENERATION not in args or not model._is_stateful:
        return
    if not isinstance(cache, KVCache):
        getattr(type(model), VALIDATE)(model, GenerationMode.ASSISTED_GENERATION, generation_config, {})
        return
    if refusal := why_wrong_in_pieces(model):
        raise UnsupportedError(f"drafts cannot be checked: {refusal}")
    cache.activate_past_recording()
    if cache.recording is not None:  # a pool cuts texts itself
        cache.recording.cuts_steps = not isinstance(cache, PoolCache)
