"""Speed of attention over stored tokens, beside reading them and beside peers. Prints one JSON line.

A decode step of one Llama-3-8B layer. Each round times, on memory that no processor cache holds,
``ops.attend`` on random pages, a read of the bytes that our cache stores, a read of as many pages in random
order by either way to prefetch, of which the faster one counts, and every peer that is installed. Ratios are
medians of those in a round. A peer that has no cache of codes holds the dtype of the query.
"""

import json
from statistics import median

import torch
from attention_peers import PEERS, prepare
from problem import (
    PAGE,
    Measured,
    against_peers,
    arguments_against_peers,
    difference,
    our_answer,
    ours,
    random_problem,
    stored_bytes,
)
from rounds import Probes, in_turn, microseconds, probe_memory, ratio, timed, turns_for

SIZES = ((1, 512), (1, 1024), (1, 2048), (1, 4096), (1, 16384), (8, 4096))
WARMUP = 2


def measure(kind: str, size: tuple[int, int], layout: str, rounds: int, probes: Probes) -> Measured:
    """One kind of cache at a batch size and a context."""
    num_rows, context = size
    stored = stored_bytes(kind, num_rows * context)
    turns = turns_for(stored, rounds)
    problem = random_problem(kind, rows=num_rows, stored=context, copies=turns)
    attend = ours(problem, layout)
    answer = our_answer(problem, attend)
    peers, missing = prepare(problem, answer)
    memory = probe_memory(stored, turns)
    order = torch.randperm(2 * num_rows * context // PAGE)  # pages of keys, and pages of values
    calls = {
        "ours": attend,
        "probe": lambda i: probes.read(memory[i]),
        "pages": lambda i: probes.read_pieces(memory[(i + turns // 3) % turns], order, False),  # long unread
        "pages, l2": lambda i: probes.read_pieces(memory[(i + 2 * turns // 3) % turns], order, True),
        **peers,
    }
    times = in_turn({name: timed(call, turns) for name, call in calls.items()}, rounds, WARMUP)
    times["pages"] = min(times["pages"], times.pop("pages, l2"), key=median)
    mine, read = times["ours"], times["probe"]
    row = {
        "kind": kind,
        "batch": num_rows,
        "context": context,
        "stored_bytes": stored,
        "us": {name: microseconds(took) for name, took in times.items()},
        "probe_gb_per_s": round(stored / microseconds(read) / 1e3, 2),
        "of_pages_speed": ratio(times["pages"], mine),
        "of_read_speed": {name: ratio(read, took) for name, took in times.items() if name != "probe"},
        "peer_over_ours": {name: ratio(times[name], mine) for name in peers},
        "difference": {name: difference(call(0), answer) for name, call in peers.items()},
    }
    return row, missing


def main() -> None:
    """Measure and print."""
    args = arguments_against_peers(__doc__)
    sizes, rounds = (((1, 256),), 3) if args.quick else (SIZES, args.rounds)
    probes = Probes()
    with torch.no_grad(), probes.own_cores():
        measured = [measure(kind, size, args.layout, rounds, probes) for size in sizes for kind in args.kinds]
    peers = [peer.name for peer in PEERS]
    print(json.dumps(against_peers("attend_cpu", args.layout, rounds, peers, measured)))


if __name__ == "__main__":
    main()
