"""Where key smoothing is asked for, and what is said of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.caches import CacheFormat
from kvloom.core.spelling import is_plan, parse_kind
from kvloom.integrations.transformers.bit_plan import BitPlan
from kvloom.integrations.transformers.smoothing.calibration import smoothing_of
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing


def smoothing_for(model: Any, kv: str | Path) -> tuple[LayerSmoothing, ...]:
    """How keys of each layer of a model are to be smoothed that are kept as ``kv`` says; empty if none are.

    Raises:
        ArgumentError: ``kv`` is no such kind or plan.
    """
    names = [keys for keys, _ in BitPlan.load(kv, "kv").layers] if is_plan(kv) else [kv]
    kinds = [parse_kind("kv", name) for name in names]
    return smoothing_of(model) if any(kind.bits and kind.smooth != "none" for kind in kinds) else ()


def smoothing_report(format: CacheFormat, smoothing: Sequence[LayerSmoothing]) -> dict[str, list[int]]:
    """Numbers of layers by what was done to smooth their keys, and why not more.

    Args:
        format: As ``cache_format`` made it.
        smoothing: That which it was made with.
    """
    said: dict[str, list[int]] = {}
    for i, layer in enumerate(smoothing):
        is_off = layer.smoothing is not None and format.of_layer(i).smoothing is None
        said.setdefault("not asked for" if is_off else layer.reason, []).append(i)
    return said
