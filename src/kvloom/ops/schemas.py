"""Operator contracts: schema, mutation, fake. The schemas exist without any compiled backend."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvloom.core.views import head_dim_of
from kvloom.errors import UnsupportedError
from kvloom.ops.impl import reference, triton

LIB = torch.library.Library("kvloom", "DEF")

LIB.define(
    "store(Tensor key, Tensor? value, Tensor slots, Tensor(a!) key_cache, Tensor(b!)? value_cache,"
    " Tensor(c!)? key_scale, Tensor(d!)? value_scale) -> ()"
)
LIB.define(
    "load(Tensor slots, Tensor key_cache, Tensor? value_cache, Tensor? key_scale, Tensor? value_scale,"
    " ScalarType dtype, int num_repeat) -> (Tensor, Tensor)"
)
LIB.define("copy(Tensor[] sources, Tensor source_slots, Tensor(a!)[] targets, Tensor target_slots) -> ()")
for _name in ("attend", "attend_no_grad", "attend_reference"):
    LIB.define(
        f"{_name}(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? key_scale, Tensor? value_scale,"
        " Tensor table, Tensor? row_starts, int page_size, Tensor seqstarts, Tensor kvstarts,"
        " int decoding_batches, Tensor? first_visible, float scale, bool is_causal, Tensor? mask,"
        " Tensor? alibi_slopes, int? window, float? softcap, Tensor? sinks) -> Tensor"
    )

# The reference serves every device; a faster backend takes over its own dispatch key, as the compiled kernels
# have done for the CPU if they are there.
for _name in ("store", "load", "copy", "attend"):
    LIB.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
for _name in ("attend_no_grad", "attend_reference"):
    LIB.impl(_name, reference.attend, "CompositeExplicitAutograd")


def _on_cuda(name: str) -> Callable[..., Any]:
    """Triton's kernels, asked for at the first call; the reference where they have limits, said once."""

    def run(*args: Any) -> Any:
        device = next(x.device for x in args if isinstance(x, Tensor))
        refused = triton.why_not(name, device, *args)
        if refused is None:
            return triton.operator(name)(*args)
        _say_once(name, refused)
        return getattr(reference, name)(*args)

    return run


@cache
def _say_once(name: str, refused: str) -> None:
    logging.getLogger("kvloom").warning("%s runs in plain torch, slowly: backend 'triton' %s", name, refused)


for _name in triton.OPERATORS:
    LIB.impl(_name, _on_cuda(_name), "CUDA")
LIB.impl("attend_no_grad", _on_cuda("attend"), "CUDA")


def _writes_only(*args: object) -> None:
    return None


def _load_fake(
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    dtype: torch.dtype,
    num_repeat: int,
) -> tuple[Tensor, Tensor]:
    rows, heads = slots.shape[0], key_cache.shape[3] * num_repeat
    value_dim = 0 if value_cache is None else head_dim_of(value_cache, value_scale)
    key = key_cache.new_empty((rows, heads, head_dim_of(key_cache, key_scale)), dtype=dtype)
    return key, key_cache.new_empty((rows, heads, value_dim), dtype=dtype)


def _attend_fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *rest: object,
) -> Tensor:
    return query.new_empty((*query.shape[:2], head_dim_of(value_cache, value_scale)))


def _no_gradient(ctx: object, *grads: Tensor) -> None:
    raise UnsupportedError("attend has no gradient, kvloom is for inference: call it under torch.no_grad()")


@cache
def without_gradient(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` called by name, with the same answer to ``backward`` as the dispatched operator."""

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, *args: Any) -> Tensor:
            return function(*args)

        backward = staticmethod(_no_gradient)

    apply: Callable[..., Tensor] = Named.apply
    return apply


torch.library.register_fake("kvloom::store", _writes_only, lib=LIB)
torch.library.register_fake("kvloom::copy", _writes_only, lib=LIB)
torch.library.register_fake("kvloom::load", _load_fake, lib=LIB)
for _name in ("attend", "attend_no_grad", "attend_reference"):
    torch.library.register_fake(f"kvloom::{_name}", _attend_fake, lib=LIB)
for _name in ("attend", "attend_reference"):
    torch.library.register_autograd(f"kvloom::{_name}", _no_gradient, lib=LIB)

store = torch.ops.kvloom.store.default
load = torch.ops.kvloom.load.default
copy = torch.ops.kvloom.copy.default
attend = torch.ops.kvloom.attend.default
attend_no_grad = torch.ops.kvloom.attend_no_grad.default
"""The same where nothing requires a gradient: what autograd adds in Python takes longer than a short call."""
attend_reference = torch.ops.kvloom.attend_reference.default
"""The reference by name: an operator, which a compiler does not look into."""
