"""Recurrent states in pools: what a prefix costs to find, to feed and to keep. Prints one JSON line.

Times are those of a hybrid of four layers with random weights, one thread, in alternating rounds. Chats are
those of a small model: all begin with one system prompt, and each turn's prompt is the one before, its answer
and a question; the chats take turns. Beside the pool, whose states have an eighth of the bytes, a cache that
keeps those of every multiple of the grid finds all that can be found.

Prediction: finding a prefix copies the states and looks pages up, a thousandth of computing 4,096 tokens.
Pieces of 256 tokens cost what more calls of small operators cost, a few percent. Of states only the last of
each chat and that of the system prompt are asked for again, so an eighth finds nearly everything.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any, Final

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from kvloom.integrations.transformers import KVCache, KVPool

GRID: Final = 256
CHATS: Final = 64
TURNS: Final = 8
SYSTEM: Final = 1100
QUESTION: Final = 120
ANSWER: Final = 180


def hybrid(hidden: int, layers: int) -> Any:
    """A random Granite 4, half of whose layers attend."""
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        shared_intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        layer_types=["mamba", "attention"] * (layers // 2),
        mamba_n_heads=2 * hidden // 32,
        mamba_d_head=32,
        mamba_d_state=64,
        mamba_n_groups=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        max_position_embeddings=16384,
    )
    return GraniteMoeHybridForCausalLM(config).eval()


@torch.no_grad()
def times(tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of finding a prefix over computing it, and of feeding it in pieces over feeding it at once."""
    model = hybrid(512, 4)
    pool = KVPool.for_model(model, max_tokens=4 * tokens, state_interval=GRID)
    text = torch.randint(3, 4096, (1, tokens + 1))
    cache = pool.begin(text)
    model(text[:, :tokens], past_key_values=cache, logits_to_keep=1)
    pool.commit(cache, text)
    found: dict[str, list[float]] = {"found": [], "pieces": [], "whole": []}
    for _ in range(rounds):
        start = time.perf_counter()
        cache = pool.begin(text)
        found["found"].append(time.perf_counter() - start)
        if cache.get_seq_length() != tokens:
            raise RuntimeError(f"{cache.get_seq_length()} of {tokens} tokens were found")
        start = time.perf_counter()
        model(text[:, :tokens], past_key_values=pool.begin(text, "another salt"), logits_to_keep=1)
        found["pieces"].append(time.perf_counter() - start)
        start = time.perf_counter()
        model(text[:, :tokens], past_key_values=KVCache.for_model(model), logits_to_keep=1)
        found["whole"].append(time.perf_counter() - start)

    def over(a: str) -> float:
        return statistics.median(x / y for x, y in zip(found[a], found["whole"], strict=True))

    states = pool.report()["states"]
    return {
        "tokens": tokens,
        "found_over_computing": over("found"),
        "pieces_over_whole": over("pieces"),
        "found_ms": 1e3 * statistics.median(found["found"]),
        "whole_ms": 1e3 * statistics.median(found["whole"]),
        "state_nbytes": states["nbytes"],
    }


@torch.no_grad()
def chats(number: int, turns: int) -> dict[str, Any]:
    """Tokens that are found by a pool with an eighth of the bytes, and by one that keeps everything."""
    draw, model = random.Random(0), hybrid(32, 2)
    system = [draw.randrange(3, 4096) for _ in range(SYSTEM)]
    texts, every = [list(system) for _ in range(number)], set[tuple[int, ...]]()
    prompts, could = list[list[int]](), list[int]()
    for _ in range(turns):
        for text in texts:
            text += [draw.randrange(3, 4096) for _ in range(draw.randrange(QUESTION // 2, 2 * QUESTION))]
            prompts.append(list(text))
            ends = range(GRID, len(text), GRID)
            could.append(max((end for end in ends if tuple(text[:end]) in every), default=0))
            every |= {tuple(text[:end]) for end in ends}
            text += [draw.randrange(3, 4096) for _ in range(draw.randrange(ANSWER // 2, 2 * ANSWER))]
    probe = KVPool.for_model(model, max_tokens=4096, state_interval=GRID)
    nbytes, max_tokens = probe.report()["states"]["nbytes"], sum(map(len, texts)) + 4096
    options: dict[str, Any] = {"max_tokens": max_tokens, "state_interval": GRID}
    pool = KVPool.for_model(model, max_state_bytes=len(every) // 8 * nbytes, **options)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = pool.begin(ids)
        found.append(int(cache.get_seq_length()))
        model(ids[:, found[-1] :], past_key_values=cache, logits_to_keep=1)
        pool.commit(cache, ids)
    return {
        "chats": number,
        "turns": turns,
        "states_of_every_piece": len(every),
        "states_kept": pool.report()["states"]["num_pages"],
        "tokens_asked": sum(map(len, prompts)),
        "tokens_that_could_be_found": sum(could),
        "tokens_found": sum(found),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="few tokens and chats, to see that it runs")
    args = parser.parse_args()

    torch.set_num_threads(1)
    of_times = times(512 if args.quick else args.tokens, 1 if args.quick else args.rounds)
    of_chats = chats(3, 2) if args.quick else chats(CHATS, TURNS)
    print(json.dumps({"figure": "states", "times": of_times, "chats": of_chats}))


if __name__ == "__main__":
    main()
