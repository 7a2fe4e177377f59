"""What the encoder of a model reads, and what it makes of it.

Shapes: N texts, B of them read together.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationMixin

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.integrations.transformers.models.positions import encoder_positions_of
from kvloom.integrations.transformers.models.text_config import token_ids_in

_PREPARE: Final = next(
    name
    for name in (
        "_maybe_prepare_encoder_kwargs_for_generation",
        "_prepare_encoder_decoder_kwargs_for_generation",
    )
    if hasattr(GenerationMixin, name)
)
"""Method by which ``generate`` runs the encoder, in the installed transformers."""


def expect_encoder_inputs(
    model: Any, encoder_inputs: Mapping[str, Tensor] | None, num_texts: int
) -> Mapping[str, Tensor]:
    """The inputs of a model's encoder; empty without an encoder.

    Raises:
        ArgumentError: there are none for a model with an encoder, or some for one without; or they are not
            tensors with a row for each of ``num_texts`` texts, by names that the model takes.
    """
    name = type(model).__name__
    if not model.config.is_encoder_decoder:
        if encoder_inputs is not None:
            raise ArgumentError(f"encoder_inputs must be None for {name}, which has no encoder")
        return {}
    main = _names_of(model)
    if not isinstance(encoder_inputs, Mapping) or not any(x in encoder_inputs for x in main):
        got = "None" if encoder_inputs is None else list(encoder_inputs)
        raise ArgumentError(
            f"encoder_inputs must be what the encoder of {name} reads, as {{{main[0]!r}: ...}}, got "
            f"{got!s:.60}"
        )
    taken = [x for x in signature(model.forward).parameters if not x.startswith("decoder_")]
    for key, value in encoder_inputs.items():
        if key not in (*taken, *main):
            raise ArgumentError(f"encoder_inputs must have names of what {name} reads alone, got {key!r}")
        if not isinstance(value, Tensor) or value.shape[:1] != (num_texts,):
            shape = list(value.shape) if isinstance(value, Tensor) else value
            raise ArgumentError(
                f"encoder_inputs must have a row for each of {num_texts} texts, got {key} of {shape!s:.80}"
            )
    return encoder_inputs


@torch.no_grad()
def encoded(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of a model with what its encoder made of B inputs, as ``generate`` gives them.

    Raises:
        ArgumentError: the encoder raises an error.
    """
    name = next(x for x in _names_of(model) if x in inputs)
    others = {key: x for key, x in inputs.items() if key != name}
    try:
        given = getattr(model, _PREPARE)(inputs[name], others, name, model.generation_config)
    except Exception as error:  # whatever an encoder raises
        shapes = {key: list(x.shape) for key, x in inputs.items()}
        raise ArgumentError(
            f"encoder_inputs must be what the encoder of {type(model).__name__} can read, got {shapes}: "
            f"{summary_of(error)}"
        ) from error
    taken = signature(model.forward).parameters
    return {key: x for key, x in given.items() if key in taken}


def document_inputs(model: Any, tokenizer: Any, document: str, num_texts: int) -> dict[str, Tensor]:
    """Inputs of an encoder that reads the same document for each of N texts.

    Args:
        model: A model with an encoder that reads tokens.
        tokenizer: Its tokenizer.
        document: The text, named ``--document`` in errors.
        num_texts: N.

    Raises:
        ArgumentError: the document has no tokens, or more than the encoder has positions.
    """
    ids = torch.tensor([tokenizer(document, verbose=False).input_ids], dtype=torch.int64)
    longest = encoder_positions_of(model)
    if not 0 < ids.shape[1] <= (longest or ids.shape[1]):
        most = "" if longest is None else f" and at most {longest}, the positions of the encoder"
        raise ArgumentError(f"--document must be at least 1 token{most}, got {ids.shape[1]}")
    ids = ids.expand(num_texts, -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def started(model: Any, texts: Tensor) -> Tensor:
    """Texts ``[N, W]`` of a decoder behind the token with which ``generate`` begins them, ``[N, W + 1]``."""
    places = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    found = (getattr(place, name, None) for name in names for place in places)
    first = next((token for token in map(token_ids_in, found) if token), None)
    if first is None:
        raise ArgumentError("model must have a decoder_start_token_id in generation_config.json, got none")
    return torch.cat([torch.full((len(texts), 1), first[0]), texts], 1)


def _names_of(model: Any) -> list[str]:
    """Names of the argument that an encoder reads, any of which may be given, the usual one first."""
    own = getattr(model.get_encoder(), "main_input_name", model.main_input_name)
    return [*dict.fromkeys((own, model.main_input_name, "inputs_embeds"))]
