"""Readers of a model's text configuration."""

import functools
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvloom.errors import ArgumentError

EXPAND: Final = "expand_kv"
"""Name of the method that expands latents to keys and values, in layers that cache latents."""
_BASE: Final = PreTrainedModel.__module__


def expect_model(model: Any) -> None:
    """Raise ArgumentError unless ``model`` is a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"model must be a PreTrainedModel, got {type(model).__name__}")


def text_config_of(model: Any) -> Any:
    """The configuration of the part that generates text.

    Raises:
        ArgumentError: ``model`` is no model of transformers.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        got = (
            f"the configuration {type(model).__name__}"
            if isinstance(model, PretrainedConfig)
            else repr(model)
        )
        raise ArgumentError(f"model must be a PreTrainedModel, got {got}")
    return config.get_text_config(decoder=True)


def num_tokens_of(model: Any) -> int:
    """Number of tokens that a model takes: the rows of its embedding."""
    embedding = model.get_input_embeddings()
    return int(getattr(embedding, "weight", embedding).shape[0])


def token_ids_in(value: Any) -> list[int]:
    """Ids that a field such as ``eos_token_id`` names: a number, several of them, a tensor, or ``None``."""
    if isinstance(value, Tensor):
        value = value.flatten().tolist()
    several = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return [x for x in several if isinstance(x, int)]


def layer_config(config: Any, index: int) -> Any:
    """The configuration of one layer, which differs from ``config`` in heterogeneous models."""
    return config.per_layer_config[index] if _is_heterogeneous(config) else config


def layer_configs(config: Any) -> list[Any]:
    """Configurations of all layers, or a single one if all layers have the same."""
    if not _is_heterogeneous(config):
        return [config]
    return [layer_config(config, index) for index in range(config.num_hidden_layers)]


def _is_heterogeneous(config: Any) -> bool:
    return bool(getattr(config, "is_heterogeneous", False))


def head_dim_of(config: Any) -> int:
    """Elements of a head vector of a layer; computed if the configuration does not have the number.

    Args:
        config: Configuration of one layer, as ``layer_config``.
    """
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def head_dims_of(config: Any) -> list[tuple[int, int]]:
    """Distinct pairs of head dims of all layers: of cached keys and values, or of latents and rope keys.

    Empty without attention, and for latents that are expanded before they are cached.
    """
    return [*dict.fromkeys(filter(None, map(_head_dims_of_layer, layer_configs(config))))]


def only_head_dims(config: Any) -> tuple[int, int] | tuple[()]:
    """The only pair of ``head_dims_of``; empty if there are none or several."""
    found = head_dims_of(config)
    return found[0] if len(found) == 1 else ()


def _head_dims_of_layer(config: Any) -> tuple[int, int] | None:
    if has_latents(config):
        sizes = [vars(config).get(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
        return None if None in sizes else (int(sizes[0]), int(sizes[1]))
    has_heads = getattr(config, "head_dim", None) or getattr(config, "num_attention_heads", None)
    if names_rank(config) or not has_heads:
        return None
    return head_dim_of(config), head_dim_of(config)


def names_rank(config: Any) -> bool:
    """Whether a configuration is of latent attention; reading the attribute itself may raise."""
    return "kv_lora_rank" in vars(config) or hasattr(type(config), "kv_lora_rank")


def has_latents(config: Any) -> bool:
    """Whether models of a configuration cache latents, in this version of transformers."""
    return names_rank(config) and _has_expanding_class(type(config).__module__)


@functools.cache
def _has_expanding_class(configuration: str) -> bool:
    return any(hasattr(x, EXPAND) for x in _classes_beside(configuration))


def _classes_beside(configuration: str) -> list[type]:
    """Classes in the file of the models of a file of configurations; empty if it cannot be imported."""
    try:
        module = import_module(configuration.replace(".configuration_", ".modeling_"))
    except ImportError:
        return []
    return [x for x in vars(module).values() if isinstance(x, type)]


def works_with_sdpa(config: Any) -> bool:
    """Whether models of a configuration work with ``sdpa``; true if it is not known.

    The layers of others need not say whether they are causal, and may add masks to scores of their own.
    """
    return config is None or _has_class_with_sdpa(type(config).__module__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_class_with_sdpa(configuration: str) -> bool:
    if configuration not in _WITH_SDPA:
        _WITH_SDPA[configuration] = _find_class_with_sdpa(_classes_beside(configuration))
    return _WITH_SDPA[configuration]


_WITH_SDPA: Final[dict[str, bool]] = {}


def _find_class_with_sdpa(classes: list[type]) -> bool:
    of_models = (x for x in classes if x.__module__ != _BASE)
    said = [x._supports_sdpa for x in of_models if hasattr(x, "_supports_sdpa")]
    return not said or any(said)


def layers_of_later_passes(config: Any) -> list[int]:
    """Numbers of the layers whose later passes have keys and values of their own, in the order of the cache.

    Models that compute some layers several times, such as Dory and Inkling 2 Loop, append copies of these
    layers' caches to a cache that has no more than their layers. A ``KVCache`` has them from the start.
    """
    fields = vars(config)
    if "loop_num_passes" in fields:
        layers = range(config.loop_layer_index_start, config.loop_layer_index_end)
        return [*layers] * (config.loop_num_passes - 1)
    if fields.get("recurrent_kv_cache_mode") == "per_loop":
        first = config.n_input_layers
        return [*range(first, first + config.n_recurrent_layers)] * (config.n_recurrent_loops - 1)
    return []


def names_all_passes(config: Any) -> bool:
    """Whether a configuration counts each pass over a layer as a layer, as HRM's does."""
    return "num_layers_per_stack" in vars(config)


def why_cuts_matter(config: Any) -> str:
    """Why keys and values of models of a configuration depend on how a text is cut; empty if they do not."""
    if vars(config).get("recurrent_kv_cache_mode") == "last_loop" and config.n_recurrent_loops > 1:
        return "passes over a layer read the last one's keys of earlier forwards and their own of this one"
    if has_windows_of_keeping(config):
        return "tokens see all of their own forward, and a window of those before it"
    return ""


def has_windows_of_keeping(config: Any) -> bool:
    """Whether a window bounds what a cache keeps after a forward, and not what its tokens see.

    A token then sees as much more as there were tokens before it in its forward.
    """
    is_one = getattr(config, "model_type", "") in ("moshi", "kyutai_speech_to_text")
    return is_one and getattr(config, "sliding_window", None) is not None
