"""Size of a model's weights, and shapes of its layers, found without memory for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from transformers import AutoModelForImageTextToText, EncoderDecoderCache, PretrainedConfig

from kvloom.core.entries import Entry
from kvloom.core.specs import entry_of
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import summary_of
from kvloom.integrations.transformers.invariance import packable_bytes
from kvloom.integrations.transformers.models.cache_argument import as_argument, attends_to_encoder
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, expect_use, layers_of
from kvloom.integrations.transformers.models.loading import is_seeing
from kvloom.integrations.transformers.models.seen import Watched
from kvloom.integrations.transformers.models.text_config import names_rank
from kvloom.planning.encoders import encoder_positions, run_decoder, run_given
from kvloom.planning.making import model_of, section_of, without_data, without_logs
from kvloom.planning.sections import bytes_by_section

Kind: TypeAlias = Literal["full", "window", "latent", "hybrid", "recurrent", "none", "encoder"]
"""Kinds of layers: attention to all tokens, to a window, or by latents; attention and a recurrent state; only
a recurrent state; a layer without keys, values and states of its own; attention to an encoder's tokens, which
a layer of an encoder-decoder has in addition to one of the others."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Kind of one layer, and sizes of its keys, values and states.

    Attributes:
        kind: Kind of the layer.
        entry: Unquantized keys and values; ``None`` without keys.
        window: Tokens that a token sees, itself included; ``None`` for all.
        state_nbytes: Bytes of the recurrent state of one sequence.
        index: Index keys, which are never quantized; ``None`` without any.
        state_numel: Number of elements of the recurrent state of one sequence.
    """

    kind: Kind
    entry: Entry | None
    window: int | None
    state_nbytes: int
    index: Entry | None = None
    state_numel: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a model's weights, and shapes of its layers.

    Attributes:
        config: Configuration of the part that generates text.
        weights: Bytes of all parameters and buffers, tied ones once, or those that were given.
        layers: Shapes of the layers, in order.
        packable: Maximum bytes of packed weights of linear layers.
        encoder: Unquantized keys and values of a token of the encoder, by the number of the layer that
            attends to it; empty without an encoder.
        encoder_positions: Maximum number of the encoder's tokens for one input; ``None`` if no configuration
            says it, 0 if the caller may give the encoder's output.
    """

    config: Any
    weights: int
    layers: tuple[LayerShape, ...]
    packable: int = 0
    encoder: Mapping[int, Entry] = field(default_factory=dict)
    encoder_positions: int | None = None

    @classmethod
    def of(cls, config: Any, weights: int | None = None) -> "ModelShape":
        """Shape of the model with this configuration, found by computing one token on tensors without data.

        Args:
            config: A ``PretrainedConfig``.
            weights: Bytes of the weights; ``None`` for those that the configuration says.

        Raises:
            ArgumentError: ``config`` is no configuration, or ``weights`` no number of bytes.
            UnsupportedError: the model does not generate text or does not run on such tensors, its weights
                are quantized by a method whose bytes are not known, or a layer keeps something other than
                keys, values and a recurrent state, or keeps it outside of the cache.
        """
        if not isinstance(config, PretrainedConfig):
            raise ArgumentError(f"config must be a PretrainedConfig or a path, got {config!r}")
        if weights is not None and (isinstance(weights, bool) or not isinstance(weights, int) or weights < 0):
            raise ArgumentError(f"weights must be None or an int of at least 0, got {weights!r}")
        model, seen, beside, positions = _run_without_data(config)
        layers = layers_of(model)
        if any(x.tokens for x in layers):  # others have a cache of transformers' own
            expect_use(model, "cache", layers)
        if foreign := next((x.keeps for x in layers if x.is_foreign or x.crosses), None):
            raise UnsupportedError(
                f"config must have layers of keys and values or of recurrent states, got {foreign} in "
                f"{type(config).__name__}"
            )
        text = config.get_text_config(decoder=True)
        if config.is_encoder_decoder and beside is not None and not beside.seen:
            raise UnsupportedError(
                f"config must be of a model that keeps what its encoder read in its cache, got "
                f"{type(config).__name__}, which keeps it elsewhere"
            )
        return cls(
            text,
            _weights_of(config, model) if weights is None else weights,
            tuple(
                _layer_shape(type(config).__name__, layer, seen, i, names_rank(text))
                for i, layer in enumerate(layers)
            ),
            packable_bytes(model),
            {} if beside is None else {i: entry_of(*pair) for i, pair in beside.seen.items()},
            positions,
        )


def _weights_of(config: Any, model: Any) -> int:
    """Bytes of all parameters and buffers; of quantized ones by their section of the configuration.

    Args:
        config: The configuration.
        model: The model that ran, which may be without its tower of pictures.

    Raises:
        UnsupportedError: transformers cannot make such a model, or the bytes of the method are not known.
    """
    if is_seeing(config) and AutoModelForImageTextToText._model_mapping[type(config)] is not type(model):
        try:
            with torch.device("meta"), without_logs():
                model = model_of(config, sees=True)
        except Exception as error:  # a package is missing
            raise UnsupportedError(
                f"config must be of a model that transformers can make here, got {type(config).__name__}: "
                f"{summary_of(error)}"
            ) from error
    if (section := section_of(config)) is not None:
        return bytes_by_section(model, section)
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


class _Run(NamedTuple):
    """A model that ran, with what it gave its cache."""

    model: Any
    own: Watched
    encoder: Watched | None
    positions: int | None


def _run_without_data(config: Any) -> _Run:
    """Make the model from a copy of ``config`` and run it on one token, and on one of its encoder."""
    try:
        with without_data():
            model = model_of(config)
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")  # its shapes do not depend on data
            text = model.config.get_text_config(decoder=True)
            cache = Watched(text)
            if config.is_encoder_decoder:
                beside = Watched(text)
                run_decoder(model, EncoderDecoderCache(cache, beside))
                return _Run(model, cache, beside, encoder_positions(model))
            one = torch.ones(1, 1, dtype=torch.int64)
            given = as_argument(model, cache)
            if "cache_params" in signature(model.forward).parameters:  # until 5.23, only for recurrent models
                given = {"cache_params": cache}
            model(one, attention_mask=one, use_cache=True, **given)
            if attends_to_encoder(model):  # that of the caller, if there is one
                beside = Watched(text)
                run_given(model, EncoderDecoderCache(Watched(text), beside))
                return _Run(model, cache, beside, 0)
    except Exception as error:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "a causal language model"
        raise UnsupportedError(
            f"config must be of {kind} that runs on tensors without data, got {type(config).__name__}: "
            f"{summary_of(error)}"
        ) from error
    return _Run(model, cache, None, None)


def _layer_shape(name: str, layer: LayerSpec, cache: Watched, index: int, is_latent: bool) -> LayerShape:
    theirs = cache.layers[index]
    state = numel = 0
    if layer.states:
        of_kinds = [getattr(theirs, field) for field in ("conv_states", "recurrent_states")]
        kept = [x for states in of_kinds for x in states.values() if x is not None]
        state, numel = sum(x.nbytes for x in kept), sum(x.numel() for x in kept)
        if not state and index not in cache.seen:
            raise UnsupportedError(
                f"config must be of a model that keeps recurrent states in its cache, got {name}, which "
                "keeps them elsewhere"
            )
    keys = cache.indexed.get(index)
    of_index = None if keys is None else entry_of(keys.unsqueeze(1), keys.unsqueeze(1)[..., :0])
    if index not in cache.seen:
        return LayerShape("recurrent" if state else "none", None, None, state, of_index, numel)
    key, value = cache.seen[index]
    window = layer.window
    kind: Kind = "hybrid" if state else "full" if window is None else "window"
    if kind == "full" and is_latent:
        kind = "latent"
    return LayerShape(kind, entry_of(key, value), window, state, of_index, numel)
