"""Gain of a second thread where memory is not the limit. Prints one JSON line.

A decode step of one Llama-3-8B layer at 512 tokens of context that stay in the processor's caches, a prompt
of 512 tokens, and a read of what is stored, by one thread and by two in turn; the figure is the median of
their ratios.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from problem import arguments, frame, ours, random_problem, stored_bytes
from rounds import Probes, in_turn, microseconds, needs_compiled_backend, probe_memory, ratio, timed
from torch import Tensor

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
            for case, new in (("decode", 1), ("prefill", context)):
                problem = random_problem(kind, new=new, stored=context, copies=1)
                rows.append({"kind": kind, "case": case, **measure(ours(problem, args.layout), rounds)})
            memory = probe_memory(stored_bytes(kind, context), 1)
            rows.append({"kind": kind, "case": "read", **measure(reader(probes, memory), rounds)})
        torch.set_num_threads(max(THREADS))
    torch.set_num_threads(before)
    result = {
        **frame("threads_cpu", args.layout, rounds),
        "threads": THREADS,
        "context": context,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
