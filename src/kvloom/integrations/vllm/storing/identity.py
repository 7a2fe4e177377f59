"""The fingerprint of a vLLM engine's model, equal to that of the same model in transformers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from vllm.transformers_utils.config import get_config, iter_rope_parameters

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.pool.identity import fingerprint_with
from kvloom.integrations.vllm.storing.folder_weights import folder_digest
from kvloom.store.fingerprint import Fingerprint, LayerFormat, rotation_in

_FORMATS: Final = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats with which vLLM loads the weights in a model's safetensors."""


def identify(engine: Any, attention: str, layers: tuple[LayerFormat, ...]) -> Fingerprint:
    """The fingerprint of an engine's model; each weight is read once.

    Args:
        engine: vLLM's configuration.
        attention: Text that names the tokens that a token sees.
        layers: Format of each layer, for all heads.

    Raises:
        UnsupportedError: the engine does not use the weights in its folder's safetensors, or these do not
            match its configuration.
    """
    model, load_format = engine.model_config, engine.load_config.load_format
    if load_format not in _FORMATS:
        raise UnsupportedError(f"load_format must be one of {_FORMATS} for a store, got {load_format!r}")
    if model.quantization is not None:
        raise UnsupportedError(f"quantization must be None for a store, got {model.quantization!r}")
    folder = Path(model.model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    effective = _load_config(model, True)
    _change(config, _load_config(model, False).to_dict(), effective.to_dict())
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=model.dtype, trust_remote_code=False)
    digest = folder_digest(type(shapes), config, model.dtype, _files(folder))
    found = fingerprint_with(shapes, digest, attention, layers, rotation_in(layers))
    return replace(found, rope=found.rope + _frequencies(effective.get_text_config(), model.max_model_len))


def _load_config(model: Any, is_effective: bool) -> Any:
    """A model's configuration as vLLM loads it, before the model's class changes it.

    Args:
        model: vLLM's ``ModelConfig``.
        is_effective: Whether to load the one that the engine uses, and not the one in the model's folder.
    """
    if not is_effective:
        return get_config(model.model, model.trust_remote_code, model.revision, model.code_revision, "hf")
    overrides = model.hf_overrides
    is_call = callable(overrides)
    nested = {} if is_call else {name: x for name, x in overrides.items() if isinstance(x, dict)}
    config = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        model._hf_config_revision or model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw={} if is_call else {name: x for name, x in overrides.items() if name not in nested},
        hf_overrides_fn=overrides if is_call else None,
    )
    if nested:
        model._apply_dict_overrides(config, nested)
    return config


def _change(config: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Set the fields of a configuration in which vLLM's ``before`` and ``after`` differ."""
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig) and isinstance(old, dict) and isinstance(new, dict):
            _change(inner, old, new)
        elif old != new:
            setattr(config, name, new)


def _frequencies(config: Any, max_length: int) -> str:
    """Text that names the RoPE frequencies of vLLM if they depend on the length in transformers; else empty.

    vLLM chooses them once for texts of any length, those of LongRoPE by the longest supported length.
    """
    chosen = []
    for said in iter_rope_parameters(config):
        kind = said.get("rope_type", "default")
        if kind == "longrope":
            chosen.append("long" if max_length > said["original_max_position_embeddings"] else "short")
        elif kind == "dynamic":
            chosen.append(kind)
    return f" in vLLM {' '.join(chosen)}" if chosen else ""


def _files(folder: Path) -> list[Path]:
    """Files that vLLM and transformers load: those that an index names, or all safetensors without one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(named))]
