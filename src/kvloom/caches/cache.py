"""A cache as a list of layers, with the names of transformers.

Shapes: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvloom.caches.format import expect_config
from kvloom.caches.layer_set import LayerSet
from kvloom.caches.layers.changing import cropped_length
from kvloom.caches.layers.kinds import DynamicLayer, StaticLayer
from kvloom.caches.layers.layer import Layer
from kvloom.caches.layers.quantized import QuantizedLayer
from kvloom.caches.rows.selection import reordered, repeated, selected
from kvloom.core.checks import INDEX_DTYPES, can_read, expect, expect_range
from kvloom.errors import ArgumentError, ShapeError


class Cache(LayerSet):
    """Keys and values of all layers of a model.

    Args:
        layers: One layer of any kind for each attention layer of the model.
        make_layer: Makes the layer after ``layers`` when ``update`` first names it; ``None`` to refuse that.
    """

    def __init__(self, layers: Iterable[Layer] = (), make_layer: Callable[[], Layer] | None = None) -> None:
        super().__init__(layers)
        self._make_layer = make_layer

    @classmethod
    def dynamic(cls, num_layers: int | None = None) -> "Cache":
        """Layers that grow; ``num_layers`` of them, or one for each that is updated if ``None``."""
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
        """Layers of codes of 8, 4 or 2 bits, arguments as ``QuantizedLayer``."""
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
        """Store new tokens in a layer and return the keys and values that their attention reads there.

        Args:
            key_states: ``[B, H, Q, Dk]``.
            value_states: ``[B, H, Q, Dv]``.
            layer_idx: Number of the layer; in a cache that makes its layers, of an existing one or the next.
            cache_kwargs: ``cache_position``, ``[Q]`` int64 or int32, must be the positions of the new tokens
                (its values are read on the CPU only, or in ``kvloom.core.checks.debug()``); other entries are
                ignored.

        Returns:
            ``(keys, values)`` as ``Layer.update``.

        Raises:
            ArgumentError: there is no such layer, or ``cache_position`` is not the positions after the stored
                tokens; nothing was written.
            ShapeError, StateError: as ``Layer.update``; nothing was written.
        """
        self.expect_consistent()
        expect_range("layer_idx", layer_idx, 0, len(self.layers) + (self._make_layer is not None))
        layer = self._layer(layer_idx)
        position = (cache_kwargs or {}).get("cache_position")
        if position is not None and isinstance(key_states, Tensor) and key_states.ndim == 4:
            _expect_position(position, layer, key_states.shape[2])
        result = layer.update(key_states, value_states)
        if layer_idx == len(self.layers):
            self.layers.append(layer)
            self._find_groups()
        return result

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Tokens seen by a layer: an int, or a 0-d int64 tensor of a ``StaticLayer``; 0 if there is none."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """Largest number of tokens of a layer, -1 for no bound."""
        return self._layer(layer_idx).get_max_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int | Tensor]:
        """Number of columns that ``update`` of ``query_length`` tokens returns, and position of the first."""
        self.expect_consistent()
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
        """Mask of stored and new tokens: ``padding_mask``, then ones.

        Args:
            padding_mask: ``[B, M]``, 0 where a token is padding; every step can pass the mask of the prompt.
            query_length: Q.

        Returns:
            ``[B, n + Q]`` in the dtype of ``padding_mask``; n is ``get_seq_length()``.

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
        """Replace sequence i by sequence ``beam_idx[i]``, in every layer."""
        self._choose(reordered, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times in a row, in every layer."""
        self._choose(repeated, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at ``indices``, or where a bool mask is true, in every layer."""
        self._choose(selected, indices)

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, or, if negative, remove the last ``-num_tokens``.

        Raises:
            ArgumentError: ``num_tokens`` is no int.
            StateError: a sliding layer has evicted tokens that later ones would see; nothing was changed.
        """
        longest = max((layer.num_tokens for layer in self.layers), default=0)
        self.make(self.change_of_length(partial(cropped_length, num_tokens), longest))

    def fork(self) -> "Cache":
        """Another cache of the same tokens; tokens that one stores are not seen by the other.

        Layers that grow share their pages until one is written; fixed layers are copied.
        """
        self.expect_consistent()
        forks = self.forks()
        return Cache((layer.fork(forks) for layer in self.layers), self._make_layer)

    @classmethod
    def _of(cls, make_layer: Callable[[], Layer], num_layers: int | None) -> "Cache":
        if num_layers is None:
            return cls(make_layer=make_layer)
        return cls(make_layer() for _ in range(expect_config("num_layers", num_layers, 1)))

    def _choose(self, rows_of: Callable[[Any, int], list[int]], given: Any) -> None:
        self.expect_consistent()
        if self.num_rows:
            self.make(self.change_of_rows(rows_of(given, self.num_rows)))

    def _layer(self, layer_idx: int) -> Layer:
        """Layer ``layer_idx``, or an empty one in its place if ``update`` is still to make it."""
        expect_range("layer_idx", layer_idx, 0, None if self._make_layer else len(self.layers))
        if layer_idx < len(self.layers) or self._make_layer is None:
            return self.layers[layer_idx]
        return self._make_layer()


def _expect_position(position: Tensor, layer: Layer, num_new: int) -> None:
    """Check that ``position`` has the positions of the next ``num_new`` tokens of ``layer``."""
    expect("cache_position", position, "Q", dtype=INDEX_DTYPES, Q=num_new)
    if can_read(position):
        start = int(layer.get_seq_length())
        if position.tolist() != list(range(start, start + num_new)):
            raise ArgumentError(
                f"cache_position must be {num_new} positions from {start} on, got {position.tolist()}"
            )
