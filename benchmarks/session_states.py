"""Hybrids in continuous batching over padded ``generate``, all that transformers has. Prints one JSON line.

Requests have prompts and answers of random lengths, with and without a prefix that all share, in a Granite 4
of four layers with random weights, on one thread, in alternating rounds. Seconds are those of the processor,
without other processes. Padded ``generate`` gets them all at once, and in small batches sorted by lengths of
their answers, which are not known before; each batch computes the tokens of its longest answer for all. The
first session is not counted, in which the model is tried.

Prediction: without a shared prefix what is won is padding, of prompts and of answers, twofold where lengths
differ so. With one it is the prefix, too, which one request computes of 64.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from states import hybrid
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvloom.integrations.transformers import continuous_batching


def requests(count: int, prefix: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each is to get."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 4096) for _ in range(prefix)]
    made = []
    for _ in range(count):
        own = [draw.randrange(3, 4096) for _ in range(round(16 * 2 ** draw.uniform(0, 5)))]
        made.append((shared + own, round(4 * 2 ** draw.uniform(0, 4))))
    return made


def padded(model: Any, made: list[tuple[list[int], int]], size: int) -> list[list[int]]:
    """Tokens by ``generate`` in batches of requests that are about as long."""
    order = sorted(range(len(made)), key=lambda i: (made[i][1], len(made[i][0])))
    found: list[list[int]] = [[]] * len(made)
    for at in range(0, len(made), size):
        part = order[at : at + size]
        longest = max(len(made[i][0]) for i in part)
        rows = [[0] * (longest - len(made[i][0])) + made[i][0] for i in part]
        mask = [[0] * (longest - len(made[i][0])) + [1] * len(made[i][0]) for i in part]
        new = max(made[i][1] for i in part)
        out = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        for i, row in zip(part, out.tolist(), strict=True):
            found[i] = row[longest : longest + made[i][1]]
    return found


def batched(model: Any, made: list[tuple[list[int], int]]) -> list[list[int]]:
    """Tokens by a session."""
    continuous_batching(model)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=16384, max_batch_tokens=4096)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        names = [manager.add_request(prompt, max_new_tokens=new) for prompt, new in made]
        found: dict[str, list[int]] = {}
        while len(found) < len(made):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                found[output.request_id] = output.generated_tokens
    return [found[name] for name in names]


@torch.no_grad()
def compare(model: Any, count: int, prefix: int, rounds: int, sizes: list[int]) -> dict[str, Any]:
    """Padded ``generate`` over a session: median, least and most of rounds, and how many requests agree."""
    times: dict[str, list[float]] = {}
    batched(model, requests(2, 0, 0))
    for round_number in range(rounds):
        made = requests(count, prefix, round_number)
        tokens = {}
        for size in (*sizes, 0):
            name, start = f"padded_{size}" if size else "session", time.process_time()
            tokens[name] = padded(model, made, size) if size else batched(model, made)
            times.setdefault(name, []).append(time.process_time() - start)
    session = times.pop("session")
    ratios = {name: [a / b for a, b in zip(own, session, strict=True)] for name, own in times.items()}
    return {
        "prefix": prefix,
        "session_seconds": round(statistics.median(session), 2),
        "over_session": {
            name.removeprefix("padded_"): [round(x, 2) for x in (statistics.median(own), min(own), max(own))]
            for name, own in ratios.items()
        },
        "same_tokens_in_last_round": sum(
            all(x == tokens["session"][i] for x in own)
            for i, own in enumerate(zip(*(tokens[name] for name in times), strict=True))
        ),
    }


def main() -> None:
    """Both cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = hybrid(args.hidden, 4)
    cases = [compare(model, args.requests, prefix, args.rounds, args.batches) for prefix in (0, args.prefix)]
    print(json.dumps({"requests": args.requests, "hidden": args.hidden, "cases": cases}))


if __name__ == "__main__":
    main()
