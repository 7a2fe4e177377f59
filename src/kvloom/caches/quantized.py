"""A layer that keeps 8-bit or 4-bit codes, and the most recent tokens as they are.

Letters: B sequences, H heads, Q new tokens, N stored ones, Dk and Dv head dims.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.columns import Columns
from kvloom.caches.layers import Form, Layer, expect_config
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.read_only import ReadOnly
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ShapeError, StateError

_LAYOUT = CacheLayout("B S H D")
_MIN_COLUMNS = 16

_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Kept:
    """Codes of the first ``num_sealed`` tokens, and the columns behind them."""

    columns: Columns
    tensors: _Tensors | None = None
    num_sealed: int = 0

    def __len__(self) -> int:
        return self.num_sealed + len(self.columns)

    @property
    def codes(self) -> _Tensors:
        """The tensors; raises StateError before the first update."""
        if self.tensors is None:
            raise StateError("no tokens were stored yet")
        return self.tensors

    @property
    def view(self) -> KVView:
        """All codes."""
        return KVView.split(_LAYOUT, *self.codes)

    def slots(self, start: int, end: int) -> Tensor:
        """Slots of positions ``start .. end`` of every sequence, ``[B, end - start]``."""
        key = self.codes[0]
        first = torch.arange(key.shape[0], device=key.device) * key.shape[1]
        return first.unsqueeze(1) + torch.arange(start, end, device=key.device)

    def sealed(self, key: Tensor, value: Tensor) -> "_Kept":
        """With ``[B, H, n, D]`` quantized behind the sealed tokens."""
        end = self.num_sealed + key.shape[2]
        slots = self.slots(self.num_sealed, end)
        ops.store(_rows(key), _rows(value), slots.flatten(), self.view)
        return replace(self, num_sealed=end)

    def load(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All tokens, dequantized."""
        slots = self.slots(0, self.num_sealed)
        loaded = ops.load(slots.flatten(), self.view, dtype=dtype)
        key, value = (x.unflatten(0, slots.shape).transpose(1, 2) for x in loaded)
        if not len(self.columns):
            return key, value
        keys, values = self.columns.view(len(self.columns))
        return torch.cat([key, keys], 2), torch.cat([value, values], 2)


class QuantizedLayer(Layer):
    """Codes and scales of every token but the last ``recent``, which are kept as they are.

    A token is quantized once, when ``recent`` newer ones are there, on its own: its codes never change. What
    ``update`` returns is what later updates return for the same tokens, so the split of a text into updates
    does not matter. The whole layer is dequantized at each update.

    Args:
        bits: 8 or 4, of the keys and, without ``value_bits``, of the values.
        group: Elements along the head dim that share a scale; divides Dk and Dv.
        recent: Most recent tokens that are not quantized.
        value_bits: Bits of the values.
        scale_dtype: float32, float16 or bfloat16.

    Raises:
        ConfigError: a value is not allowed; by ``update``, if ``group`` does not divide a head dim.
    """

    def __init__(
        self,
        bits: int,
        group: int = 64,
        recent: int = 0,
        value_bits: int | None = None,
        scale_dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__()
        self._quants = (
            QuantSpec(bits, group, scale_dtype),
            QuantSpec(bits if value_bits is None else value_bits, group, scale_dtype),
        )
        self.recent = expect_config("recent", recent, 0)
        self._kept = self._empty()

    @property
    def num_sealed(self) -> int:
        """Tokens of each sequence that are kept as codes: the first ones."""
        return self._kept.num_sealed

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales and recent tokens included."""
        codes = sum(x.nbytes for x in self._kept.tensors or () if x is not None)
        return codes + self._kept.columns.nbytes

    def codes(self) -> _Tensors:
        """Codes and scales of the sealed tokens: keys, values, scales of keys, scales of values.

        Returns:
            Views ``[B, sealed, H, D]`` int8 or (4 bits) ``[B, sealed, H, D / 2]`` uint8, and
            ``[B, sealed, H, D / group]``.

        Raises:
            StateError: before the first update.
        """
        key, value, *scales = self._kept.codes
        end = self._kept.num_sealed
        a, b = (None if x is None else x[:, :end] for x in scales)
        return key[:, :end], value[:, :end], a, b

    def get_seq_length(self) -> int:
        """N."""
        return len(self._kept)

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(N + Q, 0)``."""
        return self.get_seq_length() + query_length, 0

    def _reset(self) -> None:
        self._form, self._kept = None, self._empty()

    def _empty(self) -> _Kept:
        return _Kept(Columns(2 * self.recent))

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        kept = self._appended(self._kept, key, value, form)
        result = kept.load(form.dtype)
        self._kept = kept
        return result

    def _stored(self) -> tuple[Tensor, Tensor]:
        if self._form is None:
            raise StateError("no tokens were stored yet")
        key, value = self._kept.load(self._form.dtype)
        return ReadOnly.of(key), ReadOnly.of(value)

    def _truncate(self, num_tokens: int) -> None:
        sealed = min(self._kept.num_sealed, num_tokens)
        columns = self._kept.columns.truncate(num_tokens - sealed)
        self._kept = replace(self._kept, num_sealed=sealed, columns=columns)

    def _take(self, rows: Tensor) -> None:
        with outside_inference_mode():
            key, value, *scales = self._kept.codes
            a, b = (None if x is None else x.index_select(0, rows) for x in scales)
            tensors = key.index_select(0, rows), value.index_select(0, rows), a, b
        self._kept = replace(self._kept, tensors=tensors, columns=self._kept.columns.take(rows))

    def _replace(self, new: Mapping[int, Tensor], form: Form) -> None:
        if len(new) == 2:
            self._kept = self._appended(self._empty(), new[0], new[1], form)
            return
        kept, columns = self._kept, self._kept.columns
        ((side, x),) = new.items()  # the other one keeps its codes
        if len(columns):
            recent = list(columns.view(len(columns)))
            recent[side] = x[:, :, kept.num_sealed :]
            columns = Columns(columns.limit).append(*recent)
        key, value, key_scale, value_scale = kept.codes
        codes, scale = ((key, key_scale), (value, value_scale))[side]
        slots = kept.slots(0, kept.num_sealed).flatten()
        ops.store(_rows(x[:, :, : kept.num_sealed]), None, slots, KVView.split(_LAYOUT, codes, None, scale))
        self._kept = replace(kept, columns=columns)

    def _appended(self, kept: _Kept, key: Tensor, value: Tensor, form: Form) -> _Kept:
        """With new tokens, of which those that are not recent are quantized."""
        if form.dtype not in FLOAT_DTYPES:
            raise ShapeError(f"key must be {' or '.join(map(str, FLOAT_DTYPES))}, got {form.dtype}")
        num_sealed = max(len(kept) + key.shape[2] - self.recent, kept.num_sealed)
        kept = self._grown(kept, num_sealed, form)
        old = min(num_sealed - kept.num_sealed, len(kept.columns))
        new = num_sealed - kept.num_sealed - old
        if old:
            keys, values = kept.columns.view(len(kept.columns))
            kept = kept.sealed(keys[:, :, :old], values[:, :, :old])
            kept = replace(kept, columns=kept.columns.drop_front(old))
        kept = kept.sealed(key[:, :, :new], value[:, :, :new])
        if not self.recent:
            return kept
        return replace(kept, columns=kept.columns.append(key[:, :, new:], value[:, :, new:]))

    def _grown(self, kept: _Kept, num_tokens: int, form: Form) -> _Kept:
        """With room for ``num_tokens`` codes of each sequence."""
        have = 0 if kept.tensors is None else kept.tensors[0].shape[1]
        if kept.tensors is not None and num_tokens <= have:
            return kept
        size = max(num_tokens, have + have // 2, _MIN_COLUMNS)
        dims = (form.key_dim, form.value_dim)
        key, value = (
            KVSpec(1, form.heads, dim, form.dtype, _LAYOUT, quant)
            for dim, quant in zip(dims, self._quants, strict=True)
        )
        with outside_inference_mode():
            k, k_scale = key.empty(form.batch * size, size, device=form.device)
            v, v_scale = value.empty(form.batch * size, size, device=form.device)
        new = k, v, k_scale, v_scale
        for target, source in zip(new, kept.tensors or (), strict=False):
            if target is not None and source is not None:
                target[:, : kept.num_sealed] = source[:, : kept.num_sealed]
        return replace(kept, tensors=new)


def _rows(x: Tensor) -> Tensor:
    """``[B, H, n, D]`` as ``[B * n, H, D]``."""
    return x.transpose(1, 2).flatten(0, 1)
