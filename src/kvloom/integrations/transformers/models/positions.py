"""Positions of a model: the longest text that it was made for, and where it counts them from."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed

_NAMES: Final = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")
"""Fields of configurations for the longest text; the latter two are of decoders beside an encoder."""
_COUNTING: Final = "create_position_ids_from_input_ids"
"""Function of models that count positions themselves, most from behind the number of the padding token."""


def positions_of(model: Any) -> int | None:
    """Tokens of the longest text that a model was made for, its RoPE stretched as its configuration says.

    Args:
        model: A ``PreTrainedModel``, or the configuration of one.

    Returns:
        ``None`` if the configuration has no such number, as with ALiBi and in recurrent models.
    """
    is_config = isinstance(model, PretrainedConfig)
    config = model.get_text_config(decoder=True) if is_config else text_config_of(model)
    longest = next((x for name in _NAMES if (x := getattr(config, name, None)) is not None), None)
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        return None
    rope = getattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", None)
    said = rope if isinstance(rope, Mapping) else {}
    if said.get("rope_type", said.get("type")) == "llama3":  # its factor is of frequencies, not of lengths
        return longest
    first, factor = said.get("original_max_position_embeddings") or longest, said.get("factor")
    stretched = first * factor if isinstance(first, int) and isinstance(factor, int | float) else 0
    return max(longest, int(stretched))


def encoder_positions_of(model: Any) -> int | None:
    """Tokens of the longest input that the encoder of a model makes, as far as a configuration says it.

    Args:
        model: A ``PreTrainedModel`` with an encoder.

    Returns:
        ``None`` if no configuration says it.
    """
    encoder = model.get_encoder()
    config = getattr(encoder, "config", model.config)
    if getattr(encoder, "main_input_name", model.main_input_name) == "input_ids":
        return getattr(config, "max_encoder_position_embeddings", None) or positions_of(config)
    said: int | None = getattr(config, "max_source_positions", None)
    is_own = type(config) is not type(model.config)  # else positions are those of the decoder
    return said or (positions_of(config) if is_own else None)


def expect_positions(name: str, model: Any, num_tokens: int) -> None:
    """Raise ArgumentError if texts have more tokens than a model has positions.

    Args:
        name: Name of the texts in the error.
        model: A ``PreTrainedModel``.
        num_tokens: Number of tokens of each text.
    """
    longest = positions_of(model)
    if longest is not None and num_tokens > longest:
        raise ArgumentError(
            f"{name} must be at most {longest} tokens, the positions of the model, got {num_tokens}"
        )


def room_behind(name: str, model: Any, num_tokens: int, wanted: int) -> int:
    """Number of new tokens after a text: as many as are wanted, or as the model has positions left.

    Args:
        name: Name of the text in the error.
        model: A ``PreTrainedModel``.
        num_tokens: Number of tokens of the text.
        wanted: Number of new tokens that are wanted.

    Raises:
        ArgumentError: no position is left.
    """
    longest = positions_of(model)
    if longest is None:
        return wanted
    if num_tokens >= longest:
        raise ArgumentError(
            f"{name} must be fewer tokens than the model's {longest} positions, got {num_tokens}"
        )
    return min(wanted, longest - num_tokens)


def gives_positions(model: Any) -> bool | None:
    """Whether ``generate`` gives a model positions; ``None`` if it counts them alike where none are given.

    Only a model that counts positions in a way of its own is tried, with a few tokens.
    """
    kinds = {type(module) for module in model.modules()}
    if not any(hasattr(x, _COUNTING) or hasattr(sys.modules.get(x.__module__), _COUNTING) for x in kinds):
        return None
    size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(size - 4, size, device=model.device)[None]
    given: list[bool] = []

    def note(_module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        given.append(inputs.get("position_ids") is not None)

    def computed(**positions: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, use_cache=False, **positions)[0]
        return found

    with undisturbed(model):
        try:
            numbered = computed(position_ids=torch.arange(4, device=model.device)[None])
        except TypeError:  # it takes no positions
            return None
        if torch.equal(computed(), numbered):
            return None
        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "use_cache": False}
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        finally:
            hook.remove()
    return given[0]
