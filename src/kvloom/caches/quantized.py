"""A layer that keeps 8-bit or 4-bit codes, and the most recent tokens as they are.

Letters: B sequences, H heads, Q new tokens, N stored ones, Dk and Dv head dims.
"""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.layers import Columns, Form, Layer, expect_config, outside_inference_mode
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.core.layouts import CacheLayout
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import ShapeError, StateError

_LAYOUT = CacheLayout("B S H D")
_MIN_COLUMNS = 16

_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class QuantizedLayer(Layer):
    """Codes and scales of every token but the last ``recent``, which are kept as they are.

    A token is quantised once, when ``recent`` newer ones are there, on its own: its codes never change. What
    ``update`` returns is what later updates return for the same tokens, so the split of a text into updates
    does not matter. The whole layer is dequantised at each update.

    Args:
        bits: 8 or 4, of the keys and, without ``value_bits``, of the values.
        group: Elements along the head dim that share a scale; divides Dk and Dv.
        recent: Most recent tokens that are not quantised.
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
        self._columns = Columns(2 * recent)
        self._tensors: _Tensors | None = None
        self._sealed = 0

    @property
    def num_sealed(self) -> int:
        """Tokens of each sequence that are kept as codes: the first ones."""
        return self._sealed

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales and recent tokens included."""
        codes = 0 if self._tensors is None else sum(x.nbytes for x in self._tensors if x is not None)
        return codes + self._columns.nbytes

    def codes(self) -> _Tensors:
        """Codes and scales of the sealed tokens: keys, values, scales of keys, scales of values.

        Returns:
            Views ``[B, sealed, H, D]`` int8 or (4 bits) ``[B, sealed, H, D / 2]`` uint8, and
            ``[B, sealed, H, D / group]``.

        Raises:
            StateError: before the first update.
        """
        key, value, *scales = _expect_tensors(self._tensors)
        a, b = (None if x is None else x[:, : self._sealed] for x in scales)
        return key[:, : self._sealed], value[:, : self._sealed], a, b

    def get_seq_length(self) -> int:
        """N."""
        return self._sealed + len(self._columns)

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(N + Q, 0)``."""
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget all tokens and shapes; the memory is given back."""
        self._columns.clear()
        self._form, self._tensors, self._sealed = None, None, 0

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        if form.dtype not in FLOAT_DTYPES:
            raise ShapeError(f"key must be {' or '.join(map(str, FLOAT_DTYPES))}, got {form.dtype}")
        num_sealed = max(self.get_seq_length() + key.shape[2] - self.recent, self._sealed)
        self._reserve(num_sealed, form)
        old = min(num_sealed - self._sealed, len(self._columns))
        if old:
            keys, values = self._columns.view(len(self._columns))
            self._seal(keys[:, :, :old], values[:, :, :old])
            self._columns.drop_front(old)
        new = num_sealed - self._sealed
        self._seal(key[:, :, :new], value[:, :, :new])
        if self.recent:
            self._columns.append(key[:, :, new:], value[:, :, new:])
        return self._load(form)

    def _stored(self) -> tuple[Tensor, Tensor]:
        if self._form is None:
            raise StateError("no tokens were stored yet")
        return self._load(self._form)

    def _truncate(self, num_tokens: int) -> None:
        self._columns.truncate(max(num_tokens - self._sealed, 0))
        self._sealed = min(self._sealed, num_tokens)

    def _take(self, rows: Tensor) -> None:
        self._columns.take(rows)
        with outside_inference_mode():
            key, value, *scales = _expect_tensors(self._tensors)
            a, b = (None if x is None else x.index_select(0, rows) for x in scales)
            self._tensors = key.index_select(0, rows), value.index_select(0, rows), a, b

    def _reserve(self, num_tokens: int, form: Form) -> None:
        """Make room for ``num_tokens`` codes of each sequence."""
        have = 0 if self._tensors is None else self._tensors[0].shape[1]
        if self._tensors is not None and num_tokens <= have:
            return
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
        for target, source in zip(new, self._tensors or (), strict=False):
            if target is not None and source is not None:
                target[:, : self._sealed] = source[:, : self._sealed]
        self._tensors = new

    def _seal(self, key: Tensor, value: Tensor) -> None:
        """Quantise ``[B, H, n, D]`` behind the sealed tokens."""
        view, end = self._view(), self._sealed + key.shape[2]
        slots = self._slots(self._sealed, end)
        ops.store(
            key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), slots.flatten(), view
        )
        self._sealed = end

    def _load(self, form: Form) -> tuple[Tensor, Tensor]:
        slots = self._slots(0, self._sealed)
        loaded = ops.load(slots.flatten(), self._view(), dtype=form.dtype)
        key, value = (x.unflatten(0, slots.shape).transpose(1, 2) for x in loaded)
        if not len(self._columns):
            return key, value
        keys, values = self._columns.view(len(self._columns))
        return torch.cat([key, keys], 2), torch.cat([value, values], 2)

    def _view(self) -> KVView:
        return KVView.split(_LAYOUT, *_expect_tensors(self._tensors))

    def _slots(self, start: int, end: int) -> Tensor:
        """Slots of positions ``start .. end`` of every sequence, ``[B, end - start]``."""
        key = _expect_tensors(self._tensors)[0]
        first = torch.arange(key.shape[0], device=key.device) * key.shape[1]
        return first.unsqueeze(1) + torch.arange(start, end, device=key.device)


def _expect_tensors(tensors: _Tensors | None) -> _Tensors:
    if tensors is None:
        raise StateError("no tokens were stored yet")
    return tensors
