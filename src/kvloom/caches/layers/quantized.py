"""Layer of codes, made from format strings.

Shapes: B sequences, H heads, N stored tokens, Dk and Dv head dims.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.layers.kinds import PAGE_SIZE
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.tensors.storage import Storage, Tensors
from kvloom.core.specs import QuantSpec
from kvloom.errors import StateError


def _page_size(recent: int) -> int:
    """Small pages with a residual window, which has as large ones, unquantized."""
    return 16 if recent else PAGE_SIZE


class QuantizedLayer(PagedLayer):
    """Codes and scales of all tokens, of which each sees the last ``recent`` unquantized, itself included.

    A token is quantized once and on its own: its codes never change, and the split of a text into updates
    does not matter for them. Each update dequantizes the whole layer; ``append`` reads codes in place.

    Args:
        kv: Codes of the keys and, without ``values``, of the values, as ``QuantSpec.parse`` reads them:
            ``"int8:g32"`` has a scale for 32 elements along the head dim, a number that divides Dk and Dv.
            ``"int8"`` has groups of gcd(64, Dk) and gcd(64, Dv) elements.
        recent: Length of the residual window, as in ``CacheFormat``.
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
        quant, value_quant = (
            replace(QuantSpec.parse(text, name, side), scale_dtype=scale_dtype)
            for name, text, side in (
                ("kv", kv, "keys"),
                ("kv", kv, "values") if values is None else ("values", values, "values"),
            )
        )
        super().__init__(
            CacheFormat(
                quant=quant,
                page_size=_page_size(recent),
                values=CacheFormat(quant=value_quant),
                recent=recent,
            )
        )

    def codes(self) -> Tensors:
        """Codes and scales of the tokens: keys, values, scales of keys, scales of values.

        Returns:
            Copies ``[B, N, H, D * bits / 8]``, of the dtype of their kind (``kvloom.core.entries``), and
            ``[B, N, H, D / group]``.

        Raises:
            StateError: before the first update.
        """
        storage, count = self.storage, self.num_tokens
        if storage is None:
            raise StateError("no tokens were stored yet")
        slots = self.stored().index.slots.flatten()
        copied = Storage(*storage.specs, max(count, 1), storage.device, "NHD")
        copied.reserve(self.size, 1)
        if count:
            ops.copy(storage.view, slots, copied.view, torch.arange(len(slots), device=storage.device))
        key, value, *scales = copied.tensors
        value, a, b = (None if x is None else x[:, :count] for x in (value, *scales))
        return key[:, :count], value, a, b

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle; one of before has codes and newest tokens apart."""
        if "_codes" not in state:
            vars(self).update(state)
            return
        codes: PagedLayer = state["_codes"]
        recent: int = state["recent"]
        super().__init__(replace(codes.format, recent=recent, page_size=_page_size(recent)))
        newest: tuple[Tensor, Tensor] | None = state["_recent"]
        sealed = None if codes.storage is None else codes.stored()
        parts = [] if sealed is None else [sealed.gather(state["dtype"])]
        parts += [] if newest is None else [newest]
        if not parts:
            return
        own = self.append(*(torch.cat(side, 2) for side in zip(*parts, strict=True)))
        if sealed is not None:  # what was quantized is not quantized again
            slots = sealed.index.slots
            target = own.index.slots[:, : slots.shape[1]]
            ops.copy(sealed.view, slots.flatten(), own.view, target.flatten())
