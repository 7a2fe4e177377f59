"""Which models sessions serve, and which of them with a store."""

from typing import Final

import transformers
from transformers import PreTrainedModel

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.attention.latents import expect_absorbed
from kvloom.integrations.transformers.cache.trial import why_wrong_in_pieces
from kvloom.integrations.transformers.models.layer_specs import expect_use
from kvloom.integrations.transformers.models.text_config import has_latents, names_rank, text_config_of
from kvloom.integrations.transformers.session.requests.groups import stateful_layers_of
from kvloom.integrations.transformers.versions import IS_4, OLDEST

SESSIONS: Final = "init_continuous_batching"
"""Name of the method of a model that makes a session."""


def expect_served(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for models that transformers' continuous batching, or ours, does not support."""
    if IS_4:
        raise UnsupportedError(
            f"continuous batching must have transformers {OLDEST} or newer, got {transformers.__version__}"
        )
    name, config = type(model).__name__, text_config_of(model)
    if not hasattr(type(model), SESSIONS):
        raise UnsupportedError(f"model must have continuous batching, which {name} has not")
    expect_use(model, "session")
    is_loaded = all(x.device.type != "meta" for x in model.parameters())
    is_stateful = stateful_layers_of(model) is not None
    if is_stateful and is_loaded and (why := why_wrong_in_pieces(model)):
        raise UnsupportedError(why)
    if has_latents(config):
        expect_absorbed(model)
    elif names_rank(config) and config.kv_lora_rank:
        raise UnsupportedError(
            f"model must cache its latents, which {name} of transformers {transformers.__version__} expands "
            "before"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"model must take its attention from AttentionInterface, which {name} does not"
        )
    if getattr(model, "_device_mesh", None) is not None or getattr(model, "tp_size", None) not in (None, 1):
        raise UnsupportedError(f"model must be on one device, got tensor parallelism in {name}")


def expect_stored(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for models whose sessions have no store."""
    if stateful_layers_of(model) is not None:
        raise UnsupportedError(
            f"store must be None for a model with recurrent states, got {type(model).__name__}"
        )
