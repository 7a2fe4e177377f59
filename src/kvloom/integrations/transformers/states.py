"""Recurrent states of the layers of a cache: which there are, and whether a model goes on from them.

Some families ignore the state that they are given when several tokens follow stored ones, so that any second
piece of a text is computed wrongly, here as with transformers' own caches. So a model is tried first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvloom.caches.states import StateSpec
from kvloom.core.entries import Entry
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.build import StatefulLayer
from kvloom.integrations.transformers.cache import KVCache
from kvloom.integrations.transformers.cache_argument import as_argument
from kvloom.integrations.transformers.layers import KVCacheLayer
from kvloom.integrations.transformers.per_state import once_per_state

_FIRST: Final = 40
"""Tokens of the first of two pieces in which a model is tried."""
_SECOND: Final = 24
"""Tokens of the second."""
_OTHERS: Final = -4096
"""Times the states of a text are other states, which count in any number of bits, even of a model whose own
hardly do."""
_EPSILONS: Final = {torch.float32: 512}
"""What rounding in one layer may change of the logits of a token, relative to their root mean square.

Measured are 20 at most where experts are chosen, whose choice a rounding may change, and 5 elsewhere.
"""
_OF_HALVES: Final = 4
"""The same where the model computes in fewer bits; sums are in float32 there."""
Specs: TypeAlias = dict[int, tuple[StateSpec, ...]]
"""Of each layer by its number, its states."""
_KINDS: Final = ("conv", "recurrent")


class Trial(NamedTuple):
    """What a short text says of a model.

    Attributes:
        why_wrong: Why the model cannot be fed a text in pieces; empty if it can.
        specs: The states of each layer; none if it cannot.
        entries: Of each layer with keys and values, what it keeps of a token, unquantized; none if it cannot.
    """

    why_wrong: str
    specs: Specs
    entries: dict[int, tuple[Entry, ...]]


def stateful_layers(layers: Sequence[Any]) -> dict[int, Any]:
    """Layers with recurrent states, by their numbers."""
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, StatefulLayer)}


def specs_of(layers: Sequence[Any]) -> Specs:
    """The states of each layer that has been fed tokens and has any."""
    found: Specs = {}
    for i, layer in stateful_layers(layers).items():
        own = tuple(
            StateSpec(kind, number, tuple(x.shape[1:]), x.dtype)
            for kind in _KINDS
            for number, x in getattr(layer, f"{kind}_states").items()
            if x is not None
        )
        if own:
            found[i] = own
    return found


def states_of(layers: Sequence[Any], specs: Mapping[int, Sequence[StateSpec]]) -> dict[int, list[Tensor]]:
    """The states of each layer ``[B, ...]``, in the order of ``specs``."""
    return {i: [getattr(layers[i], f"{x.name}_states")[x.number] for x in own] for i, own in specs.items()}


def restore_states(
    layers: Sequence[Any], specs: Mapping[int, Sequence[StateSpec]], states: Mapping[int, Sequence[Tensor]]
) -> None:
    """Let layers that have no states go on from these, which they take as their own."""
    for i, own in specs.items():
        layer = layers[i]
        for spec, x in zip(own, states[i], strict=True):
            layer.lazy_initialization(**{f"{spec.name}_states": x, "state_idx": spec.number})
            getattr(layer, f"{spec.name}_states")[spec.number] = x
            layer.has_previous_state[spec.number] = True


def trial_of(model: Any) -> Trial:
    """What a short text says of a model, which reads it once for each of its last states."""
    return once_per_state(model, _tried)


def why_wrong_in_pieces(model: Any) -> str:
    """Why a model cannot be fed a text in pieces; empty if it can."""
    return trial_of(model).why_wrong


def _tried(model: Any) -> Trial:
    try:
        layers = try_states(model).layers
    except UnsupportedError as error:
        return Trial(str(error), {}, {})
    entries = {
        i: tuple(x.storage.entry for x in layer.streams if x.storage is not None)
        for i, layer in enumerate(layers)
        if isinstance(layer, KVCacheLayer)
    }
    return Trial("", specs_of(layers), entries)


def record_past(model: Any, cache: KVCache, num_tokens: int) -> None:
    """Let a cache of a model go back by so many tokens, and keep no more of a long step if that is right."""
    cache.rollback = num_tokens
    if cache.recording is not None:
        cache.recording.cuts_steps = not why_wrong_in_pieces(model)


def try_states(model: Any) -> KVCache:
    """Feed a ``PreTrainedModel`` a text whole and in two pieces, and return the cache of the pieces.

    Raises:
        UnsupportedError: what follows does not depend on the states, or differs by more than rounding.
    """
    name, size = type(model).__name__, model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, _FIRST + _SECOND + 1, device=model.device)[None] * 7919 % size
    training = [module for module in model.modules() if module.training]
    model.eval()  # or it would draw random numbers
    try:
        with torch.no_grad():
            cache, other, at_once = (KVCache.for_model(model) for _ in range(3))
            whole = _logits(model, tokens, at_once)
            _logits(model, tokens[:, :_FIRST], cache)
            _logits(model, tokens[:, :_FIRST], other)
            for layer in stateful_layers(other.layers).values():
                for x in layer.recurrent_states.values():
                    if x is not None:
                        x.mul_(_OTHERS)
            pieces = _logits(model, tokens[:, _FIRST:], cache)
            from_others = _logits(model, tokens[:, _FIRST:], other)
    finally:
        for module in training:
            module.training = True
    has_recurrence = any(x.name == "recurrent" for own in specs_of(cache.layers).values() for x in own)
    if has_recurrence and torch.equal(pieces, from_others):
        raise UnsupportedError(
            f"model must go on from its recurrent states, but {name} computes the same {_SECOND} tokens with "
            f"others: fed in several pieces it is wrong, with every cache"
        )
    expected = whole[:, _FIRST:].float()
    # Of the median token: where experts are chosen, a rounding may change all of some tokens.
    found = float((pieces.float() - expected).square().mean(2).sqrt().median())
    scale = float(expected.square().mean().sqrt())
    eps = torch.finfo(model.dtype).eps
    allowed = _EPSILONS.get(model.dtype, _OF_HALVES) * eps * len(cache.layers) ** 0.5 * scale
    if not found <= allowed:
        raise UnsupportedError(
            f"model must compute a text in two pieces as in one, but outputs of {name} differ by {found:.1e}"
            f", and by rounding {allowed:.1e} at most: fed in several pieces it is wrong, with every cache"
        )
    return cache


def _logits(model: Any, tokens: Tensor, cache: KVCache) -> Tensor:
    """Logits, or hidden states of a model without a head, of all tokens."""
    output = model(input_ids=tokens, use_cache=True, **as_argument(model, cache))
    found: Tensor = output[0]
    return found
