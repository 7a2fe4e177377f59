"""Layer of codes whose residual window is kept unquantized.

Shapes: B sequences, H heads, N stored tokens, Dk and Dv head dims.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.kinds import PAGE_SIZE
from kvloom.caches.layer import Forks, Layer, expect_config
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.paged import PagedLayer
from kvloom.caches.read_only import ReadOnly
from kvloom.caches.storage import Storage, Tensors
from kvloom.caches.tokens import Tokens
from kvloom.core.specs import QuantSpec
from kvloom.errors import StateError, UnsupportedError

_Pair: TypeAlias = tuple[Tensor, Tensor]


class QuantizedLayer(Layer):
    """Codes and scales of all tokens but the last ``recent``, which stay unquantized.

    A token is quantized once, after ``recent`` later ones, and on its own: its codes never change. So the
    split of a text into updates does not matter: its codes are the same. Each update dequantizes the whole
    layer. ``append`` reads codes in place, which requires ``recent=0``.

    Args:
        kv: Codes of the keys and, without ``values``, of the values, as ``QuantSpec.parse`` reads them:
            ``"int8:g32"`` has a scale for 32 elements along the head dim, a number that divides Dk and Dv.
            ``"int8"`` has groups of gcd(64, Dk) and gcd(64, Dv) elements.
        recent: Length of the residual window: the last tokens, which are not quantized.
        values: Codes of the values.
        scale_dtype: Dtype of the scales: float32, float16 or bfloat16.

    Raises:
        ArgumentError: ``kv`` or ``values`` is no format string of codes.
        ConfigError: another value is not allowed; by ``update``, if a group does not divide a head dim.
    """

    def __init__(
        self,
        kv: str = "int8",
        recent: int = 0,
        values: str | None = None,
        scale_dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__()
        self.recent = expect_config("recent", recent, 0)
        quant, value_quant = (
            replace(QuantSpec.parse(text, name, side), scale_dtype=scale_dtype)
            for name, text, side in (
                ("kv", kv, "keys"),
                ("kv", kv, "values") if values is None else ("values", values, "values"),
            )
        )
        format = CacheFormat(quant=quant, page_size=PAGE_SIZE, values=CacheFormat(quant=value_quant))
        self._codes = PagedLayer(format)
        self._recent: _Pair | None = None  # never written, always replaced

    @property
    def size(self) -> int:
        """B; 0 before the first update."""
        return self._codes.size

    @property
    def storage(self) -> Storage | None:
        """The tensors of the codes; ``None`` before the first update."""
        return self._codes.storage

    @property
    def num_sealed(self) -> int:
        """Number of first tokens of each sequence that are kept as codes."""
        return self._codes.num_tokens

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.num_sealed + (0 if self._recent is None else self._recent[0].shape[2])

    num_columns = num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales and residual window included."""
        return self._codes.nbytes + sum(x.nbytes for x in self._recent or ())

    def codes(self) -> Tensors:
        """Codes and scales of the sealed tokens: keys, values, scales of keys, scales of values.

        Returns:
            Copies ``[B, sealed, H, D * bits / 8]``, of the dtype of their kind (``kvloom.core.entries``), and
            ``[B, sealed, H, D / group]``.

        Raises:
            StateError: before the first update.
        """
        tokens, storage, count = self._codes.stored(), self._codes.storage, self.num_sealed
        if storage is None:
            raise StateError("no tokens were stored yet")
        slots = tokens.index.slots.flatten()
        copied = Storage(*storage.specs, max(count, 1), storage.device, "NHD")
        copied.reserve(self.size, 1)
        if count:
            ops.copy(storage.view, slots, copied.view, torch.arange(len(slots), device=storage.device))
        key, value, *scales = copied.tensors
        value, a, b = (None if x is None else x[:, :count] for x in (value, *scales))
        return key[:, :count], value, a, b

    def stored(self) -> Tokens:
        """Tokens of ``keys`` and ``values``, not gathered; raises UnsupportedError with ``recent``."""
        self._expect_codes_only()
        return self._codes.stored()

    def gather(self, dtype: torch.dtype) -> _Pair:
        """All tokens, dequantized: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``."""
        return _joined(self._codes.gather(dtype), self._recent)

    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Replace all keys (0), values (1) or both; a side that is not replaced keeps its codes."""
        count = next(iter(new.values())).shape[2]
        sealed = max(count - self.recent, 0) if len(new) == 2 else self.num_sealed
        recent = self._recent
        if self.recent:
            old = recent or (new[0], new[1])
            sides = [new[i][:, :, sealed:] if i in new else old[i] for i in range(2)]
            recent = _copied(sides[0], sides[1])
        self._codes.replace({side: x[:, :, :sealed] for side, x in new.items()})
        self._recent = recent

    def _update(self, key: Tensor, value: Tensor) -> _Pair:
        old, recent = self._sealed_and_recent(key, value)

        def store(storage: Storage, exact: None, key: Tensor, value: Tensor) -> _Pair:
            return _joined(self._codes._store_and_gather(storage, None, key, value), recent)

        result = self._codes._extend(*old, store, is_gathered=True)
        self._recent = recent
        return result

    def _append(self, key: Tensor, value: Tensor) -> Tokens:
        self._expect_codes_only()
        return self._codes._append(key, value)

    def _sealed_and_recent(self, key: Tensor, value: Tensor) -> tuple[_Pair, _Pair | None]:
        """Split residual window and new tokens into those to quantize and the new residual window."""
        if not self.recent:
            return (key, value), None
        if self._recent is not None:
            key, value = _joined(self._recent, (key, value))
        count = max(key.shape[2] - self.recent, 0)
        return (key[:, :, :count], value[:, :, :count]), _copied(key[:, :, count:], value[:, :, count:])

    def _held(self, dtype: torch.dtype) -> _Pair:
        key, value = self.gather(dtype)
        return ReadOnly.of(key), ReadOnly.of(value)

    def _truncate(self, num_tokens: int) -> None:
        sealed, recent = min(self.num_sealed, num_tokens), self._recent
        if recent is not None:
            key, value = (x[:, :, : num_tokens - sealed] for x in recent)
            recent = _copied(key, value)
        self._codes.truncate(sealed)
        self._recent = recent

    def _select(self, rows: list[int]) -> None:
        recent = self._recent
        if recent is not None:
            recent = _copied(recent[0][rows], recent[1][rows])
        self._codes._select(rows)
        self._recent = recent

    def _reset(self) -> None:
        self.dtype = self._recent = None
        self._codes.reset()

    def _hold_alone(self, forks: Forks | None) -> None:
        self._codes = self._codes.fork()

    def _expect_codes_only(self) -> None:
        if self.recent:
            raise UnsupportedError("recent tokens are no codes: they are read together by update and gather")


def _joined(first: _Pair, last: _Pair | None) -> _Pair:
    """Concatenate two pairs along the tokens."""
    if last is None or not last[0].shape[2]:
        return first
    return torch.cat([first[0], last[0]], 2), torch.cat([first[1], last[1]], 2)


def _copied(key: Tensor, value: Tensor) -> _Pair:
    with outside_inference_mode():
        return key.clone(), value.clone()
