"""Name of a model's cache argument: ``cache`` since transformers 5.24, ``past_key_values`` before."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""Both names, the newer first."""

CACHE_ARGUMENT: Final = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""Name of the cache argument of ``generate`` in the installed transformers."""

_ALL_SAY_SO: Final = hasattr(PretrainedConfig(), "add_cross_attention")
"""Whether all configurations have the setting, those of models that do not read it, too, as in version 4."""

OF_ENCODER: Final = "encoder_hidden_states"
"""Argument with which the caller gives a decoder what an encoder made."""


_PUT_INTO_PAIRS: Final = frozenset({"blip_text_model"})
"""Families whose forward puts every ``DynamicCache`` into a new pair, one of both halves, too."""


def argument_of(model: Any) -> str | None:
    """Name of the cache argument of ``model.forward``, old or new; ``None`` if it takes no cache.

    A ``forward`` that passes ``*args`` on has the arguments of its parent.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # within a PeftModel
    own = (vars(kind)["forward"] for kind in type(base).__mro__ if "forward" in vars(kind))
    for forward in (base.forward, *own):
        parameters = inspect.signature(forward).parameters
        if all(x.kind is not x.VAR_POSITIONAL for x in parameters.values()):
            return next((name for name in CACHE_ARGUMENTS if name in parameters), None)
    return None


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether a model, or one within it, takes a cache; others, such as OpenAI GPT, would ignore one."""
    return any(takers_of(model))


def takers_of(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The models that take the cache: a model itself, or, if it does not, those within it that do."""
    if argument_of(model) is not None:
        yield model
        return
    yield from (x for x in model.modules() if isinstance(x, PreTrainedModel) and argument_of(x) is not None)


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Whether a model also attends to what an encoder made: one of its own, or of the caller."""
    return model.config.is_encoder_decoder or any(map(_attends_to_given, takers_of(model)))


def why_half(model: PreTrainedModel) -> str:
    """Why only the tokens of a model that attends to an encoder are in pages, as a sentence; empty if all."""
    kinds = {getattr(x.config, "model_type", "") for x in takers_of(model)}
    if kinds & _PUT_INTO_PAIRS:
        return (
            f"keys and values of the encoder stay in transformers' storage, as {type(model).__name__} puts "
            f"every cache that it is given into a pair with one of its own"
        )
    return ""


def _attends_to_given(model: PreTrainedModel) -> bool:
    may = _ALL_SAY_SO or getattr(model.config, "add_cross_attention", True)
    return bool(may and OF_ENCODER in inspect.signature(model.forward).parameters)


def as_argument(model: Any, cache: Any) -> dict[str, Any]:
    """``cache`` as a keyword argument of ``model.forward``."""
    return {argument_of(model) or CACHE_ARGUMENT: cache}


def given_cache(values: Mapping[str, Any]) -> Any:
    """The cache among arguments or outputs of a model, under either name; ``None`` if there is none."""
    return next((values[name] for name in CACHE_ARGUMENTS if values.get(name) is not None), None)
