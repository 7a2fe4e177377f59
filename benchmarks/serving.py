"""Many requests at once: transformers' continuous batching, stock and on our pages, and padded ``generate``.

Two workloads: 64 prompts that begin with the same 512 tokens, with 32 new tokens each, and 64 prompts of 64
to 512 tokens that share nothing, with 64 new ones. The bundled model in its float16, and a Llama of random
weights with 8 layers of 8 heads of 64 in float32. Pages of 16 tokens, at most 2,048 tokens in a step;
``generate`` takes eight padded rows at a time. All ways take turns in one process; ``tokens_per_s`` is of new
tokens, the median of the rounds, and ``speed`` is by that of stock continuous batching. ``nbytes_per_token``
is what the cache keeps.

``memory`` is the most that a process of 8 requests of 8 new tokens holds, where nothing is configured.

Prediction: stock batching attends to the keys of all requests under a mask, and gathers them. So our pages
are ten times as fast where a prefix is shared and computed once, and five times where none is; codes as fast
as floats. Without a configuration stock takes a share of the memory that is free, and ours what the requests
need.

Prints one JSON line.
"""

import argparse
import gc
import json
import logging
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from rounds import in_turn
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvloom.integrations.transformers import KVCache, continuous_batching, load_model
from kvloom.models import bundled_model_path

STOCK, PADDED = "continuous batching", "padded generate"
OURS = {"kvloom float": "auto", "kvloom int8": "int8", "kvloom int4": "int4"}
WAYS = (STOCK, PADDED, *OURS)
MODELS = ("bundled", "random")
WORKLOADS = ("shared", "apart")
PAGE, STEP_TOKENS, ROWS = 16, 2048, 8


def make_model(name: str) -> Any:
    """One of the two."""
    if name == "bundled":
        model, _ = load_model(bundled_model_path(), progress=False)
    else:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=4096, bos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def make_prompts(
    workload: str, vocab: int, count: int, *, quick: bool = False
) -> tuple[list[list[int]], int]:
    """Prompts, and the new tokens of each."""
    draw = random.Random(1)
    tokens = partial(draw.choices, range(10, vocab))
    if quick:
        prefix = tokens(k=64) if workload == "shared" else []
        return [prefix + tokens(k=draw.randrange(8, 32)) for _ in range(count)], 4
    if workload == "shared":
        prefix = tokens(k=512)
        return [prefix + tokens(k=draw.randrange(8, 32)) for _ in range(count)], 32
    return [tokens(k=draw.randrange(64, 513)) for _ in range(count)], 64


def together(model: Any, prompts: list[list[int]], new: int, kv: str | None) -> float:
    """Seconds of ``generate_batch``, on our pages unless ``kv`` is ``None``."""
    continuous_batching(model, kv)
    pages = sum(-(-(len(x) + new) // PAGE) for x in prompts) + 64
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages, max_batch_tokens=STEP_TOKENS, max_requests_per_batch=64
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    out = model.generate_batch(prompts, generation, config)
    took = time.perf_counter() - start
    if [len(x.generated_tokens) for x in out.values()] != [new] * len(prompts):
        raise RuntimeError("a request has not all its tokens")
    return took


def padded(model: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds of ``generate`` with a DynamicCache, some rows at a time, in the order in which they came."""
    start = time.perf_counter()
    for at in range(0, len(prompts), ROWS):
        rows = prompts[at : at + ROWS]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(x)) + x for x in rows])
        mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in rows])
        cache = DynamicCache(config=model.config)
        model.generate(ids, attention_mask=mask, max_new_tokens=new, cache=cache)
    return time.perf_counter() - start


def measure(
    model: Any, name: str, workload: str, threads: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each way."""
    torch.set_num_threads(threads)
    ways, count = args.ways, args.count
    prompts, new = make_prompts(workload, model.config.vocab_size, count, quick=args.quick)
    calls: dict[str, Callable[[], float]] = {}
    for way in ways:
        if way == PADDED:
            calls[way] = partial(padded, model, prompts, new)
        else:
            calls[way] = partial(together, model, prompts, new, OURS.get(way))
    times = in_turn(calls, args.rounds, 0)
    speeds = {way: count * new / median(times[way]) for way in ways}
    rows = []
    for way in ways:
        rows.append({
            "model": name, "workload": workload, "threads": threads, "way": way,
            "tokens_per_s": speeds[way], "speed": speeds[way] / speeds[ways[0]],
            "nbytes_per_token": nbytes_per_token(model, OURS.get(way, "auto")),
        })  # fmt: skip
    continuous_batching(model, None)
    return rows


def nbytes_per_token(model: Any, kv: str) -> float:
    """Bytes of a token in all layers, scales included."""
    cache = KVCache.for_model(model, kv)
    with torch.no_grad():
        model(torch.tensor([[3]]), cache=cache)
    return float(cache.nbytes_per_token)


def peak_of(way: str) -> int:
    """Bytes at the peak of a process of its own."""
    command = [sys.executable, __file__, "--peak", way]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def print_peak(way: str) -> None:
    """Print the peak of this process, for ``peak_of``."""
    model = make_model("random")
    continuous_batching(model, OURS.get(way))
    prompts, _ = make_prompts("apart", 4096, 8)
    model.generate_batch(prompts, max_new_tokens=8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few short requests, to see that it runs")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--count", type=int, default=64, help="requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.peak:
        print_peak(args.peak)
        return
    if args.quick:
        args.models, args.threads, args.count, args.rounds = ["bundled"], [1], 3, 1
    rows: list[dict[str, Any]] = []
    for name in args.models:
        model = make_model(name)
        gc.collect()
        gc.freeze()  # a session that ends collects garbage, which need not be looked for in all modules
        for workload in args.workloads:
            for threads in args.threads:
                rows += measure(model, name, workload, threads, args)
    memory = {} if args.quick or args.no_memory else {way: peak_of(way) for way in WAYS if way != PADDED}
    result = {
        "figure": "serving",
        "requests": args.count,
        "rounds": args.rounds,
        "rows": rows,
        "memory": memory,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
