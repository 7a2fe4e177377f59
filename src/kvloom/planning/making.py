"""Configurations, and models made of them and run on tensors without data."""

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import summary_of
from kvloom.planning.gguf_files import gguf_of, read_gguf


def read_config(path: str | Path) -> Any:
    """Read the configuration in a folder, a ``config.json`` or a GGUF; needs no weights and runs no code.

    Raises:
        ArgumentError: there is none, or it is damaged, or of a model that is not in transformers.
        UnsupportedError: it is a GGUF whose architecture transformers does not read.
    """
    folder = Path(path)
    if (file := gguf_of(folder)) is not None:
        return read_gguf(file)
    if not (folder.is_file() or (folder / "config.json").is_file()):
        raise ArgumentError(
            f"model must be a config.json or a GGUF file, or a local folder with one, got {str(path)!r}"
        )
    _expect_known(folder / "config.json" if folder.is_dir() else folder)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for a damaged file
        raise ArgumentError(
            f"model must have a configuration that transformers loads, got {str(path)!r}: {summary_of(error)}"
        ) from error


def _expect_known(file: Path) -> None:
    """Raise ArgumentError for a model whose code is beside its configuration, and not in transformers."""
    try:
        said = json.loads(file.read_bytes())
        kind, code = said.get("model_type"), (said.get("auto_map") or {}).get("AutoConfig")
    except (ValueError, AttributeError):  # it is damaged, which transformers says
        return
    if code is not None and kind not in CONFIG_MAPPING:
        raise ArgumentError(
            f"model must be one that transformers has, got model_type {kind!r}, whose code {code!r} is "
            "beside its configuration and never run"
        )


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
    options = {"attn_implementation": "eager", "dtype": _dtype_of(config)}
    config = copy.deepcopy(config)  # in which transformers writes how it attends
    for part in _parts(config):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if config.is_encoder_decoder:
        if (named := _class_named(config)) is not None:
            return named._from_config(config, **options).eval()
        # For some of these there is a model of the decoder alone.
        autos = [*AUTO_CLASSES_OF_BOTH, *AUTO_CLASSES[1:], *AUTO_CLASSES[:1]]
    else:
        autos = [*AUTO_CLASSES, *AUTO_CLASSES_OF_BOTH]
    found = [x for x in autos if type(config) in x._model_mapping] or autos[:1]
    auto = AutoModelForImageTextToText if sees and AutoModelForImageTextToText in found else found[0]
    return auto.from_config(config, **options).eval()


def _class_named(config: Any) -> Any:
    """The class that a configuration was saved with, if that generates text; else ``None``."""
    for name in getattr(config, "architectures", None) or ():
        found: Any = getattr(transformers, name, None)
        is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
        if is_model and found.config_class is type(config) and found.can_generate():
            return found
    return None


def _parts(config: Any) -> tuple[Any, Any]:
    """The configuration, and that of the part that generates text, which may say what the whole does not."""
    return config, config.get_text_config(decoder=True)


def section_of(config: Any) -> Mapping[str, Any] | None:
    """What a configuration says of its quantized weights, ``quantization`` in MLX; ``None`` if nothing."""
    for x in _parts(config):
        for field in ("quantization_config", "quantization"):
            found = getattr(x, field, None)
            if found is not None:
                return found if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def _dtype_of(config: Any) -> Any:
    """Dtype of the weights, which some configurations say only for the part that generates text.

    Where none is said of a model with quantized weights, it computes in bfloat16, as transformers decides.
    """
    for x in _parts(config):
        dtype = getattr(x, "dtype", None)
        if dtype is not None:
            return getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return None if section_of(config) is None else torch.bfloat16


_TORCH_AUTOCAST: Final = torch.autocast


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """``torch.autocast`` for the meta device, too, for which older transformers turns it off."""
    return nullcontext() if device_type == "meta" else _TORCH_AUTOCAST(device_type, *args, **kwargs)


class _Decided(TorchDispatchMode):
    """Mode in which each value read from a tensor without data is 1 or true, as of one token.

    One element of such a tensor is not zero, the first.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty(1, args[0].ndim, dtype=torch.int64, device="meta")
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


@contextmanager
def without_data() -> Iterator[None]:
    """Context in which models are made and run on tensors without data, and transformers logs nothing."""
    with (
        torch.device("meta"),
        torch.no_grad(),
        patch.object(torch, "autocast", _autocast),
        _Decided(),  # type: ignore[no-untyped-call]
        without_logs(),
    ):
        yield


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
