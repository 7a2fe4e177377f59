"""Waiting time of ``begin`` for stores that are slow, or hold much, against computing the prompt.

    python benchmarks/slow_store.py [--latencies 0 0.1 1 5] [--runs 1 1000 100000]

A store in memory, each of whose requests takes as long as said, holds runs of other texts and the one of a
prompt of 257 tokens, of a model of eight layers. Three pools are opened in sequence, as three processes
would; each begins with a known prompt and then with unknown ones. A ratio is the time from ``begin`` to the
end of the prefill over that of a pool without a store, which computes a prompt right after. ``begin`` is in
seconds.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles.slow_store import slow_store

from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.store import KVStore
from kvloom.store.digests import TextDigests, salt_digest, token_bytes
from kvloom.store.format import Run, page_bytes

NUM_TOKENS = 257
PAGE = 16


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def text(seed: int) -> torch.Tensor:
    return torch.randint(0, 1000, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))


def fill(backend: object, model: LlamaForCausalLM, count: int) -> None:
    """Runs of two pages of other texts, whose heads are real; the pages of all are the same."""
    whose = fingerprint_of(model, "int8")
    rng, salt = random.Random(0), salt_digest("")
    data = bytearray(whose.num_heads * 2 * page_bytes(whose, PAGE))
    for _ in range(count):
        tokens = [rng.randrange(1000) for _ in range(2 * PAGE)]
        before, *digests = TextDigests(whose.digest, salt, tokens).digests(range(0, 2 * PAGE + 1, PAGE))
        run = Run(whose, salt, 0, PAGE, before, tuple(digests), token_bytes(tokens))
        run = run.with_checksums(memoryview(data))
        backend._objects[run.name] = [run.head(), data], time.time()  # type: ignore[attr-defined]


def prefill(model: LlamaForCausalLM, pool: KVPool, tokens: torch.Tensor) -> tuple[float, float, int]:
    """Seconds of ``begin``, seconds to the end of the prefill, and the tokens that were found."""
    began = time.perf_counter()
    cache = pool.begin(tokens)
    begun = time.perf_counter()
    found = int(cache.get_seq_length())
    with torch.inference_mode():
        model(tokens[:, found:], cache=cache)
    return begun - began, time.perf_counter() - began, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 0.1, 1.0, 5.0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 1000, 100_000])
    parser.add_argument("--rounds", type=int, default=9, help="unknown prompts of each pool")
    args = parser.parse_args()
    model = make_model()
    alone = KVPool.for_model(model, kv="int8", max_tokens=8192)
    computing = statistics.median(prefill(model, alone, text(1000 + i))[1] for i in range(9))
    rows = []
    for count in args.runs:
        for latency in args.latencies:
            with slow_store(f"{count}-{latency}") as (url, backend):
                fill(backend, model, count - 1)
                with KVStore(url) as store:
                    pool = KVPool.for_model(model, kv="int8", max_tokens=8192, store=store)
                    cache = pool.begin(text(0))
                    with torch.inference_mode():
                        model(text(0), cache=cache)
                    pool.commit(cache, text(0))
                for number in range(3):
                    backend.seconds = latency
                    row = {
                        "latency": latency,
                        "runs": count,
                        **opened(model, alone, url, number, args.rounds),
                    }
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    time.sleep(min(20 * latency, 3.0))  # as between requests
                    backend.seconds = 0.0
    result = {"tokens": NUM_TOKENS, "computing_ms": computing * 1e3, "rounds": args.rounds, "rows": rows}
    print(json.dumps(result))


def opened(model: LlamaForCausalLM, alone: KVPool, url: str, number: int, rounds: int) -> dict[str, float]:
    """One pool above a store, as a new process has it."""
    began = time.perf_counter()
    with KVStore(url) as store:
        pool = KVPool.for_model(model, kv="int8", max_tokens=8192, store=store)
        opening = time.perf_counter() - began
        _, whole, found = prefill(model, pool, text(0))
        known = whole / prefill(model, alone, text(1))[1]
        begins, ratios = [], []
        for i in range(1, rounds + 1):
            begin, whole, _ = prefill(model, pool, text(10_000 * number + i))
            begins.append(begin)
            ratios.append(whole / prefill(model, alone, text(10_000 * number + i))[1])
    return {
        "opening_s": opening,
        "known": known,
        "found": found,
        "unknown": statistics.median(ratios),
        "begin_s": statistics.median(begins),
        "longest_s": max(begins),
    }


if __name__ == "__main__":
    main()
