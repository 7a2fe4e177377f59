"""Multi-head latent attention (MLA), whose caches hold latents: attention reads them where they lie.

In each forward a model expands all of its cached latents to keys and values of all heads: ``expand_kv``, by
the weight of ``kv_b_proj``. With the weight W of one head in two parts, of keys and of values, and latents c,

    q . (W_k c) = (q W_k) . c        and        sum of p (W_v c) = W_v (sum of p c).

So a few queries are multiplied by the weight instead of all tokens ("absorbed"), and attention has one
key/value head: latents with rope keys behind them, of which the values are the latents.

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

from kvloom.caches.absorption import LatentSizes, is_faster_expanded
from kvloom.core.checks import FLOAT_DTYPES
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.invariance.layers import InvariantRows
from kvloom.integrations.transformers.invariance.packed_only import PackedOnly
from kvloom.integrations.transformers.invariance.rules import NONE, Product, rule_of
from kvloom.integrations.transformers.lazy_states import LazyStates
from kvloom.integrations.transformers.lazy_tensor import LazyTensor
from kvloom.integrations.transformers.text_config import EXPAND
from kvloom.ops.invariance import is_batch_invariant

SESSION_ATTENTION: Final = "kvloom_paged"
"""Attention of sessions of continuous batching, which stores the latents that layers give it."""

_ORIGINAL: Final = "_kvloom_original"
_IS_LINEAR: Final = "_kvloom_expands_linearly"


def answer_latents(model: nn.Module) -> None:
    """Let ``expand_kv`` of a model's layers answer latents in a cache with what stands for the result.

    In sessions it answers those of new tokens so, too. It is done once for each class of layers, and other
    tensors are expanded as ever.
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
    """Why a layer's queries cannot be multiplied by its weight in the place of its latents, or ``None``."""
    projection = getattr(module, "kv_b_proj", None)
    kind = type(projection)
    is_plain = kind is nn.Linear or isinstance(projection, InvariantRows)
    if not isinstance(projection, nn.Linear) or not is_plain or isinstance(projection, PackedOnly):
        is_of_torch = kind.__module__.startswith("torch.")  # others may be called Linear, too
        return f"kv_b_proj is a {kind.__name__ if is_of_torch else f'{kind.__module__}.{kind.__name__}'}"
    if projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection):
        return "kv_b_proj has hooks"
    weight = projection.weight
    if projection.bias is not None or type(weight) is not nn.Parameter or weight.dtype not in FLOAT_DTYPES:
        return f"kv_b_proj has a bias or a weight of {weight.dtype}"
    return None


def why_not_absorbed(module: nn.Module) -> str | None:
    """As ``why_expanded``, or that ``expand_kv`` is not what is said above, of a class that answers."""
    reason = why_expanded(module)
    if reason is None and not getattr(type(module), _IS_LINEAR, False):
        reason = "expand_kv is not known to be a product by kv_b_proj"
    return reason


def expect_absorbed(model: nn.Module) -> None:
    """Answer latents as ``answer_latents`` does, for a session, which expands none.

    Raises:
        UnsupportedError: the latents of a layer must be expanded. A layer without data is not looked at.
    """
    answer_latents(model)
    for name, module in model.named_modules():
        reason = why_not_absorbed(module) if hasattr(type(module), EXPAND) else None
        if reason is not None and (why_expanded(module) is not None or not _is_meta(module)):
            raise UnsupportedError(
                f"model must have layers whose latents can be attended to where they lie, got {name} of "
                f"{type(model).__name__}: {reason}"
            )


def _is_meta(module: Any) -> bool:
    return bool(module.kv_b_proj.weight.is_meta)


def _expands_linearly(module: Any) -> bool | None:
    """Whether a layer's ``expand_kv`` is what is said above, tried with two latents.

    ``None`` where its weights do not tell, as they are not finite.
    """
    weight = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
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
    """The weight of keys ``[H, nope, rank]`` and that of values ``[H, v, rank]``, views."""
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
    """Latents and rope keys of a layer's cache, or of its new tokens, and how the layer expands them."""

    module: Any
    expand: Callable[..., tuple[Tensor, Tensor]]
    latents: LazyStates | Tensor
    rope: LazyStates | Tensor

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, N, nope + rope]`` and values ``[B, H, N, v]``."""
        given = (x.gather() if isinstance(x, LazyTensor) else x for x in (self.latents, self.rope))
        return self.expand(self.module, *given)


@dataclass(frozen=True)
class Absorbed:
    """Queries that were multiplied by the weight of keys.

    Attributes:
        query: ``[B, H, Q, rank + rope]``.
        weight: Of values, ``[H, v, rank]``.
        is_invariant: Whether a query has the same bits among any others.
    """

    query: Tensor
    weight: Tensor
    is_invariant: bool

    def values(self, out: Tensor) -> Tensor:
        """``[B, Q, H, v]`` of sums of latents ``[B, Q, H, rank]``."""
        found: Tensor = _by_head(out.flatten(0, 1), self.weight, self.is_invariant)
        return found.view(*out.shape[:3], -1)


class ExpandedStates(LazyTensor):
    """Keys or values ``[B, H, N, D]`` that a layer makes of latents, where nobody needs them so."""

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
        """That the model computes in."""
        return self._source.latents.dtype

    @property
    def device(self) -> torch.device:
        """Where the latents are."""
        return self._source.latents.device

    def gather(self) -> Tensor:
        """The tensor; keys and values are expanded together, once."""
        return self._source.expanded[self._side]

    def absorbed(
        self, values: "ExpandedStates", query: Tensor, num_read: int | None = None
    ) -> Absorbed | None:
        """Queries ``[B, H, Q, nope + rope]`` for the latents, or ``None`` where these are to be expanded.

        They are where the layer's weight is not there to be used, where keys and values are not of one
        source, and where that takes less time: in a text's first forward, and of many queries at once. So a
        query's bits depend on the number of tokens in its forward, unless ``ops.BatchInvariance`` is wanted,
        or in a session, which absorbs all queries.

        Args:
            values: As above.
            query: The same.
            num_read: Latents that each query reads, as they are chosen for it; ``None`` for all.
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
    """Rows ``[M, H, K]``, of each head times its weight ``[H, N, K]``: ``[M, H, N]``."""
    # Of a bfloat16 matrix that is to be transposed oneDNN makes a copy each time; and of any that is not.
    products = _Products(len(weight), weight.dtype == torch.bfloat16 and weight.stride(-1) == 1)
    rule = rule_of(weight[0], None, products) if is_invariant else NONE
    return rule.apply(partial(products.multiply, weight), rows)


@dataclass(frozen=True)
class _Products:
    """How as many matrices are multiplied at once; called with one of them, as ``rule_of`` tries it."""

    heads: int
    is_second: bool

    def multiply(self, weight: Tensor, rows: Tensor) -> Tensor:
        """As ``_by_head``; ``is_second`` is whether rows are the second factor."""
        if self.is_second:
            return torch.bmm(weight, rows.permute(1, 2, 0)).permute(2, 0, 1)
        return torch.bmm(rows.transpose(0, 1), weight.mT).transpose(0, 1)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product:
        """The product by ``weight`` ``[N, K]`` of the last head."""

        def product(rows: Tensor) -> Tensor:
            several = weight.expand(self.heads, -1, -1), rows.unsqueeze(1).expand(-1, self.heads, -1)
            return self.multiply(*several)[:, -1]

        return product
