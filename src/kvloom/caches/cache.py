"""A cache as a list of layers.

Shapes: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvloom.caches.kinds import DynamicLayer, StaticLayer
from kvloom.caches.layer import Layer, expect_config
from kvloom.caches.quantized import QuantizedLayer
from kvloom.core.checks import INDEX_DTYPES, can_read, expect, expect_range
from kvloom.errors import ArgumentError, ShapeError, StateError


class Cache:
    """Keys and values of all layers of a model.

    Args:
        layers: One for each attention layer, of any kinds.
        make_layer: Makes the layer behind ``layers`` when ``update`` first names it; ``None`` to refuse that.
    """

    def __init__(self, layers: Iterable[Layer] = (), make_layer: Callable[[], Layer] | None = None) -> None:
        self.layers = list(layers)
        self._make_layer = make_layer
        self._is_torn = False  # layers have different rows

    @classmethod
    def dynamic(cls, num_layers: int | None = None) -> "Cache":
        """Layers that grow; ``num_layers`` of them, or as many as are updated if ``None``."""
        return cls._of(DynamicLayer, num_layers)

    @classmethod
    def static(cls, max_length: int, num_layers: int | None = None) -> "Cache":
        """Layers of ``max_length`` tokens each, for ``torch.compile``."""
        expect_config("max_length", max_length, 1)
        return cls._of(partial(StaticLayer, max_length), num_layers)

    @classmethod
    def quantized(
        cls,
        kv: str = "int8",
        recent: int = 0,
        values: str | None = None,
        num_layers: int | None = None,
    ) -> "Cache":
        """Layers of 8-bit or 4-bit codes, arguments as ``QuantizedLayer``."""
        QuantizedLayer(kv, recent, values)  # refuses bad arguments now
        return cls._of(partial(QuantizedLayer, kv, recent, values), num_layers)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Iterable[tuple[Tensor, Tensor]] | None = None) -> "Cache":
        """A dynamic cache of copies of ``(key, value)`` pairs ``[B, H, N, D]``, one pair for each layer."""
        cache = cls.dynamic()
        for layer_idx, (key, value) in enumerate(past_key_values or ()):
            cache.update(key, value, layer_idx)
        return cache

    def to_legacy_cache(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Copies of the stored keys and values ``[B, H, N, D]``, a pair for each layer.

        Raises:
            StateError: a layer was not updated yet.
        """
        contiguous = torch.contiguous_format
        return tuple(
            (key.clone(memory_format=contiguous), value.clone(memory_format=contiguous))
            for key, value in self
        )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        cache_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens in a layer and return what their attention reads there.

        Args:
            key_states: ``[B, H, Q, Dk]``.
            value_states: ``[B, H, Q, Dv]``.
            layer_idx: The layer; in a cache that makes its layers, one that is there or the next one.
            cache_kwargs: ``cache_position``, ``[Q]`` int64 or int32, must be the positions of the new tokens
                (its values are read on the CPU only, or in ``kvloom.core.checks.debug()``); other keys are
                for caches that need them.

        Returns:
            ``(keys, values)`` as ``Layer.update``.

        Raises:
            ArgumentError: there is no such layer, or ``cache_position`` differs from what follows the stored
                tokens; nothing was written.
            ShapeError, StateError: as ``Layer.update``; nothing was written.
        """
        self._expect_whole()
        expect_range("layer_idx", layer_idx, 0, len(self.layers) + (self._make_layer is not None))
        layer = self._layer(layer_idx)
        position = (cache_kwargs or {}).get("cache_position")
        if position is not None and isinstance(key_states, Tensor) and key_states.ndim == 4:
            _expect_position(position, layer, key_states.shape[2])
        result = layer.update(key_states, value_states)
        if layer_idx == len(self.layers):
            self.layers.append(layer)
        return result

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Tokens seen by a layer: an int, or a 0-d int64 tensor of a ``StaticLayer``; 0 if there is none."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer takes, -1 for no bound."""
        return self._layer(layer_idx).get_max_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int | Tensor]:
        """Columns that ``update`` of ``query_length`` tokens will return, and the position of the first."""
        self._expect_whole()
        return self._layer(layer_idx).get_mask_sizes(query_length)

    def cache_position(self, query_length: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of the next ``query_length`` tokens, ``[n, n + 1, ...]`` int64 ``[query_length]``.

        Padding tokens count: n is ``get_seq_length()``.
        """
        expect_range("query_length", query_length, 0)
        length = self.get_seq_length()
        if isinstance(length, Tensor) and device is not None:
            length = length.to(device)
        where = length.device if isinstance(length, Tensor) else device
        return torch.arange(query_length, device=where) + length

    def attention_mask(self, padding_mask: Tensor, query_length: int) -> Tensor:
        """The mask of past and new tokens, of which the last ones are no padding.

        Args:
            padding_mask: ``[B, M]``, 0 where a token is padding; the mask of the prompt serves every step.
            query_length: Q.

        Returns:
            ``[B, n + Q]``, ``padding_mask`` and ones behind it, in its dtype.

        Raises:
            ShapeError: ``padding_mask`` has another rank or more than n + Q columns.
        """
        expect_range("query_length", query_length, 0)
        columns = expect("padding_mask", padding_mask, "B M")["M"]
        total = int(self.get_seq_length()) + query_length
        if columns > total:
            raise ShapeError(f"padding_mask must have at most {total} columns, got {columns}")
        ones = padding_mask.new_ones((padding_mask.shape[0], total - columns))
        return torch.cat([padding_mask, ones], dim=1)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values of a layer, ``[B, H, N, D]``; views, or dequantized."""
        layer = self.layers[layer_idx]
        return layer.keys[:, :, : layer.num_held], layer.values[:, :, : layer.num_held]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[i] for i in range(len(self.layers)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i what sequence ``beam_idx[i]`` was, in every layer."""
        self._change_rows(lambda layer: layer.reorder(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times in a row, in every layer."""
        self._change_rows(lambda layer: layer.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at ``indices``, or where a bool mask is true, in every layer."""
        self._change_rows(lambda layer: layer.select(indices))

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, or, if negative, remove the last ``-num_tokens``.

        Raises:
            StateError: a sliding layer no longer holds what later tokens would see; nothing was changed.
        """
        self._expect_whole()
        for layer in self.layers:
            layer.expect_croppable(num_tokens)
        for layer in self.layers:
            layer.crop(num_tokens)

    def fork(self) -> "Cache":
        """Another cache of the same tokens; neither sees what the other stores.

        Layers that grow share their pages until one is written; fixed layers are copied.
        """
        self._expect_whole()
        return Cache((layer.fork() for layer in self.layers), self._make_layer)

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()
        self._is_torn = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @classmethod
    def _of(cls, make_layer: Callable[[], Layer], num_layers: int | None) -> "Cache":
        if num_layers is None:
            return cls(make_layer=make_layer)
        return cls(make_layer() for _ in range(expect_config("num_layers", num_layers, 1)))

    def _change_rows(self, change: Callable[[Layer], None]) -> None:
        """Change one layer after the other; if one raises when others have changed, the cache is torn."""
        self._expect_whole()
        for layer in self.layers:
            change(layer)
            self._is_torn |= layer.nbytes > 0
        self._is_torn = False

    def _expect_whole(self) -> None:
        if self._is_torn:
            raise StateError("layers must have the same rows: a change of them broke off, reset the cache")

    def _layer(self, layer_idx: int) -> Layer:
        """A layer, or one like it would be before its first update."""
        expect_range("layer_idx", layer_idx, 0, None if self._make_layer else len(self.layers))
        if layer_idx < len(self.layers) or self._make_layer is None:
            return self.layers[layer_idx]
        return self._make_layer()


def _expect_position(position: Tensor, layer: Layer, num_new: int) -> None:
    """Check that ``position`` is where ``layer`` will put ``num_new`` tokens."""
    expect("cache_position", position, "Q", dtype=INDEX_DTYPES, Q=num_new)
    if can_read(position):
        start = int(layer.get_seq_length())
        if position.tolist() != list(range(start, start + num_new)):
            raise ArgumentError(
                f"cache_position must be {num_new} positions from {start} on, got {position.tolist()}"
            )
