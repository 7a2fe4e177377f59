"""Trials whether a model is causal, and whether it continues correctly from recurrent states.

Some families ignore the given state when several tokens follow stored ones. They compute the second piece of
any text wrongly, with transformers' own caches, too. So each model is tried first.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.cache.build import make_layers
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.stateful_cache import StatefulCache
from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.encoders import PREFIX, random_outputs
from kvloom.integrations.transformers.models.found_states import EncoderOutputs
from kvloom.integrations.transformers.models.layer_specs import EARLIER_ALONE, layers_of
from kvloom.integrations.transformers.models.loading import summary_of
from kvloom.integrations.transformers.models.positions import positions_of
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.smoothing.inputs import token_ids
from kvloom.integrations.transformers.states.specs import Specs, specs_of, stateful_layers

_FIRST: Final = 40
"""Number of tokens of the first of two pieces in which a model is tried."""
_SECOND: Final = 24
"""Number of tokens of the second piece."""
_ENCODED: Final = 8
"""Number of tokens of an encoder, for a decoder that is tried."""
_OTHERS: Final = -4096
"""Factor that makes other states of a text's states, large enough to change outputs in every dtype, even of a
model whose own states hardly matter."""
_EPSILONS: Final = {torch.float32: 512}
"""Allowed rounding of a token's logits by one layer, in epsilons relative to their root mean square.

Measured were 20 at most in models with experts, where rounding may change the choice, and 5 in others.
"""
_OF_HALVES: Final = 4
"""The same for dtypes of fewer bits, whose sums are in float32."""


class Trial(NamedTuple):
    """Result of trying a model with a short text.

    Attributes:
        why_wrong: Why the model cannot be fed a text in pieces; empty if it can.
        specs: Specs of the states of each layer; empty if it cannot.
    """

    why_wrong: str
    specs: Specs


def trial_of(model: Any) -> Trial:
    """Result of trying a model with a short text, computed once for each of its last states."""
    return once_per_state(model, _tried)


def why_wrong_in_pieces(model: Any) -> str:
    """Why a model cannot be fed a text in pieces; empty if it can."""
    return trial_of(model).why_wrong


def _tried(model: Any) -> Trial:
    try:
        return Trial("", specs_of(try_states(model).layers))
    except UnsupportedError as error:
        return Trial(str(error), {})


def expect_causal(model: Any) -> None:
    """Raise UnsupportedError unless what a model computes of tokens depends on earlier tokens alone.

    Configurations do not tell: a BERT with a head for language attends to all tokens unless it is a decoder.
    """
    if why := once_per_state(model, _why_not_causal):
        raise UnsupportedError(why)


def _why_not_causal(model: Any) -> str:
    if model.device.type == "meta":
        return ""
    name, count = type(model).__name__, min(_FIRST + _SECOND, positions_of(model) or _FIRST + _SECOND)
    half, tokens = count // 2, _tokens(model, 2 * count)
    one, other = tokens[:, :count], torch.cat([tokens[:, :half], tokens[:, half - count :]], dim=1)
    try:
        with undisturbed(model), _in_own_dtype(model):
            expected, found = (_logits(model, x, None)[:, :half].float() for x in (one, other))
    except Exception as error:  # whatever a model raises without what it needs beside tokens
        return f"model must compute a short text, got {name}: {summary_of(error)}"
    differs, allowed = _distance(model, found, expected, len(layers_of(model)))
    if not differs > allowed:  # not a number is what broken weights compute, causal or not
        return ""
    return (
        f"{EARLIER_ALONE}, but outputs of {name} differ by {differs:.1e} with other tokens behind them, and "
        f"by rounding {allowed:.1e} at most"
    )


def reads_encoder_again(model: Any) -> bool:
    """Whether an encoder-decoder reads the outputs of its encoder, even if its cache has their keys."""
    return once_per_state(model, _reads_encoder_again)


def _reads_encoder_again(model: Any) -> bool:
    cache, one = EncoderDecoderCache(DynamicCache(), DynamicCache()), _tokens(model, 1)
    rows = EncoderOutputs.of_rows(random_outputs(model, _ENCODED)["encoder_outputs"])
    found = {"encoder_outputs": EncoderOutputs.joined(rows, model.device, cache)}
    with undisturbed(model), _in_own_dtype(model):
        _logits(model, one, cache)
        try:
            _logits(model, one, cache, found)
        except StateError:
            return True
    return False


def reads_padding_in_pieces(model: Any, rows: Sequence[Sequence[int]]) -> bool:
    """Whether a decoder computes rows with padding tokens in two pieces differently than as a whole.

    Some count positions without padding, and others hide it, in each forward for itself.
    """
    given = _padding_of(model).intersection(chain.from_iterable(rows))
    return bool(given) and bool(given & once_per_state(model, _padding_read_in_pieces))


def _padding_read_in_pieces(model: Any) -> set[int]:
    return {x for x in _padding_of(model) if _is_read_in_pieces(model, x)}


def _padding_of(model: Any) -> set[int]:
    """Padding tokens of a model and of its decoder."""
    configs = (model.config, text_config_of(model))
    return {x for config in configs if (x := getattr(config, "pad_token_id", None)) is not None}


def _is_read_in_pieces(model: Any, token: int) -> bool:
    tokens, cache = _tokens(model, _ENCODED), EncoderDecoderCache(DynamicCache(), DynamicCache())
    tokens[:, 1] = token
    with undisturbed(model), _in_own_dtype(model):
        expected = _logits(model, tokens, None)
        try:
            found = [_logits(model, x, cache) for x in tokens.split(_ENCODED // 2, dim=1)]
        except Exception:  # whatever a model raises that takes one token at a time
            return True
    differs, allowed = _distance(model, found[1].float(), expected[:, _ENCODED // 2 :].float(), 2)
    return not differs <= allowed


def record_past(model: Any, cache: StatefulCache, num_tokens: int) -> None:
    """Let a cache remove up to ``num_tokens`` tokens; long steps are cut if the model is right in pieces."""
    cache.rollback = num_tokens
    if cache.recording is not None:
        cache.recording.cuts_steps = not why_wrong_in_pieces(model)


def try_states(model: Any) -> StatefulCache:
    """Feed a ``PreTrainedModel`` a text whole and in two pieces, and return the cache of the pieces.

    Raises:
        UnsupportedError: what follows does not depend on the states, or differs by more than rounding.
    """
    name, tokens = type(model).__name__, _tokens(model, _FIRST + _SECOND)
    with undisturbed(model), _in_own_dtype(model):
        format = cache_format(text_config_of(model))
        cache, other, at_once = (StatefulCache(make_layers(model, format)) for _ in range(3))
        whole = _logits(model, tokens, at_once)
        _logits(model, tokens[:, :_FIRST], cache)
        _logits(model, tokens[:, :_FIRST], other)
        for layer in stateful_layers(other.layers).values():
            for x in layer.recurrent_states.values():
                if x is not None:
                    x.mul_(_OTHERS)
        pieces = _logits(model, tokens[:, _FIRST:], cache)
        from_others = _logits(model, tokens[:, _FIRST:], other)
    has_recurrence = any(x.name == "recurrent" for own in specs_of(cache.layers).values() for x in own)
    if has_recurrence and torch.equal(pieces, from_others):
        raise UnsupportedError(
            f"model must go on from its recurrent states, but {name} computes the same {_SECOND} tokens with "
            f"others: fed in several pieces it is wrong, with every cache"
        )
    found, allowed = _distance(model, pieces.float(), whole[:, _FIRST:].float(), len(cache.layers))
    if not found <= allowed:
        raise UnsupportedError(
            f"model must compute a text in two pieces as in one, but outputs of {name} differ by {found:.1e}"
            f", and by rounding {allowed:.1e} at most: fed in several pieces it is wrong, with every cache"
        )
    return cache


def states_of_text(model: Any, num_tokens: int) -> StatefulCache:
    """The cache of a short text of one row, which a model computes at once."""
    cache = StatefulCache(make_layers(model, cache_format(text_config_of(model))))
    with _in_own_dtype(model):
        _logits(model, _tokens(model, num_tokens), cache)
    return cache


def _tokens(model: Any, count: int) -> Tensor:
    """Tokens ``[1, count]`` of the model's vocabulary, none of them special."""
    text = text_config_of(model)
    size = min(model.get_input_embeddings().weight.shape[0], getattr(text, "vocab_size", None) or math.inf)
    return token_ids(int(size), (model.config, text), count)[None].to(model.device)


def _in_own_dtype(model: Any) -> torch.autocast:
    """Context of the weights' dtype.

    What is found is kept, and its rounding is that of the weights' dtype, not of the caller's autocast,
    without which weights of several dtypes may not compute.
    """
    dtypes = {x.dtype for x in model.parameters() if x.is_floating_point()}
    is_needed = len(dtypes) > 1 and torch.is_autocast_enabled(model.device.type)
    return torch.autocast(model.device.type, enabled=is_needed)


def _distance(model: Any, found: Tensor, expected: Tensor, num_layers: int) -> tuple[float, float]:
    """Distance of outputs ``[1, T, V]``, and the most that rounding explains.

    It is the median over tokens, since rounding may change the choice of experts of some tokens.
    """
    differs = float((found - expected).square().mean(2).sqrt().median())
    scale = float(expected.square().mean().sqrt())
    eps = torch.finfo(model.dtype).eps
    return differs, _EPSILONS.get(model.dtype, _OF_HALVES) * eps * num_layers**0.5 * scale


def _logits(
    model: Any, tokens: Tensor, cache: Cache | None, encoded: Mapping[str, Any] | None = None
) -> Tensor:
    """Logits, or hidden states of a model without a head, of all tokens.

    A decoder beside an encoder is given ``encoded``, the encoder's outputs; ``None`` for random ones.
    """
    given = {} if cache is None else as_argument(model, cache)
    name = "input_ids"
    if model.config.is_encoder_decoder:
        name = f"{PREFIX}{name}"
        given |= random_outputs(model, _ENCODED) if encoded is None else encoded
    output = model(**{name: tokens}, use_cache=cache is not None, **given)
    found: Tensor = output[0]
    return found
