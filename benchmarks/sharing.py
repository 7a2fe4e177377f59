"""Gain of sharing pages over copying tensors: forks, beams and repeated rows. Prints one JSON line.

transformers' DynamicCache and KVCache hold the same float32 tokens of a 4-layer model with 8 heads of 64;
medians of calls that take turns, on one thread.

``beams`` compares more caches in a step of a beam search: reorder 4 rows, then decode a token of each. There
the integer caches of transformers, quanto's and hqq's by the same code, reorder what they dequantize, in the
decoding. Prediction: at 8192 a cache that copies its rows takes longer for that than for the decoding, so
KVCache is ahead, quantized as well.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from peers import STOCK, Contender, fill, installed, kvloom, llama, quantized, static, step, stock
from rounds import in_turn
from transformers import DynamicCache, LlamaForCausalLM

from kvloom.integrations.transformers import KVCache

LENGTHS = (256, 2048, 8192)
BEAM_LENGTHS = (2048, 8192)
ROWS = 4
REPEATS = 9


def filled(cache: Any, model: LlamaForCausalLM, rows: int, num_tokens: int, attention: str = "sdpa") -> Any:
    """``cache`` with random tokens in 4 layers."""
    fill(cache, model, num_tokens, rows, attention)
    return cache


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def cases(
    model: LlamaForCausalLM, num_tokens: int
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Operations of DynamicCache and of kvloom, on caches that hold the same number of tokens."""
    theirs = filled(DynamicCache(config=model.config), model, ROWS, num_tokens)
    mine = filled(KVCache.for_model(model), model, ROWS, num_tokens)
    one_theirs = filled(DynamicCache(config=model.config), model, 1, num_tokens)
    one_mine = filled(KVCache.for_model(model), model, 1, num_tokens)
    beams = torch.tensor([1, 0, 3, 3])
    return {
        "reorder_cache, 4 rows": (lambda: theirs.reorder_cache(beams), lambda: mine.reorder_cache(beams)),
        "copy of one row": (lambda: copy.deepcopy(one_theirs), one_mine.fork),
        "repeat one row 8 times": (
            lambda: copy.deepcopy(one_theirs).batch_repeat_interleave(8),
            lambda: one_mine.fork().batch_repeat_interleave(8),
        ),
    }


def beam_step(model: LlamaForCausalLM, contender: Contender, cache: Any) -> float:
    """Milliseconds of a reordering and of the decoding after it."""
    beams = torch.tensor([1, 0, 3, 3])
    return timed(lambda: cache.reorder_cache(beams)) + step(model, contender, cache, rows=ROWS)


def beam_rows(
    model: LlamaForCausalLM, found: list[Contender], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """A row for each contender."""
    caches = {x.name: x.make(model, num_tokens + repeats + 2) for x in found}
    steps: dict[str, Callable[[], float]] = {}
    for contender in found:
        cache = filled(caches[contender.name], model, ROWS, num_tokens, contender.attention)
        steps[contender.name] = partial(beam_step, model, contender, cache)
    times = in_turn(steps, repeats, warmup=2)
    return [
        {
            "contender": name,
            "num_tokens": num_tokens,
            "ms": median(took),
            "ratio": median(a / b for a, b in zip(took, times[STOCK], strict=True)),
        }
        for name, took in times.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short length, to see that it runs")
    quick = parser.parse_args().quick
    repeats = 1 if quick else REPEATS

    torch.set_num_threads(1)
    model = llama(8)
    rows = []
    for num_tokens in (32,) if quick else LENGTHS:
        for name, (theirs, mine) in cases(model, num_tokens).items():
            pairs = [(timed(theirs), timed(mine)) for _ in range(repeats)]
            rows.append(
                {
                    "case": name,
                    "num_tokens": num_tokens,
                    "stock_ms": median(a for a, _ in pairs),
                    "kvloom_ms": median(b for _, b in pairs),
                    "ratio": median(a / b for a, b in pairs),
                }
            )
    ours = [kvloom(kv, in_place=in_place) for in_place in (False, True) for kv in ("float32", "int8", "int4")]
    found, missing = installed([stock(), static(), quantized("quanto", 4), *ours], model)
    beams = [row for n in ((32,) if quick else BEAM_LENGTHS) for row in beam_rows(model, found, n, repeats)]
    print(json.dumps({"figure": "sharing", "missing": missing, "rows": rows, "beams": beams}))


if __name__ == "__main__":
    main()
