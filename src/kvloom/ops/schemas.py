"""Operator contracts: schema, mutation, fake. The schemas exist without any compiled backend."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvloom.core.views import head_dim_of
from kvloom.errors import UnsupportedError
from kvloom.ops.impl import cpu, reference, triton

LIB = torch.library.Library("kvloom", "DEF")

_STORE = (
    "(Tensor key, Tensor? value, Tensor slots, Tensor(a!) key_cache, Tensor(b!)? value_cache,"
    " Tensor(c!)? key_scale, Tensor(d!)? value_scale, bool full_range"
)
LIB.define(f"store{_STORE}=False) -> ()")
_TRANSFORM = (
    ", int key_block, int value_block, Tensor? positions, Tensor? factor, Tensor? mean, Tensor? channels,"
    " Tensor? frequencies"
)
# With smoothing of keys, and rotation of keys and values, before.
LIB.define(f"store.transformed{_STORE}{_TRANSFORM}) -> ()")
_LOAD = (
    "(Tensor slots, Tensor key_cache, Tensor? value_cache, Tensor? key_scale, Tensor? value_scale,"
    " ScalarType dtype"
)
LIB.define(f"load{_LOAD}, int num_repeat) -> (Tensor, Tensor)")
LIB.define(f"load.transformed{_LOAD}{_TRANSFORM}) -> (Tensor, Tensor)")  # with the inverse of both afterwards
LIB.define("copy(Tensor[] sources, Tensor source_slots, Tensor(a!)[] targets, Tensor target_slots) -> ()")
LIB.define("rotate(Tensor x, int block) -> Tensor")
LIB.define("arrange(Tensor x, int rotary, bool to_adjacent, Tensor(a!) out) -> bool")
LIB.define(
    "smooth(Tensor key, Tensor? positions, Tensor factor, Tensor? mean, Tensor? channels,"
    " Tensor? frequencies, int block, bool is_restored) -> Tensor"
)
LIB.define(
    "smooth_query(Tensor query, Tensor gain, Tensor? mean, Tensor? channels, int block) -> (Tensor, Tensor)"
)
# Overloads of attention: the kernel of the device, the same with an out tensor, the reference by name, which
# no compiler can trace, and a part of an attention. Each also with a positional bias, whose arguments would
# slow down calls without one, and for latents, whose values are their keys.
_PART = ", int? skip, Tensor? skip_from, Tensor? prior, Tensor? prior_lse"
_BIAS = ", Tensor coefficients, Tensor frequencies, Tensor? first_position"
_OUT = ", Tensor(a!) out"
for _name, _more, _returns in (
    ("attend", "", "Tensor"),
    ("attend.biased", _BIAS, "Tensor"),
    ("attend.out", _OUT, "()"),
    ("attend.biased_out", _BIAS + _OUT, "()"),
    ("attend.reference", "", "Tensor"),
    ("attend.biased_reference", _BIAS, "Tensor"),
    ("attend_part", _PART, "(Tensor out, Tensor lse)"),
    ("attend_part.biased", _PART + _BIAS, "(Tensor out, Tensor lse)"),
    ("attend.latent", "", "Tensor"),
    ("attend.latent_reference", "", "Tensor"),
    ("attend_part.latent", _PART, "(Tensor out, Tensor lse)"),
):
    LIB.define(
        f"{_name}(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? key_scale, Tensor? value_scale,"
        " Tensor table, Tensor? row_starts, int page_size, Tensor seqstarts, Tensor kvstarts,"
        " int decoding_batches, Tensor? first_visible, float scale, bool is_causal, Tensor? mask,"
        f" Tensor? alibi_slopes, int? window, float? softcap, Tensor? sinks{_more}) -> {_returns}"
    )

# The reference is for every device; a faster backend overrides its dispatch key, as the compiled kernels, if
# there are any, have done for the CPU.
for _name in cpu.COMPILED:
    LIB.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
for _name in ("attend.biased", "attend.reference", "attend.biased_reference"):
    LIB.impl(_name, reference.attend, "CompositeExplicitAutograd")
LIB.impl("attend_part.biased", reference.attend_part, "CompositeExplicitAutograd")
for _name in ("attend.latent", "attend.latent_reference"):
    LIB.impl(_name, reference.attend_latent, "CompositeExplicitAutograd")
LIB.impl("attend_part.latent", reference.attend_latent_part, "CompositeExplicitAutograd")


def _store_transformed(key: Tensor, value: Tensor | None, slots: Tensor, *args: Any) -> None:
    """Transform, then store, with the kernels of the device."""
    key, value = reference.transformed(key, value, *args[5:], operators=_transforms())
    torch.ops.kvloom.store.default(key, value, slots, *args[:5])


LIB.impl("store.transformed", _store_transformed, "CompositeExplicitAutograd")


def _load_transformed(slots: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
    """Load, then invert the transform, with the kernels of the device."""
    key, value = torch.ops.kvloom.load.default(slots, *args[:5], 1)
    return reference.transformed(key, value, *args[5:], is_restored=True, operators=_transforms())


def _transforms() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """What smooths and what rotates on the device of its tensors."""
    return torch.ops.kvloom.smooth.default, torch.ops.kvloom.rotate.default


LIB.impl("load.transformed", _load_transformed, "CompositeExplicitAutograd")


def _attend_out(*args: Any) -> None:
    args[-1].copy_(torch.ops.kvloom.attend.default(*args[:-1]))


def _attend_biased_out(*args: Any) -> None:
    args[-1].copy_(torch.ops.kvloom.attend.biased(*args[:-1]))


LIB.impl("attend.out", _attend_out, "CompositeExplicitAutograd")
LIB.impl("attend.biased_out", _attend_biased_out, "CompositeExplicitAutograd")


def _on_cuda(name: str) -> Callable[..., Any]:
    """Operator that runs Triton's kernels, imported at the first call, or, logged once, the reference."""

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


for _name, _own in triton.OPERATORS.items():
    LIB.impl(_name, _on_cuda(_own), "CUDA")


def _writes_only(*args: object) -> None:
    return None


def _load_fake(
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    dtype: torch.dtype,
    num_repeat: int = 1,
) -> tuple[Tensor, Tensor]:
    heads = key_cache.shape[3] * num_repeat
    value_dim = 0 if value_cache is None else head_dim_of(value_cache, value_scale)
    key, value = (
        key_cache.new_empty((slots.shape[0], heads, *slots.shape[1:], dim), dtype=dtype)
        for dim in (head_dim_of(key_cache, key_scale), value_dim)
    )
    return key, value


def _load_transformed_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _load_fake(*args[:6])


def _attend_fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *rest: object,
) -> Tensor:
    return query.new_empty((*query.shape[:2], head_dim_of(value_cache, value_scale)))


def _rotate_fake(x: Tensor, block: int) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _smooth_fake(key: Tensor, *rest: object) -> Tensor:
    if reference.is_by_token(key):
        return key.new_empty(key.transpose(1, 2).shape).transpose(1, 2)
    return key.new_empty(key.shape)


def _smooth_query_fake(
    query: Tensor, gain: Tensor, mean: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor]:
    num_pairs = 0 if mean is None else mean.shape[1]
    coefficients = query.new_empty((*query.shape[:2], 2 * num_pairs), dtype=torch.float32)
    return query.new_empty(query.shape), coefficients


def _attend_part_fake(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    *rest: object,
) -> tuple[Tensor, Tensor]:
    sizes = (*query.shape[:2], head_dim_of(value_cache, value_scale))
    return query.new_empty(sizes, dtype=torch.float32), query.new_empty(sizes[:2], dtype=torch.float32)


def _attend_latent_fake(
    query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    latent_scale: Tensor | None,
    rope_scale: Tensor | None,
    *rest: object,
) -> Tensor:
    return query.new_empty((*query.shape[:2], head_dim_of(latent_cache, latent_scale)))


def _attend_latent_part_fake(*args: Any) -> tuple[Tensor, Tensor]:
    out = _attend_latent_fake(*args).float()
    return out, out.new_empty(out.shape[:2])


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, function: Callable[..., Any], *args: Any) -> Any:
        ctx.what = what
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedError(
            f"{ctx.what} has no gradient, kvloom is for inference: call it under torch.no_grad()"
        )


def without_gradient(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)``; ``backward`` of its result raises an error that names ``what``.

    The operators have no autograd kernel: torch would run it in Python at every call, even if nothing
    requires a gradient, which takes as long as a short call.
    """
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        apply: Callable[..., Any] = _WithoutGradient.apply
        return apply(what, function, *args)
    return function(*args)


torch.library.register_fake("kvloom::store", _writes_only, lib=LIB)
torch.library.register_fake("kvloom::store.transformed", _writes_only, lib=LIB)
torch.library.register_fake("kvloom::copy", _writes_only, lib=LIB)
torch.library.register_fake("kvloom::load", _load_fake, lib=LIB)
torch.library.register_fake("kvloom::load.transformed", _load_transformed_fake, lib=LIB)
torch.library.register_fake("kvloom::rotate", _rotate_fake, lib=LIB)
torch.library.register_fake("kvloom::smooth", _smooth_fake, lib=LIB)
torch.library.register_fake("kvloom::smooth_query", _smooth_query_fake, lib=LIB)
for _name in ("attend", "attend.biased", "attend.reference", "attend.biased_reference"):
    torch.library.register_fake(f"kvloom::{_name}", _attend_fake, lib=LIB)
for _name in ("attend.latent", "attend.latent_reference"):
    torch.library.register_fake(f"kvloom::{_name}", _attend_latent_fake, lib=LIB)
torch.library.register_fake("kvloom::attend_part.latent", _attend_latent_part_fake, lib=LIB)
for _name in ("attend.out", "attend.biased_out"):
    torch.library.register_fake(f"kvloom::{_name}", _writes_only, lib=LIB)
for _name in ("attend_part", "attend_part.biased"):
    torch.library.register_fake(f"kvloom::{_name}", _attend_part_fake, lib=LIB)

store = torch.ops.kvloom.store.default
store_transformed = torch.ops.kvloom.store.transformed
load = torch.ops.kvloom.load.default
load_transformed = torch.ops.kvloom.load.transformed
copy = torch.ops.kvloom.copy.default
rotate = torch.ops.kvloom.rotate.default
arrange = torch.ops.kvloom.arrange.default
smooth = torch.ops.kvloom.smooth.default
smooth_query = torch.ops.kvloom.smooth_query.default
attend = torch.ops.kvloom.attend.default
attend_biased = torch.ops.kvloom.attend.biased
attend_out = torch.ops.kvloom.attend.out
attend_biased_out = torch.ops.kvloom.attend.biased_out
attend_reference = torch.ops.kvloom.attend.reference
attend_biased_reference = torch.ops.kvloom.attend.biased_reference
attend_latent = torch.ops.kvloom.attend.latent
attend_latent_reference = torch.ops.kvloom.attend.latent_reference
attend_latent_part = torch.ops.kvloom.attend_part.latent
attend_part = torch.ops.kvloom.attend_part.default
attend_part_biased = torch.ops.kvloom.attend_part.biased
