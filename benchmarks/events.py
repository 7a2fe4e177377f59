"""Cost of recording the events of pages: in a decode step, and in a whole request.

A 4-layer Llama in float32 with 8 query heads of 64 decodes after 256 tokens of a ``KVPool``; steps that
record and steps that do not take turns in one process, each with a cache of its own. Predicted: nothing that
can be measured, for a step that needs no page makes no event. Off there is one comparison with ``None`` in
each method of the pool, ``off_ns``. Prints one JSON line.
"""

import argparse
import json
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVPool
from kvloom.paging import PagePool, PrefixTree


def steps(model: LlamaForCausalLM, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each decode step, of a pool that records and of one that does not, in turn."""
    times: dict[str, list[float]] = {"off": [], "on": []}
    caches, tokens = {}, torch.arange(257)[None]
    for name in times:
        pool = KVPool.for_model(model, kv="float32", max_tokens=16384)
        if name == "on":
            pool.record()
        caches[name] = pool.begin(tokens)
        model(tokens, cache=caches[name])
    for i in range(num_steps):
        for name in ("off", "on") if i % 2 else ("on", "off"):
            start = time.perf_counter()
            model(tokens[:, :1], cache=caches[name])
            times[name].append(time.perf_counter() - start)
    return times


def requests(count: int, num_pages: int) -> dict[str, float]:
    """Median seconds of looking up, taking, sealing and releasing the pages of a request."""
    times: dict[str, list[float]] = {"off": [], "on": []}
    worlds = {}
    for name in times:
        pool = PagePool(8 * num_pages)
        worlds[name] = pool, PrefixTree(pool, 16)
        if name == "on":
            worlds[name][1].record()
    for i in range(count):
        text = [*range(8 * num_pages), *[i] * (8 * num_pages)]  # half of the pages are known
        for name, (pool, tree) in worlds.items():
            start = time.perf_counter()
            refs = tree.match(text)
            for ref in tree.insert(text, refs + pool.take(num_pages - len(refs))):
                pool.release(ref)
            times[name].append(time.perf_counter() - start)
    return {name: median(x) for name, x in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=4096
    )
    with torch.inference_mode():
        times = steps(LlamaForCausalLM(config).eval(), 20 if quick else 1000)
    pool, turns = PagePool(1), 20_000
    start = time.perf_counter()
    for _ in range(turns):
        if pool.events is not None:
            raise AssertionError
    off = (time.perf_counter() - start) / turns
    num_pages = 64
    whole = requests(20 if quick else 400, num_pages)
    step = {name: median(x) for name, x in times.items()}
    ratios = sorted(on / off for on, off in zip(times["on"], times["off"], strict=True))
    print(
        json.dumps({
            "figure": "events",
            "step_ms": 1e3 * step["off"],
            "ratio": median(ratios),
            "mean_ratio": sum(times["on"]) / sum(times["off"]),
            "steps": len(ratios),
            "off_ns": 1e9 * off,
            "request_pages": num_pages,
            "request_us": {name: 1e6 * x for name, x in whole.items()},
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
