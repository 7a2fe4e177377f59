"""Time to the first token of a question after a long system prompt: computed, forked, or found in a pool.

Predicted: a hit costs what the question alone costs, so the ratio is near the ratio of the lengths.
Prints one JSON line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVCache, KVPool


def first_token(model: LlamaForCausalLM, tokens: torch.Tensor, cache: object) -> float:
    """Milliseconds from the question to its first token."""
    start = time.perf_counter()
    model.generate(tokens, cache=cache, max_new_tokens=1, do_sample=False)
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    length, question, rounds = (128, 16, 2) if quick else (2048, 64, 7)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    system = torch.randint(3, 1000, (1, length))
    prefix = KVCache.for_model(model, kv="int8")
    pool = KVPool.for_model(model, kv="int8", max_tokens=8 * (length + question + 16))
    with torch.no_grad():
        model(system, cache=prefix)
    prefix.freeze()
    warm = pool.begin(system)
    model.generate(system, cache=warm, max_new_tokens=1, do_sample=False)
    pool.commit(warm, system)
    pages = prefix.num_pages_held
    contenders: dict[str, Callable[[torch.Tensor], object]] = {
        "DynamicCache": lambda tokens: DynamicCache(config=config),
        "kvloom int8, read anew": lambda tokens: KVCache.for_model(model, kv="int8"),
        "kvloom int8, fork": lambda tokens: prefix.fork(),
        "kvloom int8, pool": pool.begin,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    begin: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        tokens = torch.cat([system, torch.randint(3, 1000, (1, question))], dim=1)
        for name, make in contenders.items():
            start = time.perf_counter()
            cache = make(tokens)
            begin[name].append(1e6 * (time.perf_counter() - start))
            times[name].append(first_token(model, tokens, cache))
    base = times["DynamicCache"]
    print(
        json.dumps(
            {
                "benchmark": "prefix",
                "prompt_tokens": length,
                "question_tokens": question,
                "pages_of_the_prefix": pages,
                "contenders": {
                    name: {
                        "first_token_ms": round(statistics.median(times[name]), 2),
                        "times_faster": round(
                            statistics.median(b / t for b, t in zip(base, times[name], strict=True)), 2
                        ),
                        "make_cache_us": round(statistics.median(begin[name]), 1),
                    }
                    for name in contenders
                },
            }
        )
    )


if __name__ == "__main__":
    main()
