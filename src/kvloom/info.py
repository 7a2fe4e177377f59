"""``kvloom info``: backends and devices of this machine."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from typing import Final

import torch

from kvloom import __version__
from kvloom.core.specs import dtype_name
from kvloom.integrations import vllm
from kvloom.ops import cpu_kernels, cuda_kernels, why_unavailable
from kvloom.ops.choice import prefetched_cache
from kvloom.probe import CASES, LONG_CASES, probe_isas, probe_prefetches

_TYPICAL: Final = 1024
"""Number of inputs, and of outputs, of a typical linear layer."""


def print_info(probe: bool) -> None:
    """Print version, backends, the CPU's capability and devices; with ``probe`` also the times of attention.

    Raises:
        UnsupportedError: there are no compiled kernels to time.
    """
    on_cpu = cpu_kernels() or f"none: {why_unavailable('cpu')}"
    if cpu_kernels() and (why_not := why_unavailable("amx")) is not None:
        on_cpu += f"; no amx: {why_not}"
    if (prefetch := prefetched_cache()) is not None:
        on_cpu += f"; attention prefetches to {prefetch}"
    on_cuda = (
        f"triton {cuda_kernels()}" if cuda_kernels() else f"reference (triton {why_unavailable('triton')})"
    )
    why_not = vllm.why_not_registered()
    in_vllm = f"no: {why_not}" if why_not else f"{vllm.vllm_version()}, on a CPU"
    devices = [
        "cpu",
        *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
    ]
    known = (
        ("kvloom", __version__),
        ("torch", torch.__version__),
        ("backends", f"reference, cpu ({on_cpu})"),
        ("on CUDA", on_cuda),
        ("in vLLM", in_vllm),
        ("cpu capability", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("devices", ", ".join(devices)),
    )
    for name, value in chain(known, _row_rules()):
        sys.stdout.write(f"{name:15}{value}\n")
    if probe:
        _print_times("us of a call", list(CASES), probe_isas(), cpu_kernels(), "KVLOOM_ISA")
        _print_times(
            "from memory", list(LONG_CASES), probe_prefetches(), prefetched_cache(), "KVLOOM_PREFETCH"
        )


def _row_rules() -> Iterator[tuple[str, str]]:
    """Number of rows to which a typical linear layer is padded for batch invariance, and use of oneDNN."""
    if find_spec("transformers") is None:
        return
    try:
        from kvloom.integrations.transformers.invariance.packing import why_not_packable
        from kvloom.integrations.transformers.invariance.rules import rule_of
    except ImportError as error:  # the version is too old, or a dependency is missing
        yield "rows", f"not tried: transformers cannot be used: {str(error).splitlines()[0]}"
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = torch.empty(_TYPICAL, _TYPICAL, dtype=dtype)
        rule = rule_of(weight, None)
        why_not = why_not_packable(weight)
        yield f"{dtype_name(dtype)} rows", f"{rule}; {f'not packed: {why_not}' if why_not else 'packed'}"


def _print_times(
    title: str, cases: list[str], times: dict[str, dict[str, float]], chosen: str | None, variable: str
) -> None:
    sys.stdout.write(f"\n{title:15}{''.join(f'{case:>18}' for case in cases)}\n")
    for choice, taken in times.items():
        note = f"  chosen; {variable} names another" if choice == chosen else ""
        sys.stdout.write(f"{choice:15}{''.join(f'{taken[case]:18,.0f}' for case in cases)}{note}\n")
