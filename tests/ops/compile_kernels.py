"""Compiles what a call would launch on an NVIDIA GPU, of compute capability 9.0 unless told, without one.

The launchers run as they are, but each kernel is compiled down to machine code instead of launched. Options
are read from lines, with ``_`` for the spaces within one; for each line a line of JSON is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvloom import Batch, CacheIndex, CacheLayout, KVSpec, KVView, QuantSpec, Scores
from kvloom.core import checks
from kvloom.ops import PositionalBias, alibi_slopes, api
from kvloom.ops.impl.triton import load, store
from kvloom.ops.impl.triton.attending import attend, attend_latent, launch, plan
from kvloom.ops.impl.triton.vectors import transform

PAGE = 16
KINDS = {"plain": None, "int8": QuantSpec(8, 64), "int4": QuantSpec(4, 64), "int8 g8": QuantSpec(8, 8),
         "int2": QuantSpec(2, 64)}  # fmt: skip


class NoDriver:
    """Tells the target, and nothing else."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def compile_instead_of_launching() -> list[dict[str, Any]]:
    """From now on; returns the list to which each kernel is added."""
    compiled: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        compiled.append(
            {
                "kernel": self.fn.__name__,
                "shared": kernel.metadata.shared,
                "hash": kernel.hash,
                **resources(kernel.asm["cubin"]),
                "tensor_cores": bool(re.search(r"wgmma\.mma_async|mma\.sync", ptx)),
                "wide_loads": bool(re.search(r"ld\.global\.v4|cp\.async\.cg", ptx)),
                "wide_stores": "st.global.v4" in ptx,
                "exact_division": "div.full" not in ptx and "div.approx" not in ptx,
            }
        )
        return kernel

    driver.set_active(NoDriver())
    JITFunction.run = compile_only
    return compiled


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, its instructions, and how many of them are reciprocals."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = {name.lower(): int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK")}
    instructions = [x for x in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", code, re.M) if x.strip() != "NOP"]
    reciprocals = sum("MUFU.RCP " in x for x in instructions)
    return {**found, "instructions": len(instructions), "reciprocals": reciprocals}


def main() -> None:
    """Compile store, load and attend of one case after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kind", choices=list(KINDS), default="plain")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int)
    parser.add_argument("--ratio", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=0, help="of a positional bias")
    parser.add_argument("--slots", type=int, default=64, help="of the cache")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--pages", type=int, default=256, help="of a row of the table")
    parser.add_argument("--tokens", type=int, default=64, help="to store and load")
    parser.add_argument("--layout", default="B S H D")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, 90 for 9.0")
    parser.add_argument(
        "--latent", action="store_true", help="keys of one head are latents, values rope keys"
    )
    parser.add_argument("--vectors", action="store_true", help="smoothing and rotation alone")
    parser.add_argument("--everything", action="store_true", help="masks, biases, windows and sinks")
    compiled = compile_instead_of_launching()
    launch.overlaps = plan.overlaps = lambda device: NoDriver.capability >= 90
    checks.can_read = attend.can_read = load.can_read = store.can_read = lambda x: False
    for line in sys.stdin:
        compiled.clear()
        args = parser.parse_args([word.replace("_", " ") for word in line.split()])
        NoDriver.capability = args.capability
        (compile_vectors if args.vectors else compile_case)(args)
        sys.stdout.write(json.dumps(compiled) + "\n")
        sys.stdout.flush()


def compile_case(args: argparse.Namespace) -> None:
    """Call store, load and attend."""
    dtype, quant, heads = getattr(torch, args.dtype), KINDS[args.kind], 1 if args.latent else 8
    dims = (args.head_dim, args.value_dim or args.head_dim)
    sides = [
        KVSpec(1, heads, dim, dtype, args.layout, quant).empty(args.slots, min(args.slots, PAGE))
        for dim in dims
    ]
    kv = KVView.split(CacheLayout(args.layout), *(x[0] for x in sides), *(x[1] for x in sides), heads=heads)
    key, value = (torch.zeros(args.tokens, heads, dim, dtype=dtype) for dim in dims)
    slots, query_heads = torch.arange(args.tokens), heads * args.ratio
    sides = kv.tensors
    store.store(key, value, slots, *sides)
    load.load(slots, *sides, dtype, 1)
    starts = torch.arange(args.sequences + 1)
    pages = torch.zeros(args.sequences, args.pages, dtype=torch.int64)
    batch = Batch(CacheIndex.pages(pages, PAGE), starts * 16, starts * 99)
    scores = Scores()
    if args.everything:
        ones = torch.ones(query_heads)
        scores = Scores(
            None,
            True,
            torch.zeros(16 * args.sequences, 99 * args.sequences + 4),
            alibi_slopes(query_heads),
            100,
            5.0,
            ones,
        )
    if args.pairs:
        coefficients, frequencies = (
            torch.zeros(16 * args.sequences, query_heads, 2 * args.pairs),
            torch.ones(heads, args.pairs),
        )
        bias = PositionalBias(
            coefficients, frequencies.double(), torch.zeros(args.sequences, dtype=torch.int64)
        )
        scores = replace(scores, positional_bias=bias)
    width = sum(dims) if args.latent else dims[0]
    query = torch.zeros(16 * args.sequences, query_heads, width, dtype=dtype)
    run = attend_latent.attend_latent if args.latent else attend.attend
    run(*api.attend_arguments(query, kv, batch, scores, width), *api.bias_arguments(scores))


def compile_vectors(args: argparse.Namespace) -> None:
    """Call smooth, its inverse, smooth_query and rotate."""
    heads, dim, pairs, block = 8, args.head_dim, args.pairs, math.gcd(args.head_dim, 1024)
    dtype = getattr(torch, args.dtype)
    key = torch.zeros(args.tokens, heads, dim, dtype=dtype)
    query = torch.zeros(args.tokens, heads * args.ratio, dim, dtype=dtype)
    factor, positions = torch.ones(heads, dim), torch.arange(args.tokens)
    offset: tuple[Any, ...] = (None, None, None)
    if pairs:
        channels = torch.arange(2 * pairs).view(pairs, 2).expand(heads, -1, -1)
        offset = torch.zeros(heads, pairs, 2), channels, torch.ones(heads, pairs, dtype=torch.float64)
    transform.smooth(key, positions, factor, *offset, 0, False)
    transform.smooth(key, positions, factor, *offset, block, True)
    transform.smooth_query(query, factor, *offset[:2], block)
    transform.rotate(key, block)


if __name__ == "__main__":
    main()
