"""Whose keys and values a model computes, and how long it takes: what a store has to know."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom.caches import CacheFormat
from kvloom.caches.storage import Storage
from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.build import cache_format, make_layers, text_config_of
from kvloom.integrations.transformers.cache import KVCache
from kvloom.store.fingerprint import Fingerprint, LayerFormat
from kvloom.store.sums import checksum
from kvloom.store.transfer import layers_of, rotation_of

_PROBED: Final = 64
"""Tokens that a model computes to tell what it keeps of them."""
_WITHOUT_EFFECT: Final = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"}
)
"""Fields of a configuration that change no keys and values, or are a field of the fingerprint."""
_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


class Identity(NamedTuple):
    """A model, as far as a store goes.

    Attributes:
        fingerprint: Whose keys and values.
        storages: Of each layer, with the tensors that it keeps.
        seconds_per_token: How long a token takes to compute among others.
    """

    fingerprint: Fingerprint
    storages: dict[int, Storage]
    seconds_per_token: float


def identify(model: Any, format: CacheFormat) -> Identity:
    """Run the model on a few tokens, and read its weights once.

    Args:
        model: A ``PreTrainedModel`` all of whose layers attend to the whole sequence.
        format: How its keys and values are kept.

    Raises:
        UnsupportedError: its weights are no tensors in memory.
    """
    _probe(model, format)
    began = time.perf_counter()
    cache = _probe(model, format)
    seconds = (time.perf_counter() - began) / _PROBED
    storages = cache.sequences[0].storages
    layers, rotation = layers_of(storages), rotation_of(storages)
    fingerprint = fingerprint_with(model, weights_digest(model.state_dict()), "full", layers, rotation)
    return Identity(fingerprint, storages, seconds)


def fingerprint_with(
    model: Any, weights: str, attention: str, layers: tuple[LayerFormat, ...], rotation: str = "none"
) -> Fingerprint:
    """The fingerprint of a model, which may have no weights in memory.

    Args:
        model: A ``PreTrainedModel``.
        weights: Digest of its weights.
        attention: Which tokens a token sees.
        layers: How each layer keeps its tokens.
        rotation: Which of keys and values are rotated, one of ``ROTATIONS``.
    """
    config = text_config_of(model)
    saved = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    rope = {name: getattr(config, name) for name in _ROPE if getattr(config, name, None) is not None}
    return Fingerprint(
        config=hashlib.sha256(_json(saved).encode()).hexdigest(),
        weights=weights,
        dtype=dtype_name(model.dtype),
        rope=_json(rope),
        attention=attention,
        rotation=rotation,
        layers=layers,
    )


def fingerprint_of(model: Any, kv: str = "auto", values: str | None = None) -> Fingerprint:
    """Whose keys and values a pool of this model has; the arguments are those of ``KVPool.for_model``.

    Raises:
        UnsupportedError: as ``identify``.
    """
    return identify(model, cache_format(text_config_of(model), kv, values=values)).fingerprint


def weights_digest(weights: Mapping[str, Any]) -> str:
    """A digest of names, dtypes, shapes and bytes of all weights, such as a model's ``state_dict()``.

    Raises:
        UnsupportedError: one is no tensor in memory.
    """
    digest = hashlib.sha256(b"kvloom weights\0")
    for name in sorted(weights):
        weight = weights[name]
        try:
            data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        # What stands for a weight on the meta device, or in another library's format, refuses one of these.
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"model must have its weights in memory as tensors for a store, got {name} as "
                f"{type(weight).__name__}"
            ) from error
        digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode() + checksum(memoryview(data)))
    return digest.hexdigest()


def _probe(model: Any, format: CacheFormat) -> KVCache:
    cache = KVCache(make_layers(model, replace(format, max_tokens=None)))
    tokens: Tensor = torch.zeros(1, _PROBED, dtype=torch.int64, device=model.device)
    was_training = model.training
    model.eval()  # or it would draw random numbers
    try:
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
    finally:
        model.train(was_training)
    return cache


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
