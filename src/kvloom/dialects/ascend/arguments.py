"""Argument rules of the Ascend operators. Nothing here writes."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.core.memory import expect_disjoint, expect_writable
from kvloom.core.views import KVView
from kvloom.dialects.ascend.runs import COMPRESSING
from kvloom.errors import ArgumentError, ShapeError

DTYPES: Final = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
)


def read_mode(name: str, mode: str | None, allowed: tuple[str, ...]) -> str:
    """Check a mode's name; ``None`` and ``""`` mean the first."""
    if mode is None or mode == "":
        return allowed[0]
    if mode not in allowed:
        raise ArgumentError(f"{name} must be one of {allowed}, got {mode!r}")
    return mode


def present(x: Tensor | None) -> Tensor | None:
    """``x``, or ``None`` if it is absent, which upstream writes as ``[]`` or as a 0-dim tensor."""
    absent = isinstance(x, Tensor) and (x.ndim == 0 or (x.ndim == 1 and x.numel() == 0))
    return None if absent else x


def expect_apart(reads: Mapping[str, Tensor | None], writes: Mapping[str, Tensor | None]) -> None:
    """Check that no tensor to read shares memory with one to write.

    Raises:
        ShapeError: two share memory; names them.
    """
    for name, x in reads.items():
        for other_name, other in writes.items():
            if x is not None and other is not None:
                expect_disjoint(name, x, other_name, other)


def expect_tensors(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    may_differ: bool,
) -> None:
    """Check presence, ranks, dtypes and devices; ``may_differ`` allows keys and values of two dtypes."""
    named: dict[str, Tensor | None] = {"key": key, "key_cache": key_cache, "slot_mapping": slot_mapping}
    if value is not None or value_cache is not None:
        named |= {"value": value, "value_cache": value_cache}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.device != key.device:
            raise ShapeError(f"{name} must be on {key.device} as key, got {x.device}")
    if key.ndim not in (3, 4):
        raise ShapeError(f"key must be [T, H, D] or [B, S, H, D], got {list(key.shape)}")
    sizes = expect("key", key, "T H D" if key.ndim == 3 else "B S H D", dtype=DTYPES)
    if value is not None:
        sizes.pop("D")
        dtypes = DTYPES if may_differ else (key.dtype,)
        expect("value", value, " ".join([*sizes, "Dv"]), dtype=dtypes, device=key.device, **sizes)
    sides = (("key", key, key_cache), ("value", value, value_cache))
    for name, x, cache in sides:
        if x is not None and cache is not None:
            if cache.dtype != x.dtype:
                raise ShapeError(f"{name}_cache must be {x.dtype} as {name}, got {cache.dtype}")
            expect_writable(f"{name}_cache", cache)
    if slot_mapping.dtype not in INDEX_DTYPES:
        raise ShapeError(f"slot_mapping must be int64 or int32, got {slot_mapping.dtype}")


def expect_fits(name: str, cache: Tensor, opened: KVView, x: Tensor, *, heads: int, nz: bool) -> None:
    """Check that ``cache`` holds ``heads`` heads of the size of ``x``."""
    size = x.shape[-1]
    wanted, held = (heads, size), (opened.num_heads, opened.key.head_dim)
    if nz and cache.ndim == 5:
        held = (cache.shape[1], cache.shape[2] * cache.shape[4])
    elif nz:  # the 4-D form does not have the size of a head
        wanted = (1, heads * size)
    if held != wanted:
        raise ShapeError(f"{name} must hold {heads} heads of {size} elements, got {list(cache.shape)}")


def choose_rule(key_rank: int, cache_mode: str, scatter_mode: str, *, has_offset: bool) -> str:
    """Rule that places tokens: ``scatter_mode``, except for padded keys, which imply one."""
    if cache_mode == "PA_NZ" and (key_rank != 3 or scatter_mode != "None"):
        raise ArgumentError(
            f"scatter_mode must be 'None' and key 3-D in PA_NZ, got {scatter_mode!r} and {key_rank}-D"
        )
    if key_rank == 3:
        return scatter_mode
    if scatter_mode in ("Nct", "NHSD"):
        raise ArgumentError(
            f"scatter_mode must be 'None' or one of {COMPRESSING} for a 4-D key, got {scatter_mode!r}"
        )
    return scatter_mode if scatter_mode in COMPRESSING else "Rope" if has_offset else "Alibi"


def refuse_unused(rule: str, **arguments: Tensor | Sequence[int] | None) -> None:
    """Refuse arguments that the rule would ignore."""
    for name, x in arguments.items():
        if x is not None:
            raise ArgumentError(f"{name} must be None with scatter_mode {rule!r}")
