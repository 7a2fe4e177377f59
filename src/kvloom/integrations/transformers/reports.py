"""What a cache holds, in numbers: kind, rows, tokens and bytes, and bytes of the same rows unquantized."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvloom.caches import CacheFormat
from kvloom.terminal import TableReport

_BFLOAT16: Final = 2
"""Bytes of a number."""


def report_of(layers: Sequence[Any], num_rows: int, nbytes: int) -> TableReport:
    """Numbers of a cache, or of one half of an encoder-decoder's.

    Args:
        layers: Its layers, each a ``KVCacheLayer``.
        num_rows: Rows that attention sees.
        nbytes: Bytes allocated.

    Returns:
        ``kv``, the format string, ``"plan"`` if layers differ, and ``None`` if nothing is stored; ``rows``;
        ``tokens`` of each row; ``nbytes``; ``nbytes_per_token``, without residual windows;
        ``nbytes_dynamic`` and ``nbytes_bfloat16``, those of the same rows in a ``DynamicCache`` of the
        model's dtype and of bfloat16; and ``smoothed``, the layers whose keys are.
    """
    filled = [layer for layer in layers if layer.pages.storage is not None]
    numbers = num_rows * sum(map(_numbers, filled))
    size = max((layer._dtype.itemsize for layer in filled if layer._dtype is not None), default=0)
    return TableReport(
        kv=_kind(filled),
        rows=num_rows,
        tokens=max((int(layer.get_seq_length()) for layer in filled), default=0),
        nbytes=nbytes,
        nbytes_per_token=sum(layer.pages.nbytes_per_token for layer in filled),
        nbytes_dynamic=numbers * size,
        nbytes_bfloat16=numbers * _BFLOAT16,
        smoothed=[i for i, layer in enumerate(layers) if layer.pages.format.smoothing is not None],
    )


class Shown:
    """What a notebook shows as its ``report()``, a table."""

    def _repr_html_(self: Any) -> str:
        return self.report()._repr_html_()  # type: ignore[no-any-return]


class ReportedCache(Shown):
    """What a cache says of itself: ``report()`` and ``repr``."""

    def report(self: Any) -> TableReport:
        """What the cache holds, to print.

        It has ``kv``, ``rows``, ``tokens`` of each row, ``nbytes`` allocated, ``nbytes_per_token``,
        ``nbytes_dynamic`` and ``nbytes_bfloat16``, the bytes of the same rows in a ``DynamicCache`` of the
        model's dtype and of bfloat16, and ``smoothed``, the layers whose keys are.
        """
        return report_of(self._own_layers, self.num_rows, self.nbytes)

    def __repr__(self: Any) -> str:
        found, name = self.report(), type(self).__name__
        if found["kv"] is None:
            return f"{name}(empty)"
        rows = f"{found['rows']} rows x " if found["rows"] != 1 else ""
        floats = found["nbytes_dynamic"] / max(1, found["rows"] * found["tokens"])
        nbytes = f"{found['nbytes_per_token']:,.0f} bytes a token of {floats:,.0f}"
        return f"{name}(kv={found['kv']!r}, {rows}{found['tokens']:,} tokens, {nbytes})"


def _kind(layers: Sequence[Any]) -> str | None:
    """Format string of layers with tokens; a layer that could not be smoothed is as the others are."""
    formats: list[CacheFormat] = [layer.pages.format for layer in layers]
    smoothing = next((x.smoothing for x in formats if x.smoothing is not None), None)
    names = set()
    for layer, format in zip(layers, formats, strict=True):
        specs = layer.pages.storage.specs if layer.pages.storage is not None else ()
        dims = (None if spec is None else spec.head_dim for spec in specs)
        names.add(replace(format, smoothing=smoothing if format.quant else None).kind(*dims))
    return None if not names else names.pop() if len(names) == 1 else "plan"


def _numbers(layer: Any) -> int:
    """Numbers that a ``DynamicCache`` keeps of a row: of a window, without the last token."""
    storage = layer.pages.storage
    if storage is None or layer._dtype is None:
        return 0
    num_tokens = int(layer.get_seq_length())
    if layer.window is not None:
        num_tokens = min(num_tokens, layer.window - 1)
    size: int = sum(spec.heads * spec.head_dim for spec in storage.specs if spec is not None)
    return num_tokens * size
