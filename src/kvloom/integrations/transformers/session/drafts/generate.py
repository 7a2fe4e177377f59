"""``Generate``: ``generate`` of an enabled model, whose prompt lookup also takes batches of several rows.

Shapes: B rows, T tokens.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer, kept_by
from kvloom.integrations.transformers.models.cache_argument import given_cache
from kvloom.integrations.transformers.models.layer_specs import DummyLayer
from kvloom.integrations.transformers.models.rope import dynamic_rope
from kvloom.integrations.transformers.session.drafts.rows_ahead import RowsAhead
from kvloom.integrations.transformers.stand_in import StandIn
from kvloom.integrations.transformers.states.specs import stateful_layers
from kvloom.integrations.transformers.versions import IS_4

GENERATE: Final = "generate"
LOOKUP: Final = "prompt_lookup_num_tokens"


class Generate:
    """Replacement of ``generate`` in one model, with prompt lookup for several rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self._model), GENERATE).__get__(self._model))

    @staticmethod
    def suits(model: PreTrainedModel) -> bool:
        """Whether a model generates as others do, in a version of transformers that has this loop."""
        own = GENERATE, GENERATION_MODES_MAPPING[GenerationMode.SAMPLE]
        return not IS_4 and all(getattr(type(model), x, None) is getattr(GenerationMixin, x) for x in own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model
        given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        asked = kwargs.get(LOOKUP), *(getattr(x, LOOKUP, None) for x in (given, model.generation_config))
        looks_up = any(x is not None for x in asked) and kwargs.get("custom_generate") is None
        return type(model).generate(_WithLookup(model) if looks_up else model, *args, **kwargs)


class _WithLookup(StandIn):
    """A model in which ``generate`` finds prompt lookup for several rows."""

    def _assisted_decoding(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Decode as transformers does, which takes one row; several with prompt lookup, in a ``KVCache``."""
        model: Any = self._model
        generation, cache = kwargs["generation_config"], given_cache(kwargs)
        is_lookup = kwargs.get("assistant_model") is None and generation.assistant_early_exit is None
        if len(input_ids) == 1 or not is_lookup or not isinstance(cache, KVCache):
            return type(model)._assisted_decoding(model, input_ids, **kwargs)
        if generation.prompt_lookup_num_tokens < 1:
            raise ArgumentError(f"{LOOKUP} must be at least 1, got {generation.prompt_lookup_num_tokens}")
        if refusal := _why_one_row(model, cache, input_ids, kwargs):
            raise UnsupportedError(f"{LOOKUP} must be None for {len(input_ids)} rows {refusal}")
        return _decode_ahead(model, cache, input_ids, kwargs)


def _of_transformers(name: str) -> Callable[..., Any]:
    method = getattr(GenerationMixin, name)

    @wraps(method)
    def decode(self: _WithLookup, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._model), name)(self._model, *args, **kwargs)

    return decode


for _name in {*GENERATION_MODES_MAPPING.values()}:
    if hasattr(GenerationMixin, _name) and not hasattr(_WithLookup, _name):
        setattr(_WithLookup, _name, _of_transformers(_name))


def _decode_ahead(model: Any, cache: KVCache, input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """Decode by transformers' loop of one token of each row, over a model that is ahead of it.

    Args:
        model: The model.
        cache: Its cache.
        input_ids: ``[B, T]``.
        kwargs: Arguments of ``_assisted_decoding``.
    """
    generation, criteria = kwargs["generation_config"], kwargs["stopping_criteria"]
    ends = [x for one in criteria if hasattr(one, "eos_token_id") for x in one.eos_token_id.tolist()]
    padding = generation._pad_token_tensor
    ahead = RowsAhead(
        model,
        cache,
        input_ids,
        kwargs.get("attention_mask"),
        generation.prompt_lookup_num_tokens,
        generation.max_length,
        frozenset(ends),
        0 if padding is None else int(padding),
    )
    for name in ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer"):
        kwargs.pop(name, None)
    kwargs["stopping_criteria"] = ahead.stopping(criteria)
    try:
        result = type(model)._sample(ahead, input_ids, **kwargs)
    except BaseException:
        with suppress(StateError):  # of a forward that broke off, which the cache's next use says, too
            ahead.align()
        raise
    ahead.align()
    return result


def _why_one_row(model: Any, cache: KVCache, input_ids: Tensor, kwargs: dict[str, Any]) -> str:
    """Why prompt lookup must have one row, as the end of a sentence; empty if several are computed exactly.

    Args:
        model: The model.
        cache: Its cache.
        input_ids: ``[B, T]``.
        kwargs: Arguments of a decoding method of transformers.
    """
    generation, rope = kwargs["generation_config"], dynamic_rope(model)
    inputs = sorted(
        name
        for name, x in kwargs.items()
        if isinstance(x, Tensor) and name not in ("inputs_tensor", "attention_mask", "position_ids")
    )
    refused = [x for x in ("output_attentions", "output_hidden_states") if getattr(generation, x, False)]
    refused += ["synced_gpus"] * bool(kwargs.get("synced_gpus"))
    if stateful_layers(cache.layers):
        return f"of {type(model).__name__}, which has recurrent states"
    kinds = {type(x) for x in cache.layers}
    if type(cache) is not KVCache or not kinds <= {KVCacheLayer, DummyLayer}:
        kept = " and ".join(sorted({kept_by(x) for x in cache.layers if not isinstance(x, DummyLayer)}))
        return (
            f"but in a KVCache that grows, of keys and values alone, got a {type(cache).__name__} of {kept}"
        )
    if any(any(x.begins) for x in cache.sequences):
        return "that do not begin together in their cache"
    if kwargs.get("position_ids") is None:
        return f"of {type(model).__name__}, which takes no position_ids"
    if not input_ids.shape[1] or inputs:
        return f"with {inputs or ['inputs_embeds']} of the caller"
    if refused:
        return f"with {refused[0]}"
    if input_ids.device.type != "cpu" or model.device.type != "cpu":
        return f"on {model.device}, and not on a CPU"
    if rope is not None and generation.max_length > rope.limit:
        return (
            f"of more than {rope.limit} tokens, where {type(model).__name__} has other RoPE frequencies, got "
            f"max_length {generation.max_length}"
        )
    return ""
