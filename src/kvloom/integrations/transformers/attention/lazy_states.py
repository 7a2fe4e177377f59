"""``LazyStates``: results of a layer's ``update`` if attention reads the cache in place.

Shapes: B sequences, N tokens of keys and values, H key/value heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvloom.caches import Tokens
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.attention.lazy_tensor import LazyTensor


class LazyStates(LazyTensor):
    """Keys or values ``[B, H, N, D]`` of a layer, not gathered from the cache.

    Attention receives only what ``update`` returned, so ``update`` returns a pair of these.

    Attributes:
        tokens: The tokens of the layer.
        dtype: Dtype that attention computes in, that of the keys or values that were stored last.
        untrained: The keys or values that were stored last, if they require a gradient, else ``None``.
            Storing them lost the gradient.
    """

    tokens: Tokens
    dtype: torch.dtype
    untrained: Tensor | None
    _key_states: "LazyStates | None" = None  # the keys that belong to these values
    _gathered: tuple[Tensor, Tensor] | None = None
    is_written: bool = False  # set on keys: gathered keys or values were written and differ from the tokens

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.tokens.view.device

    @classmethod
    def pair(cls, tokens: Tokens, key: Tensor, value: Tensor) -> tuple["LazyStates", "LazyStates"]:
        """Keys and values of ``tokens``, of which ``key`` and ``value`` were stored last."""
        keys, values = cls(), cls()  # attributes are set directly, which is faster in each layer
        keys.tokens = values.tokens = tokens
        keys.dtype, values.dtype, values._key_states = key.dtype, value.dtype, keys
        keys.untrained = key if key.requires_grad else None
        values.untrained = value if value.requires_grad else None
        return keys, values

    @property
    def shape(self) -> torch.Size:
        """``[B, H, N, D]``."""
        view, index = self.tokens.view, self.tokens.index
        if self._key_states is None:
            head_dim = view.key.head_dim
        else:
            head_dim = 0 if view.value is None else view.value.head_dim
        return torch.Size((len(index.lengths), view.num_heads, index.num_columns, head_dim))

    def is_pair_of(self, values: "LazyStates") -> bool:
        """Whether these keys and ``values`` are of the same tokens, as they were stored."""
        return self.tokens is values.tokens and not self.is_written

    def gather(self) -> Tensor:
        """Gather the tensor, dequantized; keys and values are gathered together, once."""
        keys = self if self._key_states is None else self._key_states
        if keys._gathered is None:
            keys._gathered = self.tokens.gather(keys.dtype)
        return refuse_gradient(keys._gathered[0 if keys is self else 1], self.untrained)

    def __setitem__(self, where: Any, x: Any) -> None:
        """Write to a gathered copy, which attention then reads; the cache is unchanged."""
        keys = self if self._key_states is None else self._key_states
        if not keys.is_written:
            keys._gathered = replace(self.tokens, rows=None).gather(keys.dtype)
            keys.is_written = True
        self.gather()[where] = x


class _NoGradient(torch.autograd.Function):
    """Identity function whose ``backward`` raises, since stored tokens have lost their gradient."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, *untrained: Tensor) -> Tensor:
        return computed.view_as(computed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedError(
            "a KVCache stores keys and values without their gradient: train with use_cache=False"
        )


def refuse_gradient(computed: Tensor, *untrained: Tensor | None) -> Tensor:
    """``computed``, with a ``backward`` that raises UnsupportedError if ``untrained`` requires a gradient."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler would trace the backward
        return computed
    refuse: Callable[..., Tensor] = _NoGradient.apply
    lost = [x for x in untrained if x is not None and x.requires_grad]
    return refuse(computed, *lost) if lost else computed
