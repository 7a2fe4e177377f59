"""Choice of the backend of an operator: a named one runs or raises, without a fallback."""

from collections.abc import Callable
from typing import Any

import torch

from kvloom.core.memory import refused_memory
from kvloom.core.views import head_dim_of
from kvloom.errors import ArgumentError, KVError, UnsupportedError
from kvloom.ops import schemas
from kvloom.ops.impl import cpu, reference, triton
from kvloom.ops.impl.cpu import PREFETCHES, choose_isa, choose_prefetch, runnable_isas

__all__ = [
    "PREFETCHES",
    "choose_isa",
    "choose_prefetch",
    "cpu_kernels",
    "cuda_kernels",
    "prefetched_cache",
    "run",
    "runnable_isas",
    "why_unavailable",
]

_DISPATCHED: dict[str, Callable[..., Any]] = {
    "store": schemas.store,
    "store.transformed": schemas.store_transformed,
    "load": schemas.load,
    "load.transformed": schemas.load_transformed,
    "copy": schemas.copy,
    "attend": schemas.attend,
    "attend.biased": schemas.attend_biased,
    "attend.latent": schemas.attend_latent,
    "rotate": schemas.rotate,
    "arrange": schemas.arrange,
    "attend_part": schemas.attend_part,
    "attend_part.biased": schemas.attend_part_biased,
    "attend_part.latent": schemas.attend_latent_part,
    "smooth": schemas.smooth,
    "smooth_query": schemas.smooth_query,
}
_REFERENCE: dict[str, Callable[..., Any]] = {
    "store": reference.store,
    "store.transformed": reference.store_transformed,
    "load": reference.load,
    "load.transformed": reference.load_transformed,
    "copy": reference.copy,
    "attend": schemas.attend_reference,
    "attend.biased": schemas.attend_biased_reference,
    "attend.latent": schemas.attend_latent_reference,
    "rotate": reference.rotate,
    "arrange": reference.arrange,
    "attend_part": reference.attend_part,
    "attend_part.biased": reference.attend_part,
    "attend_part.latent": reference.attend_latent_part,
    "smooth": reference.smooth,
    "smooth_query": reference.smooth_query,
}


def run(backend: str, name: str, device: torch.device, *args: Any) -> Any:
    """Call the operator, or an overload of it, on a backend; ``args`` are those of its schema."""
    try:
        return _choose(backend, name, device, args)(*args)
    except Exception as error:
        if isinstance(error, KVError):
            raise
        refused = cpu.refused(error) or refused_memory(f"what {name} allocates", error)
        if refused is None:
            raise
        raise refused from None


def cpu_kernels() -> str | None:
    """Instruction set of the compiled CPU kernels; ``None`` if there are none and the reference runs."""
    return cpu.ISA


def prefetched_cache() -> str | None:
    """Cache level of the CPU into which attention prefetches; ``None`` without compiled kernels."""
    return cpu.PREFETCH


def cuda_kernels() -> str | None:
    """Version of Triton that runs the CUDA kernels; ``None`` if there is none and the reference runs."""
    return triton.triton_version() if triton.why_not_installed() is None else None


def why_unavailable(what: str) -> str | None:
    """Reason why this process does not run something; ``None`` if it does.

    Args:
        what: A backend, ``"cpu"`` or ``"triton"``; or ``"amx"``, CPU kernels with AMX.
    """
    match what:
        case "cpu":
            return cpu.WHY_NOT
        case "amx":
            return cpu.WHY_NOT or cpu.WHY_NO_AMX
        case _:
            return triton.why_not_installed()


def _choose(backend: str, overload: str, device: torch.device, args: tuple[Any, ...]) -> Callable[..., Any]:
    name = overload.partition(".")[0]
    match backend:
        case "auto":
            return (_DISPATCHED if _why_not_cpu(overload, device, args) is None else _REFERENCE)[overload]
        case "reference":
            return _REFERENCE[overload]
        case "cpu":
            if cpu.WHY_NOT is not None:
                raise UnsupportedError(f"backend 'cpu' cannot run: {cpu.WHY_NOT}")
            if name not in cpu.COMPILED:
                raise UnsupportedError(f"backend 'cpu' has no {name} yet; use 'auto' or 'reference'")
            if device.type != "cpu":
                raise UnsupportedError(f"backend 'cpu' needs tensors on the CPU, got {device}")
            if (refused := _why_not_cpu(overload, device, args)) is not None:
                raise UnsupportedError(f"backend 'cpu' {refused}; use 'auto' or 'reference'")
            return _DISPATCHED[overload]
        case "triton":
            if overload in ("store.transformed", "load.transformed"):
                raise UnsupportedError(
                    "backend 'triton' has no smoothing or rotation within a store or load; use 'auto' or "
                    "'reference'"
                )
            if (own := triton.OPERATORS.get(overload)) is None:
                raise UnsupportedError(f"backend 'triton' has no {name} yet; use 'auto' or 'reference'")
            if (refused := triton.why_not(own, device, *args)) is not None:
                raise UnsupportedError(f"backend 'triton' {refused}; use 'auto' or 'reference'")
            return triton.operator(own)
        case _:
            raise ArgumentError(f"backend must be 'auto', 'reference', 'cpu' or 'triton', got {backend!r}")


def _why_not_cpu(overload: str, device: torch.device, args: tuple[Any, ...]) -> str | None:
    """Reason why the compiled kernels cannot run these arguments, or ``None``."""
    if device.type != "cpu" or cpu.WHY_NOT is not None:
        return None
    if overload in ("smooth", "smooth_query", "store.transformed", "load.transformed"):
        head_dim = _smoothed_dim(overload, args)
        if head_dim > cpu.MAX_SMOOTHED:
            return f"smooths head dims up to {cpu.MAX_SMOOTHED}, got {head_dim}"
    if overload.partition(".")[0] not in ("attend", "attend_part"):
        return None
    _, key, value, key_scale, value_scale, *_ = args
    head_dim = max(head_dim_of(key, key_scale), head_dim_of(value, value_scale))
    if head_dim <= cpu.MAX_HEAD_DIM:
        return None
    return f"attends over head dims up to {cpu.MAX_HEAD_DIM}, got {head_dim}"


def _smoothed_dim(overload: str, args: tuple[Any, ...]) -> int:
    """Largest head dim that a call smooths or rotates."""
    if overload == "load.transformed":
        sides = ((args[i], args[i + 2]) for i in (1, 2))
        return max(head_dim_of(*side) for side in sides if side[0] is not None)
    rows = args[:2] if overload == "store.transformed" else args[:1]
    return max(int(x.shape[-1]) for x in rows if x is not None)
