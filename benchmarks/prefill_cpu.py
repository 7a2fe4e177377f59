"""Products a second of a causal prompt of 2048 tokens, beside others. Prints one JSON line.

One Llama-3-8B layer whose 2048 new tokens are stored. Counted are two products and two sums for each element
of each pair of a query and a key that it sees. The limit is torch's matrix product of 2048 x 2048 in the
query's dtype; in float32 for float16, in which torch multiplies a hundred times slower. Each round times
everyone; ratios are medians of those in a round.
"""

import json
from statistics import median

import torch
from attention_peers import PEERS, prepare
from problem import (
    HEAD_DIM,
    KINDS,
    QUERY_HEADS,
    Measured,
    against_peers,
    arguments_against_peers,
    difference,
    our_answer,
    ours,
    random_problem,
)
from rounds import Probes, in_turn, ratio, timed

TOKENS = 2048
COPIES = 2
SLOW = ("torch, enable_gqa", "float16")


def measure(kind: str, tokens: int, layout: str, rounds: int) -> Measured:
    """One kind of cache."""
    dtype, _ = KINDS[kind]
    problem = random_problem(kind, new=tokens, stored=tokens, copies=COPIES)
    attend = ours(problem, layout)
    answer = our_answer(problem, attend)
    peers, missing = prepare(problem, answer, [peer for peer in PEERS if (peer.name, kind) != SLOW])
    if kind == SLOW[1]:
        missing[", ".join(SLOW)] = "takes tens of seconds"
    matrix = torch.randn(tokens, tokens).to(torch.float32 if dtype == torch.float16 else dtype)
    calls = {"ours": attend, "matmul": lambda _: matrix @ matrix, **peers}
    times = in_turn({name: timed(call, COPIES, is_short=False) for name, call in calls.items()}, rounds, 1)
    products = dict.fromkeys(times, 4 * QUERY_HEADS * HEAD_DIM * tokens * (tokens + 1) // 2)
    products["matmul"] = 2 * tokens**3
    row = {
        "kind": kind,
        "tokens": tokens,
        "gflops": {name: round(products[name] / median(took) / 1e9, 1) for name, took in times.items()},
        "of_matmul": {
            name: round(ratio(times["matmul"], took) * products[name] / products["matmul"], 3)
            for name, took in times.items()
            if name != "matmul"
        },
        "peer_over_ours": {name: ratio(times[name], times["ours"]) for name in peers},
        "difference": {name: difference(call(0), answer) for name, call in peers.items()},
    }
    return row, missing


def main() -> None:
    """Measure and print."""
    args = arguments_against_peers(__doc__)
    tokens, rounds = (96, 2) if args.quick else (TOKENS, args.rounds)
    with torch.no_grad(), Probes().own_cores():
        measured = [measure(kind, tokens, args.layout, rounds) for kind in args.kinds]
    peers = [peer.name for peer in PEERS if not peer.of_one_token]
    print(json.dumps(against_peers("prefill_cpu", args.layout, rounds, peers, measured)))


if __name__ == "__main__":
    main()
