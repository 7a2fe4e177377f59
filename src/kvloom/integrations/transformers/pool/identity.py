"""Identity of a model in a store: fingerprints of its cache, a probe, and its time per token."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvloom.caches import CacheFormat
from kvloom.caches.tensors.storage import Storage
from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.tensor_state import bytes_sum
from kvloom.integrations.transformers.cache.build import make_layers
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.cache.legacy import legacy_pairs
from kvloom.integrations.transformers.fingerprint.context import context_of
from kvloom.integrations.transformers.fingerprint.module_reader import behavior_digest
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.rope import has_dynamic_rope
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.smoothing import smoothing_for
from kvloom.integrations.transformers.states.specs import specs_of, states_of
from kvloom.store.fingerprint import Fingerprint, LayerFormat, Probe
from kvloom.store.transfer import entries_of, rotation_of, smoothing_digest

if TYPE_CHECKING:
    from kvloom.integrations.transformers.pool.states import PoolStates

_TIMED: Final = 64
"""Tokens that a model computes to find its cache's formats and its time per token."""
_PROBED: Final = 8
"""Tokens of the probe, whose keys and values are compared with those of other processes."""
_EPSILONS: Final = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}
"""Allowed root mean square of rounding after one layer, in epsilons relative to that of keys or values.

Different ways to compute the same model were measured to differ by 8 and 1.2, in 32 layers. Sums are in
float32 for all dtypes, so their rounding counts for float32 alone.
"""
_SIDES: Final = ("keys", "values")
_WITHOUT_EFFECT: Final = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"}
)
"""Fields of a configuration that change no keys and values, or have a field in the fingerprint."""
_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


class Identity(NamedTuple):
    """Identity of a model in its present state, for a store.

    Attributes:
        fingerprints: Fingerprint of each group of layers: first of the layers that attend to all tokens, then
            of the layers of each window, then of their residual windows and of recurrent states.
        storages: Storages of each group, by layer.
        seconds_per_token: Time to compute a token among others.
        probe: Keys and values of a few tokens.
    """

    fingerprints: list[Fingerprint]
    storages: list[dict[int, Storage]]
    seconds_per_token: float
    probe: Probe


def identify(model: Any, format: CacheFormat, states: "PoolStates | None" = None) -> Identity:
    """Run the model on a few tokens, read its weights once, and return its identity.

    Args:
        model: A ``PreTrainedModel`` whose layers keep tokens in pages, or recurrent states.
        format: Cache format of its keys and values.
        states: Pages of its recurrent states, if prefixes are found with states.

    Raises:
        UnsupportedError: a weight is no tensor in memory.
    """
    _run(model, format, _TIMED)
    began = time.perf_counter()
    cache = _run(model, format, _TIMED)
    seconds = (time.perf_counter() - began) / _TIMED
    weights, context, fingerprints = weights_digest(model.state_dict()), context_of(model).text(), []
    groups = [x for x in cache.sequences if x.is_required]
    others = _differing_layers(format, cache) if len(groups) > 1 else ""
    for group in groups:
        attention = ("full" if group.window is None else f"window of {group.window}") + others
        attention += "" if states is None else f", in pieces of {states.interval} tokens"
        kept = entries_of(group.storages), rotation_of(group.storages)
        recent, smoothing = format.recent or 0, smoothing_digest(group.storages)
        fingerprints.append(fingerprint_with(model, weights, attention, *kept, recent, smoothing, context))
    for residual in cache.sequences[len(groups) :]:
        codes = next(i for i, x in enumerate(groups) if residual.storages.keys() <= x.storages.keys())
        own, layers = fingerprints[codes], entries_of(residual.storages)
        exact = replace(own, rotation="none", layers=layers, recent=0, smoothing="")
        fingerprints.append(replace(exact, attention=f"residual window of {own.digest.hex()}"))
    storages = [group.storages for group in cache.sequences]
    if states is not None:
        behind = hashlib.sha256(b"".join(x.digest for x in fingerprints)).hexdigest()
        layers = entries_of(of_states := states.pages.new_storages())
        exact = replace(fingerprints[0], rotation="none", layers=layers, recent=0, smoothing="")
        fingerprints.append(replace(exact, attention=f"states behind {behind}"))
        storages.append(of_states)
    return Identity(fingerprints, storages, seconds, probe_of(model))


def _differing_layers(format: CacheFormat, cache: KVCache) -> str:
    """Digest of the formats of all layers if they differ, else an empty text.

    A layer's keys and values depend on the formats of all layers before it. A fingerprint has those of its
    own group alone, which say all if the formats do not differ.
    """
    if len({(replace(x, smoothing=None), x.smoothing is None) for x in format.layers or ()}) < 2:
        return ""
    storages = {i: x for group in cache.sequences if group.is_required for i, x in group.storages.items()}
    text = f"{entries_of(storages)} {smoothing_digest(storages)}"
    return f", among {hashlib.sha256(text.encode()).hexdigest()}"


def probe_of(model: Any) -> Probe:
    """Keys, values and states of a few fixed tokens in all layers, as the model computes them now."""
    layers = _run(model, CacheFormat(), _PROBED).layers
    paged = [(i, layer) for i, layer in enumerate(layers) if isinstance(layer, KVCacheLayer)]
    pairs = legacy_pairs([layer for _, layer in paged])
    tensors = {
        f"{name}.{i}": x
        for (i, _), pair in zip(paged, pairs, strict=True)
        for name, x in zip(_SIDES, pair, strict=True)
    }
    specs = specs_of(layers)
    for i, states in states_of(layers, specs).items():
        for spec, x in zip(specs[i], states, strict=True):
            tensors[f"{spec.name}{spec.number}.{i}"] = x
    mine = {name: x.cpu().contiguous() for name, x in tensors.items()}
    return Probe(save(mine), partial(_difference, mine))


def _difference(mine: Mapping[str, Tensor], theirs: bytes) -> str:
    """Message that says where another probe differs by more than rounding; empty if nowhere.

    Rounding errors of layers have random signs, so they grow with the root of the number of layers.
    """
    try:
        others = load(theirs)
    except SafetensorError as error:
        return f"the probe is damaged: {error}"
    if others.keys() != mine.keys():
        return f"the probe has {len(others)} tensors, not {len(mine)}"
    for name, x in mine.items():
        y = others[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"{name} is {y.dtype} {list(y.shape)}, not {x.dtype} {list(x.shape)}"
        size = float(x.double().square().mean().sqrt())
        found = float((x.double() - y.double()).square().mean().sqrt())
        layer = int(name.split(".")[1])
        allowed = _EPSILONS[x.dtype] * torch.finfo(x.dtype).eps * (layer + 1) ** 0.5 * size
        if not found <= allowed:
            return f"{name} differ by {found:.1e}, by rounding {allowed:.1e} at most"
    return ""


def model_digest(model: Any) -> str:
    """A digest of weights, other buffers, configuration, behavior and settings; the same in every process.

    Raises:
        UnsupportedError: a weight is no tensor in memory.
    """
    parts = [
        _config_digest(model),
        weights_digest(model.state_dict() | _other_buffers(model)),
        behavior_digest(model),
        str(model.dtype),
    ]
    if context := context_of(model).text():
        parts.append(context)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def fingerprint_with(
    model: Any,
    weights: str,
    attention: str,
    layers: tuple[LayerFormat, ...],
    rotation: str = "none",
    recent: int = 0,
    smoothing: str = "",
    context: str = "",
) -> Fingerprint:
    """The fingerprint of a model; its weights need not be in memory.

    Args:
        model: A ``PreTrainedModel``.
        weights: Digest of its weights.
        attention: Text that names the tokens that a token sees.
        layers: Format of each layer.
        rotation: Which of keys and values are rotated, one of ``ROTATIONS``.
        recent: Residual window.
        smoothing: Digest of the smoothing of keys.
        context: Settings of torch in which the model computes, as ``Context.text``.
    """
    config = text_config_of(model)
    rope = {name: getattr(config, name) for name in _ROPE if getattr(config, name, None) is not None}
    return Fingerprint(
        config=_config_digest(model),
        weights=weights,
        dtype=dtype_name(model.dtype),
        rope=_json(rope),
        attention=attention,
        rotation=rotation,
        layers=layers,
        behavior=behavior_digest(model),
        recent=recent,
        smoothing=smoothing,
        context=context,
    )


def fingerprint_of(model: Any, kv: str = "auto", values: str | None = None) -> Fingerprint:
    """The fingerprint of the first group of layers in a pool of this model.

    Arguments are those of ``KVPool.for_model``. The first group has the layers without a window, or those of
    the first window if all have one.

    Raises:
        UnsupportedError: as ``identify``.
    """
    return identify(
        model, cache_format(text_config_of(model), kv, values=values, smoothing=smoothing_for(model, kv))
    ).fingerprints[0]


def weights_digest(weights: Mapping[str, Any]) -> str:
    """A digest of names, dtypes, shapes and bytes of all weights, such as a model's ``state_dict()``.

    Raises:
        UnsupportedError: a weight is no tensor in memory.
    """
    return digest_of_sums({name: weight_sum(name, weight) for name, weight in weights.items()})


def digest_of_sums(sums: Mapping[str, bytes]) -> str:
    """``weights_digest`` for the results of ``weight_sum``, by name of the weight."""
    digest = hashlib.sha256(b"kvloom weights\0")
    for name in sorted(sums):
        digest.update(f"{name} ".encode() + sums[name])
    return digest.hexdigest()


def weight_sum(name: str, weight: Any) -> bytes:
    """Dtype, shape and a checksum of a weight's bytes.

    Raises:
        UnsupportedError: it is no tensor in memory.
    """
    found = bytes_sum(weight)
    if found is None:
        raise UnsupportedError(
            f"model must have its weights in memory as tensors for a store, got {name} as "
            f"{type(weight).__name__}"
        )
    return f"{weight.dtype} {list(weight.shape)} ".encode() + found


def _other_buffers(model: Any) -> dict[str, Any]:
    """Buffers that are no part of the ``state_dict()``, except those that change with the length of texts."""
    return {
        f"{path}.{name}": module.get_buffer(name)
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None and not has_dynamic_rope(module)
    }


def _config_digest(model: Any) -> str:
    saved = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    return hashlib.sha256(_json(saved).encode()).hexdigest()


def _run(model: Any, format: CacheFormat, num_tokens: int) -> KVCache:
    """The cache after a forward of tokens that depend on the size of the vocabulary alone."""
    cache = KVCache(make_layers(model, replace(format, max_tokens=None)))
    size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, num_tokens + 1, device=model.device)[None] * 7919 % size
    with undisturbed(model):
        model(input_ids=tokens, use_cache=True, **as_argument(model, cache))
    return cache


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
