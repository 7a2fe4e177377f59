"""Key smoothing for a cache format, and the report on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.caches import CacheFormat
from kvloom.core.spelling import is_plan, parse_kind
from kvloom.integrations.transformers.models.bit_plan import BitPlan
from kvloom.integrations.transformers.smoothing.calibration import smoothing_of
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing


def smoothing_for(model: Any, kv: str | Path) -> tuple[LayerSmoothing, ...]:
    """Smoothing of each layer of a model for the format ``kv``; empty if the format smooths no keys.

    Raises:
        ArgumentError: ``kv`` is no format string or plan.
    """
    names = [keys for keys, _ in BitPlan.load(kv, "kv").layers] if is_plan(kv) else [kv]
    kinds = [parse_kind("kv", name) for name in names]
    return smoothing_of(model) if any(kind.bits and kind.smooth != "none" for kind in kinds) else ()


def smoothing_report(format: CacheFormat, smoothing: Sequence[LayerSmoothing]) -> dict[str, list[int]]:
    """Numbers of layers by the reason that says how their keys are smoothed.

    Args:
        format: Result of ``cache_format``.
        smoothing: Smoothing with which it was made.
    """
    said: dict[str, list[int]] = {}
    for i, layer in enumerate(smoothing):
        is_off = layer.smoothing is not None and format.of_layer(i).smoothing is None
        said.setdefault("not asked for" if is_off else layer.reason, []).append(i)
    return said
