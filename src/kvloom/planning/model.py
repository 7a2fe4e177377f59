"""Size of a model's weights, and shapes of its layers, found without memory for them."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.quantizers import AutoHfQuantizer

from kvloom.core.entries import Entry
from kvloom.core.specs import entry_of
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import summary_of
from kvloom.integrations.transformers.invariance import packable_bytes
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, expect_use, layers_of
from kvloom.integrations.transformers.models.loading import is_seeing
from kvloom.integrations.transformers.models.seen import Watched
from kvloom.integrations.transformers.models.text_config import names_rank

Kind: TypeAlias = Literal["full", "window", "latent", "hybrid", "recurrent", "none"]
"""Kinds of layers: attention to all tokens, to a window, by latents; attention beside a recurrent state, a
state alone; a layer without keys, values and states of its own."""


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
        weights: Bytes of all parameters and buffers, tied ones once.
        layers: Shapes of the layers, in order.
        packable: Maximum bytes of packed weights of linear layers.
    """

    config: Any
    weights: int
    layers: tuple[LayerShape, ...]
    packable: int = 0

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Shape of the model with this configuration, found by computing one token on tensors without data.

        Raises:
            ArgumentError: ``config`` is no configuration.
            UnsupportedError: the model does not generate text or cannot run so, has an encoder or quantized
                weights, or a layer keeps something other than keys, values and a recurrent state, or outside
                of the cache.
        """
        if not isinstance(config, PretrainedConfig):
            raise ArgumentError(f"config must be a PretrainedConfig or a path, got {config!r}")
        if config.is_encoder_decoder:  # for some of these transformers makes the decoder alone
            raise UnsupportedError(
                f"config must be of a decoder alone, got the encoder and decoder of {type(config).__name__}"
            )
        model, seen = _run_without_data(config)
        layers = layers_of(model)
        if any(x.tokens for x in layers):  # others have a cache of transformers' own
            expect_use(model, "cache", layers)
        if foreign := next((x.keeps for x in layers if x.is_foreign or x.crosses), None):
            raise UnsupportedError(
                f"config must have layers of keys and values or of recurrent states, got {foreign} in "
                f"{type(config).__name__}"
            )
        text = config.get_text_config(decoder=True)
        return cls(
            text,
            _weights_of(config, model),
            tuple(
                _shape(type(config).__name__, layer, seen, i, names_rank(text))
                for i, layer in enumerate(layers)
            ),
            packable_bytes(model),
        )


def read_config(path: str | Path) -> Any:
    """Read the configuration in a folder, or in a file ``config.json``; needs no weights and runs no code.

    Raises:
        ArgumentError: there is none, or it is damaged or of an unknown model.
    """
    folder = Path(path)
    if not (folder.is_file() or (folder / "config.json").is_file()):
        raise ArgumentError(f"model must be a config.json, or a local folder with one, got {str(path)!r}")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for a damaged file
        raise ArgumentError(
            f"model must have a configuration that loads, got {str(path)!r}: {summary_of(error)}"
        ) from error


AUTO_CLASSES: Final = [
    getattr(transformers, name)
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
    if hasattr(transformers, name)
]
"""Auto classes of models that generate text, multimodal ones included."""

AUTO_CLASSES_OF_BOTH: Final = [
    getattr(transformers, name)
    for name in ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForTextToWaveform")
]
"""Auto classes of models with an encoder and a decoder, among others."""


def model_of(config: Any, *, sees: bool = False) -> Any:
    """Make the model of a configuration without quantized weights, on torch's default device.

    Of some there is one with a tower of pictures and one without; ``sees`` prefers the former. Of an
    encoder and a decoder it is the model of both, where there is one.
    """
    config = copy.deepcopy(config)  # in which transformers writes how it attends
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    classes = [*AUTO_CLASSES]
    if config.is_encoder_decoder:  # for some of these there is a model of the decoder alone
        classes = [*AUTO_CLASSES_OF_BOTH, *AUTO_CLASSES[1:], *AUTO_CLASSES[:1]]
    found = [x for x in classes if type(config) in x._model_mapping] or [AutoModelForCausalLM]
    auto = AutoModelForImageTextToText if sees and AutoModelForImageTextToText in found else found[0]
    return auto.from_config(config, attn_implementation="eager", dtype=_dtype_of(config)).eval()


def _dtype_of(config: Any) -> Any:
    """Dtype of the weights, which some configurations say of the part that generates text alone."""
    for x in (config, config.get_text_config(decoder=True)):
        dtype = getattr(x, "dtype", None)
        if dtype is not None:
            return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return None


def _weights_of(config: Any, model: Any) -> int:
    """Bytes of all parameters and buffers; of quantized ones as transformers keeps them on this machine.

    Args:
        config: The configuration.
        model: The model that ran, which may be without its tower of pictures.

    Raises:
        UnsupportedError: transformers cannot make or quantize such a model here.
    """
    said = getattr(config, "quantization_config", None)
    sees = is_seeing(config) and AutoModelForImageTextToText._model_mapping[type(config)] is not type(model)
    if said is not None or sees:
        dtype = next((x.dtype for x in model.parameters()), None)
        try:
            with torch.device("meta"), without_logs():
                model = model_of(config, sees=True)
                if said is not None:
                    AutoHfQuantizer.from_config(said, pre_quantized=True).preprocess_model(
                        model=model, dtype=dtype, device_map=None, checkpoint_files=None
                    )
        except Exception as error:  # a package or a device is missing
            raise UnsupportedError(
                f"config must be of a model that transformers can load here, got {type(config).__name__}"
                f"{'' if said is None else ' with a quantization_config'}: {summary_of(error)}"
            ) from error
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


_TORCH_AUTOCAST: Final = torch.autocast


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """``torch.autocast`` for the meta device, too, for which older transformers turns it off."""
    return nullcontext() if device_type == "meta" else _TORCH_AUTOCAST(device_type, *args, **kwargs)


class _Decided(TorchDispatchMode):
    """Reads 1 or true from every tensor without data, as of the length of one token."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


@contextmanager
def without_logs() -> Iterator[None]:
    """Context in which transformers logs nothing."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_without_data(config: Any) -> tuple[Any, Watched]:
    """Make the model from a copy of ``config`` and run it on one token; returns it with its cache."""
    try:
        with (
            torch.device("meta"),
            torch.no_grad(),
            patch.object(torch, "autocast", _autocast),
            _Decided(),  # type: ignore[no-untyped-call]
            without_logs(),
        ):
            model = model_of(config)
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")  # its shapes do not depend on data
            cache = Watched(model.config.get_text_config(decoder=True))
            one = torch.ones(1, 1, dtype=torch.int64)
            given = as_argument(model, cache)
            if "cache_params" in signature(model.forward).parameters:  # until 5.23, only for recurrent models
                given = {"cache_params": cache}
            model(one, attention_mask=one, use_cache=True, **given)
    except Exception as error:
        raise UnsupportedError(
            f"config must be of a causal language model that computes a token without data, got "
            f"{type(config).__name__}: {summary_of(error)}"
        ) from error
    return model, cache


def _shape(name: str, layer: LayerSpec, cache: Watched, index: int, is_latent: bool) -> LayerShape:
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
