"""Multi-head latent attention (MLA), whose caches hold latents: attention reads the latents in place.

In each forward a model expands all of its cached latents to keys and values of all heads: ``expand_kv``, by
the weight of ``kv_b_proj``. With the weight W of one head in two parts, of keys and of values, and latents c,

    q . (W_k c) = (q W_k) . c        and        sum of p (W_v c) = W_v (sum of p c).

So a few queries are multiplied by the weight instead of all tokens ("absorbed"). Attention then has one
key/value head: a key is a latent followed by its rope key, and its value is the latent.

Shapes: B sequences, Q queries of each, N tokens, H heads; ``nope`` and ``rope`` elements of a query without
and with positions, ``v`` of a value, ``rank`` of a latent.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.caches import Tokens
from kvloom.caches.tensors.absorption import LatentSizes, is_faster_expanded
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.attention.lazy_states import LazyStates
from kvloom.integrations.transformers.attention.lazy_tensor import LazyTensor
from kvloom.integrations.transformers.invariance.layers import InvariantRows
from kvloom.integrations.transformers.invariance.packed_only import PackedOnly
from kvloom.integrations.transformers.invariance.rules import NONE, Product, rule_of
from kvloom.integrations.transformers.models.text_config import EXPAND
from kvloom.ops.invariance import is_batch_invariant

SESSION_ATTENTION: Final = "kvloom_paged"
"""Name of the attention of continuous batching sessions, which stores the latents that layers pass to it."""

_ORIGINAL: Final = "_kvloom_original"
_IS_LINEAR: Final = "_kvloom_expands_linearly"


def answer_latents(model: nn.Module) -> None:
    """Let ``expand_kv`` of a model's layers return ``ExpandedStates`` for cached latents.

    In sessions it also does so for latents of new tokens. Other tensors are expanded as before. Each class of
    layers is changed once.
    """
    for module in model.modules():
        owner = next((x for x in type(module).__mro__ if EXPAND in vars(x)), None)
        if owner is None:
            continue
        if not hasattr(vars(owner)[EXPAND], _ORIGINAL):
            setattr(owner, EXPAND, _answering(vars(owner)[EXPAND]))
        if _IS_LINEAR not in vars(owner) and why_expanded(module) is None and not _is_meta(module):
            is_linear = _expands_linearly(module)
            if is_linear is not None:
                setattr(owner, _IS_LINEAR, is_linear)


def why_expanded(module: nn.Module) -> str | None:
    """Why a layer's queries cannot be multiplied by its weight instead of its latents, or ``None``."""
    projection = getattr(module, "kv_b_proj", None)
    kind = type(projection)
    is_plain = kind is nn.Linear or isinstance(projection, InvariantRows)
    if isinstance(projection, PackedOnly):
        return "kv_b_proj has no weights but packed ones"
    if not isinstance(projection, nn.Linear) or not is_plain:
        is_of_torch = kind.__module__.startswith("torch.")  # others may be called Linear, too
        return f"kv_b_proj is a {kind.__name__ if is_of_torch else f'{kind.__module__}.{kind.__name__}'}"
    if projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection):
        return "kv_b_proj has hooks"
    weight = projection.weight
    if projection.bias is not None or type(weight) is not nn.Parameter or weight.dtype not in FLOAT_DTYPES:
        return f"kv_b_proj has a bias or a weight of {weight.dtype}"
    return None


def why_not_absorbed(module: nn.Module) -> str | None:
    """As ``why_expanded``; also a reason if ``expand_kv`` is not known to be the product described above."""
    reason = why_expanded(module)
    if reason is None and not getattr(type(module), _IS_LINEAR, False):
        reason = "expand_kv is not known to be a product by kv_b_proj"
    return reason


def expect_absorbed(model: nn.Module) -> None:
    """Call ``answer_latents`` for a session, which never expands latents.

    Raises:
        UnsupportedError: the latents of a layer must be expanded. A layer on the meta device is not tried.
    """
    answer_latents(model)
    for name, module in model.named_modules():
        reason = why_not_absorbed(module) if hasattr(type(module), EXPAND) else None
        if reason is not None and (why_expanded(module) is not None or not _is_meta(module)):
            raise UnsupportedError(
                f"model must have layers whose latents can be attended to in place, got {name} of "
                f"{type(model).__name__}: {reason}"
            )


def _is_meta(module: Any) -> bool:
    return bool(module.kv_b_proj.weight.is_meta)


def _expands_linearly(module: Any) -> bool | None:
    """Whether a layer's ``expand_kv`` is the product described above, tried with two latents.

    ``None`` if that cannot be told because results are not finite.
    """
    weight = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    # What is found counts for the class, also outside of the caller's autocast.
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        latents, rope = (
            torch.randn(1, 1, 2, n, generator=generator).to(weight)
            for n in (weight.shape[1], module.qk_rope_head_dim)
        )
        found = module.expand_kv(latents, rope)
        of_keys, of_values = _parts_of(module)
        key = torch.cat((latents @ of_keys.mT, rope.expand(-1, len(of_keys), -1, -1)), -1)
        wanted = key, latents @ of_values.mT
    if not all(bool(x.isfinite().all()) for x in wanted):
        return None
    bound = 16 * torch.finfo(weight.dtype).eps
    return all(
        a.shape == b.shape and bool((a - b).float().abs().max() <= bound * b.float().abs().max())
        for a, b in zip(found, wanted, strict=True)
    )


def _parts_of(module: Any) -> tuple[Tensor, Tensor]:
    """Views of the weights of keys ``[H, nope, rank]`` and of values ``[H, v, rank]``."""
    nope = module.qk_nope_head_dim
    heads: Tensor = module.kv_b_proj.weight.unflatten(0, (-1, nope + module.v_head_dim))
    return heads[:, :nope], heads[:, nope:]


def _answering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> Any:
        are_lazy = isinstance(kv_nope, LazyStates) and isinstance(k_rot, LazyStates)
        are_cached = are_lazy and kv_nope.tokens is k_rot.tokens and not kv_nope.is_written
        if are_cached or self.config._attn_implementation == SESSION_ATTENTION:
            source = _Source(self, original, kv_nope, k_rot)
            return ExpandedStates(source, 0), ExpandedStates(source, 1)
        return original(self, kv_nope, k_rot)

    setattr(expand_kv, _ORIGINAL, original)
    return expand_kv


@dataclass(eq=False)
class _Source:
    """Latents and rope keys of a layer's cache, or of its new tokens, and the layer's ``expand_kv``."""

    module: Any
    expand: Callable[..., tuple[Tensor, Tensor]]
    latents: LazyStates | Tensor
    rope: LazyStates | Tensor

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, N, nope + rope]`` and values ``[B, H, N, v]``."""
        given = (x.gather() if isinstance(x, LazyTensor) else x for x in (self.latents, self.rope))
        return self.expand(self.module, *given)

    @cached_property
    def tokens(self) -> Tokens | None:
        """The expanded tokens if they have a residual window."""
        if not isinstance(self.latents, LazyStates) or self.latents.tokens.exact is None:
            return None
        return self.latents.tokens.mapped(partial(self.expand, self.module), self.latents.dtype)


@dataclass(frozen=True)
class Absorbed:
    """Queries that were multiplied by the weight of keys.

    Attributes:
        query: ``[B, H, Q, rank + rope]``.
        weight: Weight of values, ``[H, v, rank]``.
        is_invariant: Whether a query has the same bits among any others.
    """

    query: Tensor
    weight: Tensor
    is_invariant: bool

    def values(self, out: Tensor) -> Tensor:
        """Output ``[B, Q, H, v]`` for weighted sums of latents ``[B, Q, H, rank]``."""
        found: Tensor = _by_head(out.flatten(0, 1), self.weight, self.is_invariant)
        return found.view(*out.shape[:3], -1)


class ExpandedStates(LazyTensor):
    """Keys or values ``[B, H, N, D]`` that a layer would make of latents; expanded when they are used."""

    def __init__(self, source: _Source, side: int) -> None:
        self._source, self._side = source, side

    @property
    def latents(self) -> Any:
        """``[B, 1, N, rank]``: ``LazyStates``, or a tensor of new tokens."""
        return self._source.latents

    @property
    def rope(self) -> Any:
        """``[B, 1, N, rope]``, as ``latents``."""
        return self._source.rope

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        return self._source.latents.dtype

    @property
    def device(self) -> torch.device:
        """Device of the latents."""
        return self._source.latents.device

    def gather(self) -> Tensor:
        """The tensor; keys and values are expanded together, once."""
        return self._source.expanded[self._side]

    def tokens(self, values: Any) -> Tokens | None:
        """Expanded tokens that are codes and a residual window, which each query reads in its own part.

        ``None`` for others, of which all queries read the same tensors, those of ``gather``.
        """
        is_one = isinstance(values, ExpandedStates) and values._source is self._source
        return self._source.tokens if is_one else None

    def absorbed(
        self, values: "ExpandedStates", query: Tensor, num_read: int | None = None
    ) -> Absorbed | None:
        """Absorbed queries, or ``None`` if the latents are to be expanded.

        They are expanded if the layer's weight cannot be used, if keys and values have different sources, and
        if that takes less time: in a text's first forward, and for many queries at once. So a query's bits
        depend on the number of tokens in its forward, except with ``ops.BatchInvariance`` and in a session,
        which absorb all queries.

        Args:
            values: The values that belong to these keys.
            query: ``[B, H, Q, nope + rope]``.
            num_read: Number of latents that are chosen for each query; ``None`` for all.
        """
        module = self._source.module
        if values._source is not self._source or why_not_absorbed(module) is not None:
            return None
        of_keys, of_values = _parts_of(module)
        if query.dtype != of_keys.dtype or query.shape[1] != len(of_keys):
            return None
        nope, rank = of_keys.shape[1:]
        rope = query.shape[3] - nope
        is_always = isinstance(self.latents, Tensor) or is_batch_invariant()
        counts = query.shape[2], self.latents.shape[2]
        sizes = LatentSizes(rank, nope, rope, of_values.shape[1])
        if not is_always and is_faster_expanded(*counts, sizes, num_read):
            return None
        is_invariant = isinstance(module.kv_b_proj, InvariantRows) and not torch.compiler.is_compiling()
        rows = query.transpose(1, 2).flatten(0, 1)  # [B * Q, H, nope + rope]
        latent = _by_head(rows[..., :nope], of_keys.mT, is_invariant)
        whole = torch.cat((latent, rows[..., nope:]), dim=-1).unflatten(0, (len(query), -1))
        return Absorbed(whole.transpose(1, 2), of_values, is_invariant)


def _by_head(rows: Tensor, weight: Tensor, is_invariant: bool) -> Tensor:
    """Products ``[M, H, N]`` of rows ``[M, H, K]`` by the weights ``[H, N, K]`` of their heads."""
    # The order of factors avoids that oneDNN copies the weight in each call.
    products = _Products(len(weight), weight.dtype == torch.bfloat16 and weight.stride(-1) == 1)
    rule = rule_of(weight[0], None, products) if is_invariant else NONE
    return rule.apply(partial(products.multiply, weight), rows)


@dataclass(frozen=True)
class _Products:
    """Products by the weights of all heads at once; ``rule_of`` calls it with the weight of one head."""

    heads: int
    is_second: bool

    def multiply(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Products as in ``_by_head``; ``is_second`` is whether rows are the second factor."""
        if self.is_second:
            return torch.bmm(weight, rows.permute(1, 2, 0)).permute(2, 0, 1)
        return torch.bmm(rows.transpose(0, 1), weight.mT).transpose(0, 1)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """The product by ``weight`` ``[N, K]`` of the last head."""

        def product(rows: Tensor) -> Tensor:
            several = weight.expand(self.heads, -1, -1), rows.unsqueeze(1).expand(-1, self.heads, -1)
            return self.multiply(*several)[:, -1]

        return product
