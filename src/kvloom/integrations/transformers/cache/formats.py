"""Cache formats for a model's configuration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvloom.caches import CacheFormat
from kvloom.caches.format import kept_as
from kvloom.core.entries import LEAST_GROUP
from kvloom.core.specs import QuantSpec
from kvloom.core.spelling import is_plan, parse_kind, recent_of
from kvloom.errors import ArgumentError, ConfigError
from kvloom.integrations.transformers.models.bit_plan import BitPlan, config_digest
from kvloom.integrations.transformers.models.text_config import has_latents, head_dims_of

if TYPE_CHECKING:
    from kvloom.integrations.transformers.smoothing import LayerSmoothing

_BITS_OF_ROPE_KEYS: Final = 8


def cache_format(
    config: Any,
    kv: str | Path = "auto",
    page_size: int = 16,
    max_tokens: int | None = None,
    values: str | None = None,
    layout: str = "auto",
    smoothing: "Sequence[LayerSmoothing]" = (),
) -> CacheFormat:
    """The format for arguments of ``KVCache.for_model``; raises the same errors.

    ``smoothing`` has one item per layer, as ``smoothing_for`` returns it.
    """
    if layout == "auto" and has_latents(config):
        layout = "HND"  # the layout of values, since latents are also values
    if is_plan(kv):
        if values is not None:
            raise ArgumentError(f"values must be None beside a plan, got {values!r}")
        plan = BitPlan.load(kv, "kv")
        if plan.config != config_digest(config):
            raise ArgumentError(f"kv must be a plan that was made for this model, got {str(kv)!r} of another")
        base = CacheFormat(None, None, page_size, max_tokens, layout=layout)
        format = plan.format("kv", base)
        return _smoothed(format, smoothing, [parse_kind("kv", keys).smooth for keys, _ in plan.layers])
    formats, kinds = [], []
    sides: tuple[tuple[str, Any, Literal["keys", "values"]], ...] = (
        ("kv", kv, "keys"),
        ("kv", kv, "values") if values is None else ("values", values, "values"),
    )
    dims = head_dims_of(config)
    for number, (name, text, side) in enumerate(sides):
        dtype, quant = kept_as(name, text, side)
        if side == "values" and values is None and has_latents(config):
            quant = _of_rope_keys(quant)
        if quant is not None:
            for head_dim in sorted({own[number] for own in dims}):
                _expect_divides(name, text, quant, head_dim)
        formats.append(CacheFormat(dtype, quant, page_size, max_tokens, layout=layout))
        kinds.append(parse_kind(name, text))
    said = [kind.recent for kind in kinds]
    if None not in said and said[0] != said[1]:
        raise ArgumentError(f"values must have the residual window of kv, recent={said[0]}, got {values!r}")
    recent = recent_of(*kinds)
    return _smoothed(replace(formats[0], values=formats[1], recent=recent), smoothing, [kinds[0].smooth])


def _of_rope_keys(quant: QuantSpec | None) -> QuantSpec | None:
    """Format of rope keys beside latents: at least 8 bits, since these few channels hold all positions."""
    if quant is None or quant.bits >= _BITS_OF_ROPE_KEYS:
        return quant
    return QuantSpec(_BITS_OF_ROPE_KEYS)


def _smoothed(
    format: CacheFormat, smoothing: "Sequence[LayerSmoothing]", smooth: Sequence[str]
) -> CacheFormat:
    """``format`` with smoothing of the layers for which ``smooth`` is not ``"none"``.

    ``smooth`` has one item per layer if ``format`` has layers, else one for all.
    """
    if not smoothing:
        return format
    own = format.layers or (format,) * len(smoothing)
    smooth = smooth if format.layers else [*smooth] * len(smoothing)
    layers = (
        replace(x, smoothing=layer.smoothing if y != "none" and x.quant is not None else None, layers=None)
        for x, y, layer in zip(own, smooth, smoothing, strict=True)
    )
    return replace(format, layers=tuple(layers))


def _expect_divides(name: str, text: Any, quant: QuantSpec, head_dim: int) -> None:
    """Raise ArgumentError unless the group divides the head dim."""
    try:
        quant.for_head_dim(head_dim)
    except ConfigError:
        why = "" if quant.group else f", which is no multiple of {LEAST_GROUP}"
        raise ArgumentError(
            f"{name} must have a group that divides the head dim {head_dim}{why}, got {text!r}"
        ) from None
