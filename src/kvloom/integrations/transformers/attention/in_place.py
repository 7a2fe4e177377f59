"""``attn_implementation="kvloom"``: attention that reads a ``KVCache`` in place.

Shapes: B sequences, Q queries of each, N tokens of keys and values, H key/value heads, Hq query heads, Dk
and Dv head dims.
"""

import inspect
import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches import TokenIndex, Tokens
from kvloom.caches.tensors.chosen import attend_chosen
from kvloom.caches.tensors.token_index import dense_index
from kvloom.caches.tensors.tokens import added, dense
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.errors import ArgumentError, ShapeError, UnsupportedError
from kvloom.integrations.transformers.attention.crossed import CrossStates, attend_crossed
from kvloom.integrations.transformers.attention.latents import Absorbed, ExpandedStates
from kvloom.integrations.transformers.attention.lazy_states import LazyStates, refuse_gradient
from kvloom.integrations.transformers.attention.lazy_tensor import LazyTensor, as_autocast
from kvloom.integrations.transformers.attention.masks import CompactMask, visible

IMPLEMENTATION: Final = "kvloom"

# Arguments that other implementations of transformers use: chosen blocks of keys, sinks of each query, pages
# of continuous batching.
_REFUSED: Final = ("head_mask", "block_indices", "sinks", "cache")

_ASKED: Final = frozenset((*_REFUSED, "output_attentions"))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | CompactMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature that transformers calls.

    Args:
        module: The attention layer; its ``is_causal`` counts if the argument is ``None``.
        query: ``[B, Hq, Q, Dk]``.
        key: ``[B, H, N, Dk]``, a tensor or the keys that ``KVCache.update`` returned.
        value: ``[B, H, N, Dv]``, the same of values.
        attention_mask: Result of ``masks.attention_mask``, or any mask ``[B or 1, Hq or 1, Q or 1, N]``, bool
            or float; a float mask is added to the scores.
        dropout: Must be 0.
        scaling: Factor of the dot product; ``1 / sqrt(Dk)`` if ``None``.
        is_causal: Whether a query sees no later key; used without a mask.
        softcap: Bound of the scores: ``softcap * tanh(score / softcap)``.
        s_aux: ``[Hq]``, a sink of each head.
        position_bias: ``[B or 1, Hq, Q, N]``, added to the scores.
        indices: ``[B, Q, K]`` int32, the distinct keys chosen for each query; all if ``None``. A query sees
            the chosen keys that are also visible without ``indices``.
        kwargs: Arguments of other implementations, ignored.

    Returns:
        ``([B, Q, Hq, Dv], None)``.

    Raises:
        ShapeError: the mask has another dtype.
        ArgumentError: the mask has another shape.
        UnsupportedError: dropout, attention weights or another unsupported option is requested.
    """
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = as_autocast(query, key, value)
    if dropout > 0 or not _ASKED.isdisjoint(kwargs):
        _expect_served(dropout, kwargs)
    if isinstance(key, CrossStates) and isinstance(value, CrossStates) and key.is_pair_of(value):
        whole = attention_mask.gather() if isinstance(attention_mask, CompactMask) else attention_mask
        scores = ops.Scores(scaling, is_causal=False, softcap=softcap, sinks=s_aux)
        return refuse_gradient(
            attend_crossed(key, query, scores, whole, position_bias), key.untrained, value.untrained
        ), None
    if indices is not None and indices.shape[2] >= _num_columns(key):
        indices = None
    absorbed: Absorbed | None = None
    if isinstance(key, ExpandedStates) and isinstance(value, ExpandedStates):
        absorbed = key.absorbed(value, query, None if indices is None else indices.shape[2])
        if absorbed is not None:
            scaling = 1.0 / math.sqrt(query.shape[3]) if scaling is None else scaling
            key, value, query = key.latents, key.rope, absorbed.query
    expanded = key.tokens(value) if isinstance(key, ExpandedStates) else None
    are_lazy = isinstance(key, LazyStates) and isinstance(value, LazyStates)
    if are_lazy and indices is not None and absorbed is None:
        are_lazy = key.tokens.exact is not None  # gathered, all queries would read one and the same window
    if expanded is not None:
        tokens, key, value = expanded, key.latents, key.rope
    elif are_lazy and key.is_pair_of(value):
        tokens = key.tokens if absorbed is None else replace(key.tokens, is_latent=True)
    else:
        key, value = (x.gather() if isinstance(x, LazyTensor) else x for x in (key, value))
        tokens = _dense(key, value, attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    first = firsts = mask = None
    if isinstance(attention_mask, CompactMask):
        # All layers get the same mask, and may have different lengths.
        is_any_length = (
            isinstance(key, LazyStates) and tokens.window is None and attention_mask.is_causal_only
        )
        _expect_sizes(attention_mask, query, tokens, is_any_length)
        causal, first, firsts = True, attention_mask.first, attention_mask.firsts
        if tokens.window is None and attention_mask.window is not None:
            tokens = replace(tokens, window=attention_mask.window)
    elif attention_mask is not None:
        causal, mask = False, _whole(attention_mask, query, tokens)
    window = tokens.window
    if window is not None and _sees_all(tokens.index.num_columns, window, attention_mask, query.shape[2]):
        tokens = replace(tokens, window=None)
    is_causal = mask is None and position_bias is None and tokens.window is None and bool(causal)
    if indices is not None and absorbed is not None and is_causal:
        out = attend_chosen(tokens, query, indices, ops.Scores(scaling, softcap=softcap, sinks=s_aux), first)
    else:
        if mask is None and (position_bias is not None or indices is not None):
            mask = _visible(first, bool(causal), query.shape[2], tokens)
            causal, first = False, None
        if indices is not None and mask is not None:
            mask = _of_chosen(mask, indices)
        if position_bias is not None and mask is not None:
            mask = added(mask) + position_bias
        if s_aux is None and not torch.compiler.is_compiling():
            scores = _scores(scaling, bool(causal), softcap)
        else:
            scores = ops.Scores(scaling, bool(causal), softcap=softcap, sinks=s_aux)
        out = tokens.attend(query, scores, first=first, mask=mask, firsts=firsts)
    if absorbed is not None:
        out = absorbed.values(out)
    if torch.is_grad_enabled():
        out = refuse_gradient(out, *(x.untrained for x in (key, value) if isinstance(x, LazyStates)))
    return out, None


@lru_cache
def _scores(scale: float | None, is_causal: bool, softcap: float | None) -> ops.Scores:
    """Formula of scores, the same object in all layers that share it."""
    return ops.Scores(scale, is_causal, softcap=softcap)


def _expect_served(dropout: float, options: dict[str, Any]) -> None:
    """Raise UnsupportedError for options that this attention does not implement."""
    for name in _REFUSED:
        if options.get(name) is not None:
            break
    else:
        name = "dropout" if dropout > 0 else "output_attentions"
        if not (dropout > 0 or options.get("output_attentions")):
            return
    raise UnsupportedError(f"attn_implementation 'kvloom' has no {name}: use 'eager'")


def is_refused_by(model: torch.nn.Module) -> bool:
    """Whether layers of a model give every call an argument that this attention refuses.

    These are sinks of each query, as of Inkling 2, and blocks that an indexer chooses, as of MiniMax M3.
    """
    for layer in model.modules():
        kind: Any = type(layer)
        names = _keywords(kind)
        if "sinks" in names or ("block_indices" in names and getattr(layer, "indexer", None) is not None):
            return True
    return False


@cache
def _keywords(kind: Any) -> frozenset[Any]:
    """Names, among other constants, of the keyword arguments of calls in the forward of a class."""
    code = getattr(inspect.unwrap(vars(kind).get("forward", _keywords)), "__code__", None)
    found = () if code is None else code.co_consts
    tuples = (x for x in found if isinstance(x, tuple))
    return frozenset((*(x for x in found if isinstance(x, str)), *(y for x in tuples for y in x)))


def _num_columns(key: Any) -> int:
    """N of keys ``[B, H, N, Dk]``; keys made of latents are not expanded to find it."""
    return int((key.latents if isinstance(key, ExpandedStates) else key).shape[2])


def _of_chosen(mask: Tensor, indices: Tensor) -> Tensor:
    """A mask ``[B or 1, Hq or 1, Q, N]`` that hides all keys except the chosen ones, ``[B, Q, K]``."""
    rows, num_new, num_columns = *indices.shape[:2], mask.shape[-1]
    chosen = torch.zeros(rows, num_new, num_columns + 1, dtype=torch.bool, device=mask.device)
    where = indices.long().masked_fill(indices < 0, num_columns)  # an extra column for negative indices
    chosen = chosen.scatter(2, where, value=True)[..., :num_columns].unsqueeze(1)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, float("-inf"))


def _whole(mask: Tensor, query: Tensor, tokens: Tokens) -> Tensor:
    """A given mask, checked and expanded to ``[B or 1, Hq or 1, Q, N]``."""
    if mask.dtype != torch.bool and mask.dtype not in FLOAT_DTYPES:
        raise ShapeError(f"attention_mask must be bool, float32, float16 or bfloat16, got {mask.dtype}")
    _expect_sizes(mask, query, tokens)
    return mask[..., : tokens.index.num_columns].expand(-1, -1, query.shape[2], -1)


def _expect_sizes(
    mask: Tensor | CompactMask, query: Tensor, tokens: Tokens, is_any_length: bool = False
) -> None:
    """Raise ArgumentError unless a mask is ``[B or 1, Hq or 1, Q or 1, N]``, or has any N if allowed."""
    sizes, num_columns = list(mask.shape), tokens.index.num_columns
    # Fixed storage may have fewer columns than a mask. Columns of a window may begin after the first token.
    origins = tokens.index.origins
    is_exact = isinstance(mask, CompactMask) or (tokens.window is not None and origins is not None)
    fits = is_any_length or sizes[-1] == num_columns or (sizes[-1] > num_columns and not is_exact)
    if len(sizes) != 4 or not fits:
        raise ArgumentError(f"attention_mask must have 4 axes and {num_columns} columns, got {sizes}")
    rows, heads, num_new, _ = query.shape
    if any(n not in (1, m) for n, m in zip(sizes, (rows, heads, num_new), strict=False)):
        raise ArgumentError(
            f"attention_mask must have {rows} rows, {heads} heads and {num_new} queries, or 1 for all, got "
            f"{sizes}"
        )


def _sees_all(num_columns: int, window: int, mask: Tensor | CompactMask | None, num_new: int) -> bool:
    """Whether queries see all columns up to their own, though the cache keeps no more than a window.

    Moshi and Kyutai's speech to text make no mask of a window: it bounds what is kept after a forward.
    """
    if num_new == 1 or num_columns <= window:
        return False
    return mask is None or (isinstance(mask, CompactMask) and mask.window is None)


def _visible(first: Tensor | None, causal: bool, num_new: int, tokens: Tokens) -> Tensor:
    """``[B, 1, Q, N]`` bool: the columns that the last ``num_new`` tokens see without a mask."""
    index = tokens.index
    lengths = index.lengths if index.origins is None else index.lengths - index.origins
    return visible(lengths, num_new, index.num_columns, first=first, causal=causal, window=tokens.window)


def _dense(key: Tensor, value: Tensor, mask: Tensor | CompactMask | None) -> Tokens:
    """Tokens of dense keys and values ``[B, H, N, D]``, as many of each sequence as the mask says."""
    rows, num_columns = key.shape[0], key.shape[2]
    taken: int | Tensor = num_columns
    if isinstance(mask, CompactMask):
        lengths = mask.lengths
        taken = num_columns if mask.taken is None else mask.taken
    else:
        lengths = torch.full((rows,), num_columns, device=key.device)
    spans = ((0, taken, 0),) * rows if isinstance(taken, int) else None
    index = dense_index(rows, num_columns, key.device)
    return dense(key, value, TokenIndex(index, lengths, num_columns, spans=spans))
