"""What a second thread is worth where memory is not the limit. Prints one JSON line.

A decode step of one Llama-3-8B layer at 512 tokens of context that stay in the processor's caches, a prompt
of 512 tokens, and a read of what is stored, by one thread and by two in turn; the figure is the median of
their ratios.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from problem import HEAD_DIM, HEADS, KINDS, PAGE, QUERY_HEADS, arguments, ours, random_problem
from rounds import Probes, in_turn, microseconds, needs_compiled_backend, probe_memory, ratio, timed
from torch import Tensor

from kvloom import KVSpec
from kvloom.ops.impl import cpu

CONTEXT = 512
THREADS = (1, 2)
WARMUP = 2


def reader(probes: Probes, memory: list[Tensor]) -> Callable[[int], object]:
    """Reads the memory of a turn."""
    return lambda i: probes.read(memory[i])


def measure(call: Callable[[int], object], rounds: int) -> dict[str, Any]:
    """Microseconds by number of threads, and how many times faster the more are."""
    run = timed(call, 1)

    def by(threads: int) -> float:
        torch.set_num_threads(threads)
        return run()

    times = in_turn({str(threads): partial(by, threads) for threads in THREADS}, rounds, WARMUP)
    one, two = times.values()
    return {"us": {name: microseconds(took) for name, took in times.items()}, "speedup": ratio(one, two)}


def main() -> None:
    """Measure and print."""
    args = arguments(__doc__, rounds=101).parse_args()
    needs_compiled_backend()
    context, rounds = (128, 3) if args.quick else (CONTEXT, args.rounds)
    before = torch.get_num_threads()
    torch.set_num_threads(max(THREADS))
    probes = Probes()
    rows = []
    with torch.no_grad(), probes.own_cores():
        for kind in args.kinds:
            dtype, quant = KINDS[kind]
            stored = 2 * KVSpec(1, HEADS, HEAD_DIM, dtype, "T H D", quant).nbytes(context)
            for case, new in (("decode", 1), ("prefill", context)):
                problem = random_problem(
                    kind, (QUERY_HEADS, HEADS, HEAD_DIM), new=new, stored=context, copies=1
                )
                rows.append({"kind": kind, "case": case, **measure(ours(problem, args.layout, PAGE), rounds)})
            memory = probe_memory(stored, 1)
            rows.append({"kind": kind, "case": "read", **measure(reader(probes, memory), rounds)})
        torch.set_num_threads(max(THREADS))
    torch.set_num_threads(before)
    print(
        json.dumps(
            {
                "figure": "threads_cpu",
                "isa": cpu.ISA,
                "threads": THREADS,
                "layout": args.layout,
                "rounds": rounds,
                "context": context,
                "query_heads": QUERY_HEADS,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "page": PAGE,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
