"""The time of attention beside that of vLLM's CPU kernel. Prints one JSON line.

Decode steps and a causal prompt of one Llama-3-8B layer, on random pages of vLLM's size. Each round times
vLLM over bfloat16 and ours over bfloat16, int8 and int4, by one thread, in the processor time that it takes;
a decode step reads memory that no processor cache holds. Figures are medians of rounds.
"""

import json
import time
from typing import Any

import torch
from attention_peers import VLLM, prepare
from problem import Measured, against_peers, arguments, our_answer, ours, random_problem, stored_bytes
from rounds import in_turn, microseconds, needs_compiled_backend, ratio, timed, turns_for
from runtime_peers import VLLM_PAGE

CASES = ((1, 1, 512), (8, 1, 512), (1, 1, 4096), (8, 1, 4096), (64, 1, 560), (1, 2048, 2048))
"""Sequences, new tokens and stored ones of each."""
KINDS = ("bfloat16", "int8 g64", "int4 g64")
COPIES = 2
"""Copies of a prompt's memory: it reads little and computes much."""
WARMUP = 2


def measure(case: tuple[int, int, int], kinds: list[str], layout: str, rounds: int) -> Measured:
    """One case with each kind of cache."""
    num_rows, new, stored = case
    calls, missing = {}, {}
    for kind in kinds:
        is_prompt = new > 1
        turns = COPIES if is_prompt else turns_for(stored_bytes(kind, num_rows * stored), rounds)
        problem = random_problem(kind, rows=num_rows, new=new, stored=stored, copies=turns)
        attend = ours(problem, layout, VLLM_PAGE)
        peers, reasons = prepare(problem, our_answer(problem, attend), [VLLM])
        missing |= reasons
        for name, run in {kind: attend, **peers}.items():
            calls[name] = timed(run, turns, is_short=not is_prompt, clock=time.thread_time)
    times = in_turn(calls, rounds, WARMUP)
    row: dict[str, Any] = {
        "case": f"prompt of {new:,}" if new > 1 else f"{num_rows} x {stored:,}",
        "us": {name: microseconds(took) for name, took in times.items()},
    }
    if VLLM.name in times:
        row["of_vllm"] = {kind: ratio(times[kind], times[VLLM.name]) for kind in kinds}
    return row, missing


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.set_defaults(kinds=list(KINDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    needs_compiled_backend()
    cases, rounds = (((2, 1, 200), (1, 96, 96)), 3) if args.quick else (CASES, args.rounds)
    with torch.no_grad():
        measured = [measure(case, args.kinds, args.layout, rounds) for case in cases]
    result = against_peers("vllm_cpu", args.layout, rounds, [VLLM.name], measured)
    print(json.dumps({**result, "page": VLLM_PAGE}))


if __name__ == "__main__":
    main()
