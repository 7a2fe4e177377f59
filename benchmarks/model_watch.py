"""Time to check that a model is unchanged: in each lookup of a pool, and in each forward.

python benchmarks/model_watch.py [--layers 32] [--hidden 512]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVCache
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Median time of a call in microseconds."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=101)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    watch = ModelWatch(model)
    cache = KVCache.for_model(model)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, cache=cache)
        step = median_us(lambda: model(tokens[:, :1], cache=cache), args.rounds)
    state, quick = median_us(watch.state, args.rounds), median_us(watch.quick_state, args.rounds)
    print(
        json.dumps(
            {
                "layers": args.layers,
                "state_us": round(state),
                "quick_state_us": round(quick),
                "step_us": round(step),
                "quick_share_of_step": round(quick / step, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
