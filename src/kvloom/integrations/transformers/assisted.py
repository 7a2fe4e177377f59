"""Assisted decoding and prompt lookup in models with recurrent states.

``generate`` refuses both by the class of the model, whatever cache it has. An enabled model lets these modes
pass, and checks whether the cache can remove tokens.
"""

from typing import Any, Final

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.trial import why_wrong_in_pieces
from kvloom.integrations.transformers.pool.origin import PoolCache
from kvloom.integrations.transformers.stand_in import StandIn

VALIDATE: Final = "_validate_generation_mode"
"""The method of ``generate`` that refuses."""


class ValidateMode:
    """Replacement of that method in one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, generation_mode: Any, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model
        if generation_mode == GenerationMode.ASSISTED_GENERATION and model._is_stateful:
            model = _WithoutStates(model)
        return getattr(type(self._model), VALIDATE)(model, generation_mode, *args, **kwargs)


class _WithoutStates(StandIn):
    """A model whose ``_is_stateful`` is false."""

    _is_stateful = False


def prepare_drafts(model: PreTrainedModel, cache: Any, generation_config: Any, args: tuple[Any, ...]) -> None:
    """Let a cache record the states before drafts, if this generation uses drafts.

    Args:
        model: The model that generates.
        cache: Its cache.
        generation_config: Configuration of this generation.
        args: Arguments of the call, which include the generation mode.

    Raises:
        UnsupportedError: the model computes several tokens at once differently than one by one.
        ValueError: the model has recurrent states and the cache is no ``KVCache``; raised by transformers.
    """
    if GenerationMode.ASSISTED_GENERATION not in args or not model._is_stateful:
        return
    if not isinstance(cache, KVCache):
        getattr(type(model), VALIDATE)(model, GenerationMode.ASSISTED_GENERATION, generation_config, {})
        return
    if refusal := why_wrong_in_pieces(model):
        raise UnsupportedError(f"drafts cannot be checked: {refusal}")
    cache.activate_past_recording()
    if cache.recording is not None:  # a pool feeds texts in pieces itself
        cache.recording.cuts_steps = not isinstance(cache, PoolCache)
