"""Bits of the keys and values of each layer that give the least error within a budget of bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.caches.format import CacheFormat, kept_as
from kvloom.core.checks import expect_range
from kvloom.core.entries import CODES, Entry, group_for
from kvloom.core.spelling import parse_kind
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.models.bit_plan import BitPlan, config_digest
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.positions import expect_positions
from kvloom.integrations.transformers.models.text_config import (
    head_dim_of,
    head_dims_of,
    layer_configs,
    text_config_of,
)
from kvloom.measuring.head_errors import HeadErrors
from kvloom.measuring.quality import ROWS, expect_decoder

KINDS: Final = (
    "int2,rotate=keys",
    "int4,rotate=keys",
    "int4:g32,rotate=keys",
    "int4:g16,rotate=keys",
    "int8,rotate=keys",
    "auto",
)
"""Kinds to choose from for each side."""

_Side = tuple[int, int]
"""Side of a layer: its number, and 0 for keys or 1 for values."""


def plan_bits(
    model: Any,
    input_ids: Tensor,
    *,
    bits: float | None = None,
    budget: float | None = None,
    kinds: Sequence[str] = KINDS,
    recent: int = CODES["int4"].recent,
    chunk: int = 32,
    on_step: Callable[[int, int], None] | None = None,
) -> BitPlan:
    """Measure the error of each kind on each side of each layer, and choose the best within a budget.

    While the model reads with exact keys and values, attention of each layer is computed again with only its
    keys, and only its values, as each kind. The plan has exactly the least sum of squared errors within the
    budget. The same model and text give the same plan.

    Args:
        model: A ``PreTrainedModel`` that generates.
        input_ids: ``[N, W]`` int64 or int32, the text to calibrate on.
        bits: Average bits of an element, scales included.
        budget: Bytes of a token in all layers, scales included, instead of ``bits``.
        kinds: Kinds to choose from; codes whose group does not divide the head dim are omitted.
        recent: Length of the residual window in layers of codes. Its bytes do not count in the budget.
        chunk: Number of tokens fed at a time.
        on_step: Called after each step with the number of steps done and of all steps.

    Raises:
        ArgumentError: an argument has another value, or the budget is less than the cheapest kind needs.
        UnsupportedError: as ``KVCache.for_model``.
    """
    if (bits is None) == (budget is None):
        raise ArgumentError(f"one of bits and budget must be given, got {bits!r} and {budget!r}")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        got = list(input_ids.shape) if isinstance(input_ids, Tensor) else input_ids
        raise ArgumentError(f"input_ids must be [N, W] with at least one token, got {got!s:.60}")
    if not kinds:
        raise ArgumentError(f"kinds must not be empty, got {kinds!r}")
    expect_range("recent", recent, 0)
    for kind in kinds:
        if parse_kind("kinds", kind).recent is not None:
            raise ArgumentError(
                f"kinds must be without recent, which is an argument for all of them, got {kind!r}"
            )
    expect_decoder(model)
    expect_positions("input_ids", model, input_ids.shape[1])
    config = text_config_of(model)
    dims = [dim for own in head_dims_of(config) for dim in own]
    head_dim = gcd(*(dims or map(head_dim_of, layer_configs(config))))
    kinds = [*dict.fromkeys(filter(None, (_with_group(kind, head_dim) for kind in kinds)))]
    errors = _measure(model, input_ids, kinds, recent, chunk, on_step)
    costs, elements = _costs(model, kinds)
    limit = bits * elements / 8 if bits is not None else float(budget or 0)
    chosen = _cheapest_errors([(costs[side], errors[side]) for side in sorted(costs)], limit)
    if chosen is None:
        least = sum(min(cost) for cost in costs.values())
        if bits is not None:
            raise ArgumentError(f"bits must be at least {8 * least / elements:g}, got {bits:g}")
        raise ArgumentError(f"budget must be at least {least} bytes a token, got {limit:g}")
    by_side = dict(zip(sorted(costs), chosen, strict=True))
    num_layers = max(layer for layer, _ in by_side) + 1
    # A layer without keys of its own has no choice.
    layers = [
        (kinds[by_side.get((layer, 0), 0)], kinds[by_side.get((layer, 1), 0)]) for layer in range(num_layers)
    ]
    squares = sum(errors[side][choice] for side, choice in by_side.items())
    return BitPlan(
        config=config_digest(text_config_of(model)),
        layers=tuple(layers),
        nbytes_per_token=sum(costs[side][choice] for side, choice in by_side.items()),
        error=(squares / num_layers) ** 0.5,
        recent=recent,
    )


def _with_group(kind: str, head_dim: int) -> str | None:
    """``kind`` with its group for a head dim; ``None`` if there is none."""
    found = parse_kind("kinds", kind)
    if not found.bits:
        return kind
    group = found.group or group_for(head_dim)
    return None if group is None or head_dim % group else str(replace(found, group=group))


def _measure(
    model: Any,
    input_ids: Tensor,
    kinds: Sequence[str],
    recent: int,
    chunk: int,
    on_step: Callable[[int, int], None] | None,
) -> dict[_Side, list[float]]:
    """Mean squared error of the heads' output, for each side and kind."""
    makers = [
        (lambda keys=keys, values=values: KVCache.for_model(model, keys, values=values))
        for kind in (f"{x},recent={recent}" if parse_kind("kinds", x).bits else x for x in kinds)
        for keys, values in ((kind, "auto"), ("auto", kind))
    ]
    meter = HeadErrors(model, makers)
    width = input_ids.shape[1]
    steps = [(rows, i) for rows in input_ids.to(model.device).split(ROWS) for i in range(0, width, chunk)]
    cache: Any = None
    for done, (rows, start) in enumerate(steps, 1):
        cache = KVCache.for_model(model) if start == 0 else cache
        with meter.measured(is_first=start == 0), torch.no_grad():
            model(rows[:, start : start + chunk], use_cache=True, **as_argument(model, cache))
        if on_step is not None:
            on_step(done, len(steps))
    found: dict[_Side, list[float]] = {}
    for i, by_layer in enumerate(meter.result()):
        for layer, heads in by_layer.items():
            found.setdefault((layer, i % 2), []).append(sum(x**2 for x in heads) / len(heads))
    return found


def _costs(model: Any, kinds: Sequence[str]) -> tuple[dict[_Side, list[int]], int]:
    """Bytes of a token for each side and kind, and the number of elements of a token in all layers."""
    cache = KVCache.for_model(model)
    with torch.no_grad():
        model(
            torch.zeros(1, 1, dtype=torch.int64, device=model.device),
            use_cache=True,
            **as_argument(model, cache),
        )
    costs: dict[_Side, list[int]] = {}
    elements = 0
    formats = [CacheFormat(*kept_as("kinds", kind)) for kind in kinds]
    for index, layer in enumerate(cache.layers):
        storage = layer.pages.storage if isinstance(layer, KVCacheLayer) else None
        if storage is None:
            continue
        for number, side in enumerate(storage.entry.sides):
            computed = Entry(storage.entry.heads, side, None)
            elements += computed.heads * side.head_dim
            costs[index, number] = [format.entry(computed).nbytes for format in formats]
    return costs, elements


def _cheapest_errors(items: Sequence[tuple[list[int], list[float]]], limit: float) -> list[int] | None:
    """Choose one of each item's ``(costs, errors)``: the least sum of errors within a limit of costs.

    Keeps all Pareto-optimal sums. Of equal ones the cheaper is chosen, then the one whose choices come first.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0, 0.0, ())]  # by cost
    for costs, errors in items:
        grown = [
            (cost + more, error + worse, (*choices, i))
            for cost, error, choices in front
            for i, (more, worse) in enumerate(zip(costs, errors, strict=True))
            if cost + more <= limit
        ]
        front, least = [], float("inf")
        for each in sorted(grown):
            if each[1] < least:
                front.append(each)
                least = each[1]
    return list(front[-1][2]) if front else None
