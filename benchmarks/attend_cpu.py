"""How near attention over stored tokens comes to reading them, and to what others do. Prints one JSON line.

A decode step of one Llama-3-8B layer. Each round times, on memory that no processor cache holds,
``ops.attend`` on random pages, a read of the bytes that our cache stores, and every peer that is installed.
Ratios are medians of those in a round. A peer that has no cache of codes holds the dtype of the query.
"""

import json
from typing import Any

import torch
from attention_peers import PEERS, prepare
from problem import (
    HEAD_DIM,
    HEADS,
    KINDS,
    PAGE,
    QUERY_HEADS,
    against_peers,
    arguments,
    difference,
    our_answer,
    ours,
    random_problem,
)
from rounds import (
    Probes,
    in_turn,
    microseconds,
    needs_compiled_backend,
    probe_memory,
    ratio,
    timed,
    turns_for,
)

from kvloom import KVSpec

SIZES = ((1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 16384), (8, 4096))
WARMUP = 2


def measure(
    kind: str, size: tuple[int, int], layout: str, rounds: int, probes: Probes
) -> tuple[dict[str, Any], dict[str, str]]:
    """A row of the table: one kind of cache at a batch size and a context; and what could not be measured."""
    num_rows, context = size
    dtype, quant = KINDS[kind]
    stored = 2 * KVSpec(1, HEADS, HEAD_DIM, dtype, "T H D", quant).nbytes(num_rows * context)
    turns = turns_for(stored, rounds)
    problem = random_problem(
        kind, (QUERY_HEADS, HEADS, HEAD_DIM), rows=num_rows, stored=context, copies=turns
    )
    attend = ours(problem, layout, PAGE)
    answer = our_answer(problem, attend)
    peers, missing = prepare(problem, answer)
    memory = probe_memory(stored, turns)
    calls = {"ours": attend, "probe": lambda i: probes.read(memory[i]), **peers}
    times = in_turn({name: timed(call, turns) for name, call in calls.items()}, rounds, WARMUP)
    mine, read = times["ours"], times["probe"]
    row = {
        "kind": kind,
        "batch": num_rows,
        "context": context,
        "stored_bytes": stored,
        "us": {name: microseconds(took) for name, took in times.items()},
        "probe_gb_per_s": round(stored / microseconds(read) / 1e3, 2),
        "of_read_speed": {name: ratio(read, took) for name, took in times.items() if name != "probe"},
        "peer_over_ours": {name: ratio(times[name], mine) for name in peers},
        "difference": {name: difference(call(0), answer) for name, call in peers.items()},
    }
    return row, missing


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    needs_compiled_backend()
    sizes, rounds = (((1, 256),), 3) if args.quick else (SIZES, args.rounds)
    rows, missing = [], {}
    probes = Probes()
    with torch.no_grad(), probes.own_cores():
        for size in sizes:
            for kind in args.kinds:
                row, reasons = measure(kind, size, args.layout, rounds, probes)
                rows.append(row)
                missing |= reasons
    peers = [peer.name for peer in PEERS]
    print(json.dumps(against_peers("attend_cpu", args.layout, rounds, peers, missing, rows)))


if __name__ == "__main__":
    main()
