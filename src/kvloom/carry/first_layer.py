"""The check of the first layer: its keys and values depend on tokens and positions alone.

It costs an embedding, a norm, two projections and RoPE, and finds nearly every misreading of a cache: other
pairs, another rotation, another base of RoPE, other positions, missing or other tokens. It cannot find other
weights behind the first projections, or layers in another order.

Shapes: T tokens, N that the layer holds, H key/value heads, D elements of a head vector.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from kvloom.carry.carried import CarriedCache, CarriedSide, floats_of
from kvloom.carry.llama.conventions import rotation_of
from kvloom.carry.rope_pairs import to_adjacent, to_halves
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.quant.rotation import rotate

_BOUNDS: Final = (
    ("float32", 1e-4),
    ("float16", 1e-3),
    ("bfloat16", 1e-2),
    ("q8_0", 2e-2),
    ("q4_0", 0.25),
    ("int8", 2e-2),
    ("affine8", 2e-2),
    ("affine4", 0.25),
    ("int4", 0.25),
    ("affine2", 0.9),
    ("int2", 0.9),
)
"""Largest relative distance of a token's vectors by the beginning of a kind: a few times that of rounding."""
_FEW: Final = 8
"""Tokens that are named when they are others."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class FirstLayerReport:
    """How far the first layer of a cache is from what a model computes.

    Attributes:
        keys: Length of the difference of all keys over that of the keys.
        values: The same of values.
        worst_key: The same of the token whose keys are farthest.
        worst_value: The same of values.
        bound: What is allowed of the worst token.
        why: What is wrong, as a sentence; empty if nothing is.
    """

    keys: float
    values: float
    worst_key: float
    worst_value: float
    bound: float
    why: str


def expect_first_layer(
    cache: CarriedCache, model: Any, tokens: Sequence[int] | None = None, bound: float | None = None
) -> FirstLayerReport:
    """``check_first_layer``, which raises ArgumentError if something is wrong."""
    report = check_first_layer(cache, model, tokens, bound)
    if report.why:
        raise ArgumentError(f"cache must have the first layer of this model and text: {report.why}")
    return report


def check_first_layer(
    cache: CarriedCache, model: Any, tokens: Sequence[int] | None = None, bound: float | None = None
) -> FirstLayerReport:
    """Compare the first layer of a cache with what a model computes.

    Args:
        cache: The cache.
        model: The model.
        tokens: Ids of its tokens; ``None`` for those that the cache has.
        bound: Largest relative distance of a token's vectors; ``None`` for that of the kinds of the cache and
            of the model's dtype.

    Raises:
        ArgumentError: tokens are not known, or not as many as those of the cache.
    """
    ids = cache.tokens if tokens is None else tuple(tokens)
    if ids is None or len(ids) != cache.num_tokens:
        raise ArgumentError(
            f"tokens must be the {cache.num_tokens} of the cache, got {'none' if ids is None else len(ids)}"
        )
    layer = cache.layers[0]
    if bound is None:
        kinds = [x.rounded_to or x.kind for x in (layer.keys, layer.values)]
        bound = max(map(_bound_of, (*kinds, dtype_name(model.dtype))))
    computed = _Computed(model, ids, layer.keys.num_tokens)
    found = _Found([_vectors(side) for side in (layer.keys, layer.values)], layer.has_latents)
    wanted = computed.at(0)
    off = [_off(x, y) for x, y in zip(found.sides, wanted, strict=True)]
    if [tuple(x.shape) for x in found.sides] != [tuple(x.shape) for x in wanted]:
        raise ArgumentError(
            f"cache must have keys and values {[list(x.shape) for x in wanted]} in its first layer, got "
            f"{[list(x.shape) for x in found.sides]}"
        )
    worst = [float(x.max()) for x in off]
    why = "" if max(worst) <= bound else _why(found, computed, bound)
    keys, values = (float((x - y).norm() / y.norm()) for x, y in zip(found.sides, wanted, strict=True))
    return FirstLayerReport(keys, values, worst[0], worst[1], bound, why)


def _bound_of(kind: str) -> float:
    return next(bound for name, bound in _BOUNDS if kind.startswith(name))


def _vectors(side: CarriedSide) -> Tensor:
    return floats_of(side.load()).float().cpu()


def _off(x: Tensor, y: Tensor) -> Tensor:
    """Relative distance of each token ``[N]``; that of a NaN is infinite."""
    if x.shape != y.shape:
        return torch.full((1,), torch.inf)
    distance = (x - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1).clamp(min=1e-30)
    finite: Tensor = distance.nan_to_num(torch.inf, torch.inf)
    return finite


class _Seen(Exception):
    """The first layer gave its keys and values to the cache: nothing behind it is wanted."""


class _FirstLayerAlone(DynamicCache):  # type: ignore[misc]
    """A cache that takes keys and values of the first layer and ends the forward."""

    taken: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take keys and values ``[1, H, T, D]``."""
        self.taken = key_states, value_states
        raise _Seen


class _Computed:
    """Keys and values of the first layer, as a model computes them."""

    def __init__(self, model: Any, tokens: Sequence[int], num_held: int) -> None:
        self._model, self._tokens, self._held = model, tokens, num_held

    def at(self, first: int) -> list[Tensor]:
        """Keys and values ``[N, H, D]`` float32, with the first token at position ``first``."""
        model, count = self._model, len(self._tokens)
        ids = torch.tensor([[*self._tokens]], device=model.device)
        where = (
            {"position_ids": torch.arange(first, first + count, device=model.device)[None]} if first else {}
        )
        cache = _FirstLayerAlone(config=text_config_of(model))
        with undisturbed(model):
            try:
                model(input_ids=ids, use_cache=True, **where, **as_argument(model, cache))
            except _Seen:
                pass
        if cache.taken is None:
            raise ArgumentError(f"model must give keys to its cache, {type(model).__name__} gives none")
        return [x[0].transpose(0, 1)[-self._held :].float().cpu() for x in cache.taken]


class _Found:
    """Keys and values of a cache's first layer, also read otherwise."""

    def __init__(self, sides: list[Tensor], has_latents: bool) -> None:
        self.sides = sides
        self._of_rope = 1 if has_latents else 0  # the side that carries positions
        self.names = ("latents", "rope keys") if has_latents else ("keys", "values")

    def rope(self, sides: Sequence[_T]) -> _T:
        """Of two sides the one that carries positions."""
        return sides[self._of_rope]

    def plain(self, sides: Sequence[_T]) -> _T:
        """Of two sides the one that does not."""
        return sides[1 - self._of_rope]

    def otherwise(self) -> Iterator[tuple[str, list[Tensor]]]:
        """What other readings of the same bytes would have found, and their names."""
        permuted: tuple[Callable[[Tensor, int], Tensor] | None, ...] = (None, to_halves, to_adjacent)
        for is_turned in (False, True):
            for permute in permuted:
                if not is_turned and permute is None:
                    continue
                sides = [*self.sides]
                if is_turned:
                    sides = [_turned(x, side == self._of_rope) for side, x in enumerate(sides)]
                if permute is not None:
                    x = sides[self._of_rope]
                    sides[self._of_rope] = permute(x, x.shape[-1])
                words = " and ".join(
                    x for x, is_so in (("other pairs", permute), ("other rotation", is_turned)) if is_so
                )
                yield words, sides


def _turned(x: Tensor, is_keys: bool) -> Tensor:
    rotation = rotation_of(x.shape[-1], is_keys)
    return rotate(x, rotation) if rotation else x


def _why(found: _Found, computed: _Computed, bound: float) -> str:
    """What is wrong; each thing that may be is one comparison."""
    wanted = computed.at(0)
    for name, sides in found.otherwise():
        if all(float(_off(x, y).max()) <= bound for x, y in zip(sides, wanted, strict=True)):
            return f"it is with {name}"
    plain, of_model = found.plain(found.sides), found.plain(wanted)
    off = _off(plain, of_model)
    if float(off.max()) <= bound:
        for shift in (1, -1):
            if (
                shift > 0
                and float(_off(found.rope(found.sides), found.rope(computed.at(shift))).max()) <= bound
            ):
                return f"it is with positions from {shift}"
        right, wrong_side = found.plain(found.names), found.rope(found.names)
        return f"{right} are right, and {wrong_side} are of another RoPE"
    if len(plain) > 1:
        if float(_off(plain[:-1], of_model[1:]).max()) <= bound:
            return "its first token is missing: it is of the text from the second token on"
        if float(_off(plain[1:], of_model[:-1]).max()) <= bound:
            return "it has a token before the first of the text"
    wrong = (off > bound).nonzero().flatten().tolist()
    if len(wrong) <= max(len(off) // 2, 1):
        several = ", ".join(map(str, wrong[:_FEW]))
        return (
            f"{len(wrong)} of {len(off)} tokens are others, at {several}{' ...' if len(wrong) > _FEW else ''}"
        )
    return "both keys and values are others: of another text or of other weights"
