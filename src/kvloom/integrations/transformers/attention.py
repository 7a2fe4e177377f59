"""``attn_implementation="kvloom"``: attention that reads a ``KVCache`` where it lies.

Letters: B sequences, Q queries of each, N columns of keys and values, H key/value heads, Hq query heads, Dk
and Dv head dims.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kvloom import ops
from kvloom.caches import Placement, StoredTokens
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView, head_dim_of
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.masks import is_compact, taken_by, visible, window_of

IMPLEMENTATION: Final = "kvloom"

_DENSE: Final = CacheLayout("B H S D")


class StoredStates:
    """Keys or values ``[B, H, N, D]`` of a layer, left where they lie.

    Attention gets no more of a cache than what its ``update`` returned, so ``update`` returns these. Whatever
    else computes with them gets the gathered tensor.

    Args:
        tokens: The columns.
        newest: The keys or values of the last columns, as attention computes with them.
        key_states: The keys that belong to these values; ``None`` if these are the keys.
    """

    def __init__(
        self, tokens: StoredTokens, newest: Tensor, key_states: "StoredStates | None" = None
    ) -> None:
        self.tokens = tokens
        self.dtype = newest.dtype
        self.device = tokens.view.device
        wants_gradient = (
            newest.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        )
        self.untrained = newest if wants_gradient else None
        """What would have a gradient if it had not been stored; compilers would trace what raises."""
        self._key_states = key_states
        self._gathered: tuple[Tensor, Tensor] | None = None

    @classmethod
    def pair(cls, tokens: StoredTokens, key: Tensor, value: Tensor) -> tuple["StoredStates", "StoredStates"]:
        """Keys and values, of which ``key`` and ``value`` were stored last."""
        key_states = cls(tokens, key)
        return key_states, cls(tokens, value, key_states)

    @property
    def shape(self) -> torch.Size:
        """``[B, H, N, D]``."""
        view, placement = self.tokens.view, self.tokens.placement
        if self._key_states is None:
            head_dim = head_dim_of(view.key, view.key_scale)
        else:
            head_dim = 0 if view.value is None else head_dim_of(view.value, view.value_scale)
        return torch.Size((len(placement.lengths), view.num_heads, placement.num_columns, head_dim))

    def gather(self) -> Tensor:
        """The tensor, dequantised; keys and values are gathered together, once."""
        keys = self if self._key_states is None else self._key_states
        if keys._gathered is None:
            keys._gathered = self.tokens.gather(keys.dtype)
        return _refuse_gradient(keys._gathered[0 if keys is self else 1], self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(
            lambda x: x.gather() if isinstance(x, cls) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gather(), name)


def _operator(name: str) -> Any:
    def call(self: StoredStates, *args: Any) -> Any:
        return getattr(self.gather(), name)(*args)

    return call


# Python looks operators up in the class, where ``__getattr__`` is not asked.
for _name in (
    "getitem", "len", "iter", "neg", "add", "sub", "mul", "truediv", "matmul",
    "radd", "rsub", "rmul", "rtruediv", "rmatmul",
):  # fmt: skip
    setattr(StoredStates, f"__{_name}__", _operator(f"__{_name}__"))


class _NoGradient(torch.autograd.Function):
    """What was computed of stored tokens, and tensors whose gradient is lost because they were stored."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, *untrained: Tensor) -> Tensor:
        return computed.view_as(computed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedError(
            "a KVCache stores keys and values without their gradient: train with use_cache=False"
        )


def _refuse_gradient(computed: Tensor, *states: StoredStates) -> Tensor:
    """``computed``, of which ``backward`` raises UnsupportedError if it should reach what was stored."""
    untrained = [x.untrained for x in states if x.untrained is not None]
    refuse: Callable[..., Tensor] = _NoGradient.apply
    return refuse(computed, *untrained) if untrained else computed


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The attention layer; its ``is_causal`` counts if the argument is ``None``.
        query: ``[B, Hq, Q, Dk]``.
        key: ``[B, H, N, Dk]``, what ``KVCache.update`` returned, or a tensor.
        value: ``[B, H, N, Dv]``, as ``key``.
        attention_mask: What ``masks.attention_mask`` made, or any mask ``[B or 1, Hq or 1, Q, N]``.
        scaling: Of the dot product; ``1 / sqrt(Dk)`` if ``None``.
        dropout: Must be 0.
        is_causal: Without a mask, whether a query sees no later key.
        softcap: ``softcap * tanh(score / softcap)``.
        s_aux: ``[Hq]``, a sink of each head.
        position_bias: ``[B or 1, Hq, Q, N]``, added to the scores.
        kwargs: Of other implementations, ignored.

    Returns:
        ``([B, Q, Hq, Dv], None)``.

    Raises:
        UnsupportedError: for dropout, a head mask or attention weights.
    """
    wanted = {
        "dropout": dropout > 0,
        "head_mask": kwargs.get("head_mask") is not None,
        "output_attentions": bool(kwargs.get("output_attentions")),
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise UnsupportedError(f"attn_implementation 'kvloom' has no {name}: use 'eager'")
    if isinstance(key, StoredStates) and isinstance(value, StoredStates) and key.tokens is value.tokens:
        tokens = key.tokens
    else:
        key, value = (x.gather() if isinstance(x, StoredStates) else x for x in (key, value))
        tokens = _dense(key, value, window_of(attention_mask), taken_by(attention_mask))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    first = mask = None
    if attention_mask is None or is_compact(attention_mask):
        if attention_mask is not None:
            causal, first = True, attention_mask[:, 0, 0, 0]
    else:
        mask, num_columns = attention_mask, tokens.placement.num_columns
        # A cache of fixed length may have fewer columns than a mask; those of a window are not the first.
        if mask.ndim != 4 or mask.shape[3] < num_columns or (tokens.window and mask.shape[3] > num_columns):
            raise ArgumentError(
                f"attention_mask must have 4 axes and {num_columns} columns, got {list(mask.shape)}"
            )
        causal, mask = False, mask[..., :num_columns]
    if position_bias is not None:
        if mask is None:
            mask = visible(first, causal, tokens.window, query.shape[2], tokens.placement)
            causal, first = False, None
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
        mask = mask + position_bias
    scores = ops.Scores(scaling, bool(causal), softcap=softcap, sinks=s_aux)
    out = tokens.attend(query, scores, first=first, mask=mask)
    return _refuse_gradient(out, *(x for x in (key, value) if isinstance(x, StoredStates))), None


def _dense(key: Tensor, value: Tensor, window: int | None, taken: Tensor | None) -> StoredTokens:
    """Keys and values that are in no cache of ours, ``[B, H, N, D]``."""
    rows, num_columns = key.shape[0], key.shape[2]
    starts = torch.arange(rows, device=key.device) * num_columns
    lengths = torch.full((rows,), num_columns, device=key.device) if taken is None else taken
    placement = Placement(CacheIndex.pages(starts.unsqueeze(1), max(num_columns, 1)), lengths, num_columns)
    return StoredTokens(KVView.split(_DENSE, key, value), placement, window)
