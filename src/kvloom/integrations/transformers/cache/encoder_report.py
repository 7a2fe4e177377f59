"""What both halves of an encoder-decoder's cache hold, in numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvloom.caches import CacheFormat
from kvloom.integrations.transformers.cache.layers import KVCacheLayer


def report_of(layers: Sequence[KVCacheLayer], num_rows: int, nbytes: int) -> dict[str, Any]:
    """Numbers of one half.

    Args:
        layers: Its layers.
        num_rows: Rows that attention sees.
        nbytes: Bytes allocated.

    Returns:
        ``kv``, the format string, ``"plan"`` if layers differ, and ``None`` if nothing is stored; ``rows``;
        ``tokens`` of each row; ``nbytes``; and ``nbytes_dynamic``, those of the same rows in a
        ``DynamicCache``.
    """
    filled = [layer for layer in layers if layer.pages.storage is not None]
    return {
        "kv": _kind(filled),
        "rows": num_rows,
        "tokens": max((int(layer.get_seq_length()) for layer in filled), default=0),
        "nbytes": nbytes,
        "nbytes_dynamic": num_rows * sum(map(_nbytes_dynamic, filled)),
    }


def _kind(layers: Sequence[KVCacheLayer]) -> str | None:
    """Format string of layers with tokens; a layer that could not be smoothed is as the others are."""
    formats: list[CacheFormat] = [layer.pages.format for layer in layers]
    smoothing = next((x.smoothing for x in formats if x.smoothing is not None), None)
    names = set()
    for layer, format in zip(layers, formats, strict=True):
        specs = layer.pages.storage.specs if layer.pages.storage is not None else ()
        dims = (None if spec is None else spec.head_dim for spec in specs)
        names.add(replace(format, smoothing=smoothing if format.quant else None).kind(*dims))
    return None if not names else names.pop() if len(names) == 1 else "plan"


def _nbytes_dynamic(layer: KVCacheLayer) -> int:
    """Bytes of a row's keys and values in a ``DynamicCache``; of a window, without the last token."""
    storage, dtype = layer.pages.storage, layer._dtype
    if storage is None or dtype is None:
        return 0
    num_tokens = int(layer.get_seq_length())
    if layer.window is not None:
        num_tokens = min(num_tokens, layer.window - 1)
    size: int = dtype.itemsize
    return num_tokens * size * sum(spec.heads * spec.head_dim for spec in storage.specs if spec is not None)
