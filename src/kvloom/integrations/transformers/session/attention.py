"""``attn_implementation="kvloom_paged"``: attention of a step of continuous batching.

It has its own name without a mask function, so transformers makes no mask for it. Lengths are sufficient, and
a bool mask of all new tokens of a step would be computed for nothing.

Shapes: T new tokens of all requests, H key/value heads, Hq query heads, D head dim.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvloom import ops
from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.attention.latents import (
    SESSION_ATTENTION,
    ExpandedStates,
    why_not_absorbed,
)
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.steps.step import SharedKeys

IMPLEMENTATION: Final = SESSION_ATTENTION

# Arguments that other implementations of transformers use.
_REFUSED: Final = ("head_mask", "indices", "block_indices", "sinks", "position_bias", "output_attentions")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new tokens of a layer and attend, with the signature that transformers calls.

    Args:
        module: The attention layer, with its ``layer_idx``.
        query: ``[1, Hq, T, D]``.
        key: ``[1, H, T, D]``, ``SharedKeys`` of another layer, or ``ExpandedStates``, whose latents are
            stored.
        value: As ``key``.
        attention_mask: ``None``.
        scaling: Factor of the dot product; ``1 / sqrt(D)`` if ``None``.
        dropout: Must be 0.
        cache: The ``BatchCache`` of the session.
        softcap: Bound of the scores: ``softcap * tanh(score / softcap)``.
        s_aux: ``[Hq]``, a sink of each head.
        kwargs: Arguments of other implementations, ignored; the window is that of the configuration.

    Returns:
        ``([1, T, Hq, D], None)``.

    Raises:
        StateError: there is no cache, as in a forward outside a session.
        UnsupportedError: an unsupported option is requested, or latents cannot be attended to in place.
    """
    if isinstance(key, SharedKeys):
        cache = key.cache
    if not isinstance(cache, BatchCache):
        raise StateError(
            "a session of continuous batching holds this model, and a forward of yours would see no mask: "
            "stop the session first, or pause it and set another attn_implementation"
        )
    refused = [name for name in _REFUSED if kwargs.get(name) is not None and kwargs[name] is not False]
    if dropout > 0 or attention_mask is not None or refused:
        name = "dropout" if dropout > 0 else (refused or ["attention_mask"])[0]
        raise UnsupportedError(f"attn_implementation '{IMPLEMENTATION}' has no {name}")
    layer: Any = module.layer_idx
    if not isinstance(key, ExpandedStates):
        scores = ops.Scores(scaling, softcap=softcap, sinks=s_aux)
        return cache.steps.attend(layer, query, key, value, scores), None
    absorbed = key.absorbed(value, query) if isinstance(value, ExpandedStates) else None
    if absorbed is None:
        raise UnsupportedError(
            f"sessions must attend to latents in place, which layer {layer} does not allow: "
            f"{why_not_absorbed(module) or 'its keys, values and queries are not of one product'}"
        )
    scaling = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
    scores = ops.Scores(scaling, softcap=softcap, sinks=s_aux)
    out = cache.steps.attend(layer, absorbed.query, key.latents, key.rope, scores, is_latent=True)
    return absorbed.values(out), None


AttentionInterface.register(IMPLEMENTATION, attention)
