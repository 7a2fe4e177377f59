"""Errors of the heads of each layer when only its keys and values are quantized.

While a model reads with its own cache, each layer's new keys and values are also stored in a cache of each
kind, and attention is computed again with those loaded from it. So are those of an encoder, once.

Shapes: B texts, Q new tokens, N tokens, H key/value heads, Hq query heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_IMPLEMENTATION: Final = "kvloom_head_errors"
ByLayer: TypeAlias = dict[int, tuple[float, ...]]
"""For each layer a number of each query head."""


def halves(cache: Any) -> tuple[Any, Any]:
    """A cache of the text's own tokens, and that of the encoder's; ``None`` without an encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return cache, None


class HeadErrors:
    """Sums of squares of attention's output, and of its error with each kind of cache.

    Args:
        model: A ``PreTrainedModel`` that generates.
        makers: Functions that make an empty cache, one for each kind.
        reading: Function that returns the cache which the model reads with; not needed without an encoder.
    """

    def __init__(
        self,
        model: Any,
        makers: Sequence[Callable[[], Any]],
        reading: Callable[[], Any] = lambda: None,
    ) -> None:
        self._model, self._makers, self._reading = model, makers, reading
        self._config = model.config.get_text_config(decoder=True)
        self._caches: list[Any] = []
        self._counts: Tensor | bool | None = True
        self._of_text, self._of_encoder = _Sums(len(makers)), _Sums(len(makers))
        self.implementation: str = self._config._attn_implementation
        """Name of the model's own attention."""

    @contextmanager
    def measured(self, *, is_first: bool, counts: Tensor | bool | None = True) -> Iterator[None]:
        """Context in which the tokens that the model reads are measured.

        Args:
            is_first: Whether texts begin, so that caches must be empty.
            counts: Tokens ``[B, Q]`` bool whose errors are summed; ``True`` for all; ``None`` for none, only
                to fill the caches.
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
        num_read = self._num_of_encoder(key, layer)
        is_of_encoder, num_new = num_read == key.shape[2], query.shape[2]
        sums = self._of_encoder if is_of_encoder else self._of_text
        out = result[0].double()
        sums.add_output(layer, out, self._counts)
        for number, cache in enumerate(self._caches):
            kept = _store_and_load(cache, key, value, layer, num_read, num_new)
            if self._counts is not None:
                error = own(module, query, *kept, mask, **options)[0] - out
                sums.add_error(number, layer, error, self._counts)
        return result

    def result(self) -> list[ByLayer]:
        """Errors by kind and layer: for each query head, norm of the error over norm of the output."""
        return self._of_text.result()

    def of_encoder(self) -> list[ByLayer]:
        """The same of attention to an encoder's tokens."""
        return self._of_encoder.result()

    def _num_of_encoder(self, key: Tensor, layer: int) -> int:
        """How many of the last keys are those that the reading cache has of an encoder in a layer.

        All or none of them, but where a layer attends to text and encoder at once, as in T5Gemma 2.
        """
        _, beside = halves(self._reading())
        if beside is None or layer >= len(beside.layers):
            return 0
        kept: Tensor | None = getattr(beside.layers[layer], "keys", None)
        if kept is None or kept.shape[2] > key.shape[2]:
            return 0
        return kept.shape[2] if kept is key or torch.equal(kept, key[:, :, -kept.shape[2] :]) else 0


class _Sums:
    """Sums of squares of outputs, and of errors of each kind, by layer: ``[Hq]`` each."""

    def __init__(self, num_kinds: int) -> None:
        self._outputs: dict[int, Tensor] = {}
        self._errors: list[dict[int, Tensor]] = [{} for _ in range(num_kinds)]

    def add_output(self, layer: int, x: Tensor, counts: Tensor | bool | None) -> None:
        """Add an output ``[B, Q, Hq, D]``."""
        _add_squares(self._outputs, layer, x, counts)

    def add_error(self, kind: int, layer: int, x: Tensor, counts: Tensor | bool) -> None:
        """Add an error ``[B, Q, Hq, D]`` of a kind."""
        _add_squares(self._errors[kind], layer, x, counts)

    def result(self) -> list[ByLayer]:
        """Norms of errors over norms of outputs, for each kind."""
        return [
            {n: tuple((error / self._outputs[n]).sqrt().tolist()) for n, error in errors.items()}
            for errors in self._errors
        ]


_MEASURING: Final[ContextVar[HeadErrors]] = ContextVar("kvloom_head_errors")


def _store_and_load(cache: Any, key: Tensor, value: Tensor, layer: int, num_read: int, num_new: int) -> Any:
    """Store new keys and values in a cache; returns what it has of all.

    Args:
        cache: The cache.
        key: ``[B, H, N, D]``: the text, and an encoder's after it.
        value: As ``key``.
        layer: Number of the layer.
        num_read: Number of tokens of an encoder among the N.
        num_new: Q, the number of new tokens of the text, if there are others than an encoder's.
    """
    own, beside = halves(cache)
    end = key.shape[2] - num_read
    found = []
    if end:
        new = slice(end - num_new, end)
        found.append(own.update(key[:, :, new], value[:, :, new], layer))
    if num_read and not cache.is_updated.get(layer):
        cache.is_updated[layer] = True
        found.append(beside.update(key[:, :, end:], value[:, :, end:], layer))
    elif num_read:
        found.append((beside.layers[layer].keys, beside.layers[layer].values))
    return found[0] if len(found) == 1 else [torch.cat(side, 2) for side in zip(*found, strict=True)]


def _add_squares(sums: dict[int, Tensor], layer: int, x: Tensor, counts: Tensor | bool | None) -> None:
    """Add the squares of ``[B, Q, Hq, D]`` to the sums ``[Hq]`` of a layer, of the tokens that count."""
    if counts is None:
        return
    x = x[counts] if isinstance(counts, Tensor) else x.flatten(0, 1)
    squares = x.double().square().sum((0, 2))
    sums[layer] = sums[layer] + squares if layer in sums else squares


def _own_attention(module: Any, implementation: str) -> Callable[..., Any]:
    """Attention function that a module would call: its file may have functions of its own."""
    home = vars(sys.modules[type(module).__module__])
    functions = home.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found: Callable[..., Any] = functions.get(implementation, home.get("eager_attention_forward"))
    return found


def _attention(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    return _MEASURING.get().attend(module, *args, **options)


def _own_mask(*args: Any, **options: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[_MEASURING.get().implementation](*args, **options)


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, _own_mask)
