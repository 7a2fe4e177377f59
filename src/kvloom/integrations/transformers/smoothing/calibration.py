"""Calibration of key smoothing: a model reads pseudo-random tokens, and its keys and queries are measured."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.models.loading import summary_of
from kvloom.integrations.transformers.models.rope import dynamic_rope
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing, fit
from kvloom.integrations.transformers.smoothing.inputs import longest_of, rows, token_ids
from kvloom.integrations.transformers.smoothing.recording import KeyRecorder, recorded
from kvloom.integrations.transformers.smoothing.rotations import frequencies_of, names_rope


def smoothing_of(model: Any) -> tuple[LayerSmoothing, ...]:
    """The key smoothing of each layer of a model's cache, by ``layer_idx``; tensors are on the CPU.

    The model reads 256 pseudo-random tokens with its present weights and adapters, and without calling hooks
    of others: what these change in keys is smoothed a little worse. Results are kept with the model for each
    of its last states, so an unchanged model has the same objects. Numbers are
    rounded to coarse steps, so that they are most often the same in another process. They may differ, since
    models round differently with other threads, processors and dtypes: compare ``KeySmoothing.digest`` before
    sharing keys.

    The model is unchanged afterwards, also if it raises: training mode, configuration, hooks and the state of
    random numbers.

    Args:
        model: A ``PreTrainedModel`` that generates, or a ``PeftModel`` around one.

    Returns:
        One item for each layer. A layer that could not be measured has no smoothing and a reason, and so have
        all layers of a model that raises. Errors of the model are never raised.
    """
    return once_per_state(model, calibrate)


def calibrate(model: Any) -> tuple[LayerSmoothing, ...]:
    """The smoothing of each layer of a model in its present state.

    A model with RoPE reads the tokens in two rows at different positions. A key of the second row is that of
    the first, rotated by the shift. This shows which channels are pairs, and their frequencies.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    num_layers = _num_layers(base)
    try:
        with _undisturbed(model):
            recorder, shift = _read(model, base)
            turns = frequencies_of(base) if shift else []
            # Without a second row the rotation of keys is known only if the model has no RoPE.
            still = not shift and not names_rope(base)
            return tuple(_layer(base, recorder, layer, turns, shift, still) for layer in range(num_layers))
    except Exception as error:  # whatever a model raises on tokens that are no text
        reason = f"calibration failed: {summary_of(error)}"
        return (LayerSmoothing(None, reason),) * num_layers


def _read(model: Any, base: Any) -> tuple[KeyRecorder, int]:
    """Run a forward; returns the recorder, and the shift of positions."""
    inputs, shift = _inputs_of(base)
    recorder = KeyRecorder()
    own = recorder.cache(_text_config(base))
    cache = EncoderDecoderCache(own, DynamicCache()) if base.config.is_encoder_decoder else own
    with recorded(base, recorder):
        model(**inputs, use_cache=True, **as_argument(model, cache))
    return recorder, shift


def _layer(
    model: Any, recorder: KeyRecorder, layer: int, turns: list[Tensor], shift: int, still: bool
) -> LayerSmoothing:
    key, power = recorder.keys.get(layer), recorder.query_power(layer)
    if key is None:
        return LayerSmoothing(None, _why_no_keys(model, layer))
    if key.dim() != 4:
        return LayerSmoothing(None, f"its keys are {list(key.shape)}, not [B, H, T, D]")
    if key.device.type == "meta":
        return LayerSmoothing(None, "its weights have no data: they are on the meta device")
    if power is None:
        return LayerSmoothing(None, recorder.why_no_queries(layer))
    return fit(key, power, turns, shift, still)


def _inputs_of(model: Any) -> tuple[dict[str, Any], int]:
    """Arguments of ``forward``, and the shift of the second row's positions, 0 without a second row."""
    parameters = inspect.signature(model.forward).parameters
    decoder = "decoder_" if model.config.is_encoder_decoder else ""
    is_placed = f"{decoder}position_ids" in parameters
    num_tokens, shift = rows(_longest(model), is_placed and bool(frequencies_of(model)))
    ids = _token_ids(model, num_tokens)[None].to(_device_of(model))
    inputs: dict[str, Any] = {"input_ids": ids}
    if shift:
        first = torch.arange(num_tokens, device=ids.device)
        inputs["input_ids"] = ids.expand(2, -1)
        inputs[f"{decoder}position_ids"] = torch.stack((first, first + shift))
    if decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if "logits_to_keep" in parameters:
        inputs["logits_to_keep"] = 1
    return inputs, shift


def _longest(model: Any) -> int:
    """Number of tokens up to which a text has the RoPE frequencies of short texts."""
    longest = longest_of(_text_config(model))
    dynamic = dynamic_rope(model)
    return longest if dynamic is None else min(longest, dynamic.limit)


def _token_ids(model: Any, num_tokens: int) -> Tensor:
    config = _text_config(model)
    size = min(x for x in (_num_embeddings(model), getattr(config, "vocab_size", None)) if x)
    return token_ids(size, (model.config, config, getattr(model, "generation_config", None)), num_tokens)


def _num_embeddings(model: Any) -> int | None:
    embedding = model.get_input_embeddings()
    found = getattr(embedding, "num_embeddings", None)
    return found if isinstance(found, int) else None


def _device_of(model: Any) -> torch.device:
    device: torch.device = getattr(model.get_input_embeddings(), "weight", torch.empty(0)).device
    return device


def _num_layers(model: Any) -> int:
    """Number of layers of the model's cache."""
    return len(layers_of(model))


def _decoder_of(model: Any) -> nn.Module:
    decoder: nn.Module | None = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model if decoder is None else decoder


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _why_no_keys(model: Any, layer: int) -> str:
    """Why a forward stored no keys of a layer."""
    modules = [x for x in _decoder_of(model).modules() if getattr(x, "layer_idx", None) == layer]
    if any("Cross" in type(x).__name__ for x in modules):
        return "cross attention"
    if any(getattr(x, "is_kv_shared_layer", False) for x in modules):
        return "it reads the keys of another layer"
    return "it keeps no keys"


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Context of a trial in which nothing is compiled; the state of random numbers is restored, too."""
    devices = {x.device.index for x in model.parameters() if x.device.type == "cuda"}
    with (
        torch.random.fork_rng(sorted(devices)),
        torch.compiler.set_stance("force_eager"),
        torch.inference_mode(False),
        undisturbed(model),
    ):
        yield
