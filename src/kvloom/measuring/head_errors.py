"""Errors of the heads of each layer when only its keys and values are quantized.

While a model reads with its own cache, each layer's new keys and values are also stored in a cache of each
kind, and attention is computed again with those loaded from it.

Shapes: B texts, Q new tokens, N tokens, H key/value heads, Hq query heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_IMPLEMENTATION: Final = "kvloom_head_errors"


class HeadErrors:
    """Sums of squares of attention's output, and of its error with each kind of cache.

    Args:
        model: A ``PreTrainedModel`` that generates.
        makers: Functions that make an empty cache, one for each kind.
    """

    def __init__(self, model: Any, makers: Sequence[Callable[[], Any]]) -> None:
        self._model, self._makers = model, makers
        self._config = model.config.get_text_config(decoder=True)
        self._caches: list[Any] = []
        self._counts = True
        self._outputs: dict[int, Tensor] = {}
        self._errors: list[dict[int, Tensor]] = [{} for _ in makers]
        self.implementation: str = self._config._attn_implementation
        """Name of the model's own attention."""

    @contextmanager
    def measured(self, *, is_first: bool, counts: bool = True) -> Iterator[None]:
        """Context in which the tokens that the model reads are measured.

        Args:
            is_first: Whether texts begin, so that caches must be empty.
            counts: Whether to sum errors, or only to fill the caches.
        """
        if is_first:
            self._caches = [make() for make in self._makers]
        self._counts = counts
        self._model.set_attn_implementation(_IMPLEMENTATION)
        token = _MEASURING.set(self)
        try:
            yield
        finally:
            _MEASURING.reset(token)
            self._model.set_attn_implementation(self.implementation)

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        """Attention as transformers calls it: the model's own, with exact keys and values."""
        own = _own_attention(module, self.implementation)
        result = own(module, query, key, value, mask, **options)
        layer = getattr(module, "layer_idx", None)
        if layer is None or getattr(module, "is_kv_shared_layer", False):  # no keys of its own
            return result
        out = result[0].double()
        if self._counts:
            _add(self._outputs, layer, out)
        new = slice(-query.shape[2], None)
        for cache, errors in zip(self._caches, self._errors, strict=True):
            kept = cache.update(key[:, :, new], value[:, :, new], layer)
            if self._counts:
                _add(errors, layer, own(module, query, *kept, mask, **options)[0] - out)
        return result

    def result(self) -> list[dict[int, tuple[float, ...]]]:
        """Errors by kind and layer: for each query head, norm of the error over norm of the output."""
        return [
            {n: tuple((error / self._outputs[n]).sqrt().tolist()) for n, error in errors.items()}
            for errors in self._errors
        ]


_MEASURING: Final[ContextVar[HeadErrors]] = ContextVar("kvloom_head_errors")


def _add(sums: dict[int, Tensor], layer: int, x: Tensor) -> None:
    """Add the squares of ``[B, Q, Hq, D]`` to the sums ``[Hq]`` of a layer."""
    squares = x.double().square().sum((0, 1, 3))
    sums[layer] = sums[layer] + squares if layer in sums else squares


def _own_attention(module: Any, implementation: str) -> Callable[..., Any]:
    """Attention function that a module would call: its file may have functions of its own."""
    home = vars(sys.modules[type(module).__module__])
    functions = home.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found: Callable[..., Any] = functions.get(implementation, home.get("eager_attention_forward"))
    return found


def _attention(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    return _MEASURING.get().attend(module, *args, **options)


def _mask(*args: Any, **options: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[_MEASURING.get().implementation](*args, **options)


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, _mask)
