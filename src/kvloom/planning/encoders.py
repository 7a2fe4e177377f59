"""Encoder-decoders without data: what the decoder reads of an encoder, and the encoder's maximum tokens."""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.encoders import encoder_width
from kvloom.integrations.transformers.models.positions import encoder_positions_of


def run_decoder(model: Any, cache: Any) -> None:
    """Let a model on the meta device read one token, beside one token of its encoder, which is not run."""
    encoded = BaseModelOutput(last_hidden_state=torch.empty(1, 1, encoder_width(model), dtype=model.dtype))
    encoded.attention_mask = None  # which those of audio have
    given = {"encoder_outputs": encoded, "use_cache": True, **as_argument(model, cache)}
    try:
        model(decoder_input_ids=torch.ones(1, 1, dtype=torch.int64), **given)
    except RuntimeError:  # a token of Dia has several channels, but it makes the first one itself
        model(**given)


def run_given(model: Any, cache: Any) -> None:
    """Let a decoder on the meta device read one token, and one that the caller's encoder made."""
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.empty(1, 1, width, dtype=model.dtype)
    one = torch.ones(1, 1, dtype=torch.int64)
    model(input_ids=one, encoder_hidden_states=states, use_cache=True, **as_argument(model, cache))


def encoder_positions(model: Any) -> int | None:
    """Maximum number of tokens that the encoder of a model on the meta device makes of one input.

    That is for the longest audio, a picture of the configured size, or the longest document; ``None`` if no
    configuration says it.
    """
    encoder = model.get_encoder()
    config = getattr(encoder, "config", model.config)
    size = getattr(config, "image_size", None)
    if getattr(encoder, "main_input_name", "") != "pixel_values" or size is None:
        return encoder_positions_of(model)
    sides = (size, size) if isinstance(size, int) else tuple(size)
    states = encoder(torch.empty(1, config.num_channels, *sides, dtype=model.dtype))[0]
    return int(states.shape[1])
