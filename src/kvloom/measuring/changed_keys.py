"""Hooks that give the keys of any model with RoPE the statistics of real keys, during a measurement.

Before RoPE, hooks scale and shift the outputs of key and query projections, or of the norms after them.

Shapes: W channels of a module's output for a token: H heads with D channels each, of which R are rotated.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.positions import positions_of
from kvloom.integrations.transformers.models.text_config import head_dim_of, text_config_of
from kvloom.measuring.key_statistics import KeyStatistics
from kvloom.measuring.quality import expect_decoder

_TOKENS: Final = 256
"""Number of pseudo-random tokens to measure keys."""
_EXACT: Final = 16.0
"""A power of two, which scales without rounding."""


@contextmanager
def changed_keys(model: Any, statistics: KeyStatistics) -> Iterator[None]:
    """Context in which the keys of all layers have these statistics, the same each time.

    Outliers keep the model's function, up to rounding: queries are divided by what keys are multiplied by.
    Biases do not: as in real models, they add a function of the distance to the scores. It has about the size
    of what the pair added before, which is lost: the pair's queries are divided by the bias's standard
    deviations.

    Args:
        model: A ``PreTrainedModel`` whose attentions have ``q_proj`` and ``k_proj``, with or without norms
            after them, and RoPE that pairs the first half of the rotated channels with the second.
        statistics: Outliers and biases of the keys.

    Raises:
        UnsupportedError: the model is another one, does not generate, or has an encoder.
    """
    if not (statistics.outliers or statistics.biases):
        yield
        return
    expect_decoder(model)
    sources = _sources(model)
    tokens = torch.randint(
        model.config.get_text_config(decoder=True).vocab_size,
        (1, min(_TOKENS, positions_of(model) or _TOKENS)),
        generator=torch.Generator().manual_seed(1),
    ).to(model.device)
    seen, expected = _measure_outputs(model, sources, tokens)
    with _with_changes(sources, [_probe(source, each) for source, each in zip(sources, seen, strict=True)]):
        with torch.no_grad():
            found = model(tokens, use_cache=False).logits
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().amax())):
        raise _unsupported(model)
    generator = torch.Generator().manual_seed(1)
    changes = [
        _change(source, each, statistics, generator) for source, each in zip(sources, seen, strict=True)
    ]
    with _with_changes(sources, changes):
        yield


class _Source(NamedTuple):
    """Modules whose outputs are the keys and the queries of a layer, and the channels of a head."""

    key: nn.Module
    query: nn.Module
    head_dim: int
    rotated: int


class _Seen(NamedTuple):
    """Measured values of a layer: ``[H]`` standard deviations of the module's keys, and the query heads."""

    deviation: Tensor
    query_heads: int


@dataclass(frozen=True, eq=False)
class _Change:
    """Change of a layer: ``keys * scale + bias``, all ``[H, D]``, and ``queries / divisor``, ``[Hq, D]``."""

    scale: Tensor
    bias: Tensor
    divisor: Tensor

    def key(self, x: Tensor) -> Tensor:
        """Change keys ``[..., H * D]``, or ``[..., H, D]`` in any order if all heads change alike."""
        return (x.float() * self.scale.flatten() + self.bias.flatten()).to(x.dtype)

    def query(self, x: Tensor) -> Tensor:
        """Change queries; shapes as of ``key``."""
        return (x.float() / self.divisor.flatten()).to(x.dtype)


def _unsupported(model: Any) -> UnsupportedError:
    return UnsupportedError(
        "model must have q_proj and k_proj in all of its attentions, and RoPE that pairs the first half of "
        f"a head's channels with the second, so that its keys can be changed, got {type(model).__name__}"
    )


def _sources(model: Any) -> list[_Source]:
    """Modules of keys and queries of each layer."""
    config = text_config_of(model)
    parameters = getattr(config, "rope_parameters", None) or {}
    share = getattr(config, "partial_rotary_factor", None) or parameters.get("partial_rotary_factor", 1.0)
    found = []
    for module in model.modules():
        ends = [_last_module(module, side) for side in "kq"]
        if getattr(module, "layer_idx", None) is not None and ends[0] is not None and ends[1] is not None:
            head_dim = getattr(module, "head_dim", None) or head_dim_of(config)
            found.append(_Source(ends[0], ends[1], head_dim, int(head_dim * share)))
    if not found:
        raise _unsupported(model)
    return found


def _last_module(attention: nn.Module, side: str) -> nn.Module | None:
    """Last module of keys (``"k"``) or queries of a layer: a projection, or the norm after it."""
    if not isinstance(getattr(attention, f"{side}_proj", None), nn.Module):
        return None
    named = [getattr(attention, f"{side}_{x}", None) for x in ("norm", "layernorm", "proj")]
    return next(x for x in named if isinstance(x, nn.Module))


def _measure_outputs(model: Any, sources: list[_Source], tokens: Tensor) -> tuple[list[_Seen], Tensor]:
    """Measure the modules' outputs; also returns the logits of the model."""
    given: dict[nn.Module, Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for source in sources:
            for module in source[:2]:
                _change_output(stack, module, partial(_note_output, given, module))
        logits = model(tokens, use_cache=False).logits
    found = []
    for source in sources:
        widths = [given[x].shape[-1] if x in given else 1 for x in source[:2]]
        heads, query_heads = (width // source.head_dim for width in widths)
        if any(width % source.head_dim for width in widths) or query_heads % heads:
            raise _unsupported(model)
        keys = given[source.key].float().reshape(-1, heads, source.head_dim)
        found.append(_Seen(keys.std(0).mean(-1), query_heads))
    return found, logits


def _probe(source: _Source, seen: _Seen) -> _Change:
    """Scale every other pair by a power of two, which changes no bit of the logits if these are the pairs."""
    scale = torch.ones(len(seen.deviation), source.head_dim, device=seen.deviation.device)
    scale[:, : source.rotated // 2 : 2] = scale[:, source.rotated // 2 : source.rotated : 2] = _EXACT
    return _Change(scale, torch.zeros_like(scale), _of_queries(scale, seen.query_heads))


def _change(source: _Source, seen: _Seen, statistics: KeyStatistics, generator: torch.Generator) -> _Change:
    """Draw the change of a layer: pairs of outliers and angles of biases for each head."""
    half = source.rotated // 2
    shape = len(seen.deviation), source.head_dim
    scale, bias, divisor = torch.ones(shape), torch.zeros(shape), torch.ones(shape)
    biased = sorted({int(place * half) for place in statistics.biases})
    for head, deviation in enumerate(seen.deviation.tolist()):
        free = [x for x in torch.randperm(half, generator=generator).tolist() if x not in biased]
        for pair in free[: statistics.outliers]:
            scale[head, [pair, pair + half]] = statistics.scale
        angles = 2 * pi * torch.rand(len(biased), generator=generator)
        norm = statistics.sigmas * deviation
        for pair, angle in zip(biased, angles, strict=True):
            bias[head, pair], bias[head, pair + half] = norm * angle.cos(), norm * angle.sin()
            divisor[head, [pair, pair + half]] = statistics.sigmas
    divisor = _of_queries(scale * divisor, seen.query_heads)
    return _Change(*(x.to(seen.deviation.device) for x in (scale, bias, divisor)))


def _of_queries(x: Tensor, query_heads: int) -> Tensor:
    """Repeat ``[H, D]`` to ``[Hq, D]``."""
    return x.repeat_interleave(query_heads // len(x), 0)


@contextmanager
def _with_changes(sources: list[_Source], changes: list[_Change]) -> Iterator[None]:
    with ExitStack() as stack:
        for source, change in zip(sources, changes, strict=True):
            _change_output(stack, source.key, change.key)
            _change_output(stack, source.query, change.query)
        yield


def _note_output(given: dict[nn.Module, Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """Record ``x`` as the output of a module, and return it."""
    given[module] = x
    return x


def _change_output(stack: ExitStack, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the output of a module until the stack is closed."""
    stack.callback(module.register_forward_hook(lambda _, args, out: change(out)).remove)
