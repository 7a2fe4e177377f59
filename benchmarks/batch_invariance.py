"""Costs and gains of batch invariance and packed layers: steps of one request, sessions, enabling.

python benchmarks/batch_invariance.py [--requests 64] [--layers 8] [--hidden 1024] [--rounds 5]

Times are medians of alternating rounds in one process on one thread, as multiples of those of stock layers.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVCache, continuous_batching, disable, enable
from kvloom.integrations.transformers.invariance import rules

WAYS: Final[dict[str, dict[str, Any]]] = {
    "stock": {"batch_invariant": False},
    "batch invariant": {"batch_invariant": True},
    "packed": {"batch_invariant": True, "pack": True},
}
NEW: Final = 64
LONGEST: Final = 512


def make_model(dtype: torch.dtype, layers: int, hidden: int) -> Any:
    """A random Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def over_stock(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians of rounds as multiples of the stock layers' in the same round."""
    return {
        way: round(statistics.median(a / b for a, b in zip(taken, times["stock"], strict=True)), 3)
        for way, taken in times.items()
    }


@torch.no_grad()
def steps(model: Any, rounds: int, count: int = 24) -> dict[str, float]:
    """Decode steps of one request after 64 tokens."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = torch.ones(1, 64, dtype=torch.int64)
    for _ in range(rounds):
        for way, options in WAYS.items():
            enable(model, **options)
            cache = KVCache.for_model(model)
            model(tokens, cache=cache)
            taken = [seconds(lambda: model(tokens[:, :1], cache=cache)) for _ in range(count)]  # noqa: B023
            times[way].append(statistics.median(taken))
            disable(model)
    return over_stock(times)


def session(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of requests in one session."""
    pages = sum(-(-(len(x) + new) // 16) for x in prompts) + 64
    out = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=pages, max_batch_tokens=2048, max_requests_per_batch=64
        ),
    )
    return [x.generated_tokens for x in out.values()]


def sessions(model: Any, count: int, rounds: int, longest: int, new: int) -> dict[str, Any]:
    """Requests without a shared prefix."""
    draw = random.Random(1)
    prompts = [
        [draw.randrange(10, 4096) for _ in range(draw.randrange(longest // 8, longest + 1))]
        for _ in range(count)
    ]
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    texts: dict[str, list[list[int]]] = {}
    for _ in range(rounds):
        for way, options in WAYS.items():
            continuous_batching(model, **options)
            session(model, prompts[:2], new)
            began = time.perf_counter()
            texts[way] = session(model, prompts, new)
            times[way].append(time.perf_counter() - began)
            continuous_batching(model, None)
    same = {way: sum(a == b for a, b in zip(x, texts["stock"], strict=True)) for way, x in texts.items()}
    return {"requests": count, "time": over_stock(times), "same": same}


def enabling(model: Any) -> dict[str, float]:
    """Milliseconds of ``enable`` with batch invariance beyond those without, the first time in a process."""
    without = seconds(lambda: enable(model, batch_invariant=False))
    disable(model)
    rules._FOUND.clear()
    first = seconds(lambda: enable(model, batch_invariant=True))
    disable(model)
    again = seconds(lambda: enable(model, batch_invariant=True))
    disable(model)
    return {"first": round((first - without) * 1e3, 1), "again": round((again - without) * 1e3, 1)}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small case")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.layers, args.hidden, args.rounds = 5, 1, 128, 1
    longest, new = (64, 4) if args.quick else (LONGEST, NEW)
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype, args.layers, args.hidden)
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "step": steps(model, args.rounds)}
        row["sessions"] = [
            sessions(model, n, max(1, args.rounds // 2), longest, new) for n in (4, args.requests)
        ]
        del model
        gc.collect()
        large = make_model(dtype, 2 if args.quick else 32, args.hidden)
        row["ms to enable 32 layers"] = enabling(large)
        del large
        gc.collect()
        rows.append(row)
    print(json.dumps({"figure": "batch_invariance", "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
