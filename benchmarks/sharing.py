"""What sharing pages saves over copying tensors: forks, beams and repeated rows. Prints one JSON line.

transformers' DynamicCache and KVCache hold as many float32 tokens of a 4-layer model with 8 heads of
64; medians of calls that take turns.
"""

import copy
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import KVCache

LENGTHS = (256, 2048, 8192)
ROWS = 4
REPEATS = 9


def filled(cache: Any, rows: int, num_tokens: int) -> Any:
    """``cache`` with random tokens in 4 layers."""
    for layer in range(4):
        new = torch.randn(rows, 8, num_tokens, 64)
        cache.update(new, new, layer)
    return cache


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def cases(
    model: LlamaForCausalLM, num_tokens: int
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What is measured: DynamicCache's way and ours, on caches that hold the same number of tokens."""
    stock = filled(DynamicCache(config=model.config), ROWS, num_tokens)
    ours = filled(KVCache.for_model(model), ROWS, num_tokens)
    one_stock = filled(DynamicCache(config=model.config), 1, num_tokens)
    one_ours = filled(KVCache.for_model(model), 1, num_tokens)
    beams = torch.tensor([1, 0, 3, 3])
    return {
        "reorder_cache, 4 rows": (lambda: stock.reorder_cache(beams), lambda: ours.reorder_cache(beams)),
        "copy of one row": (lambda: copy.deepcopy(one_stock), one_ours.fork),
        "repeat one row 8 times": (
            lambda: copy.deepcopy(one_stock).batch_repeat_interleave(8),
            lambda: one_ours.fork().batch_repeat_interleave(8),
        ),
    }


def main() -> None:
    """Measure and print."""
    config = LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, vocab_size=32
    )
    model = LlamaForCausalLM(config)
    rows = []
    for num_tokens in LENGTHS:
        for name, (theirs, mine) in cases(model, num_tokens).items():
            pairs = [(timed(theirs), timed(mine)) for _ in range(REPEATS)]
            rows.append(
                {
                    "case": name,
                    "num_tokens": num_tokens,
                    "stock_ms": median(a for a, _ in pairs),
                    "kvloom_ms": median(b for _, b in pairs),
                    "ratio": median(a / b for a, b in pairs),
                }
            )
    print(json.dumps({"figure": "sharing", "rows": rows}))


if __name__ == "__main__":
    main()
