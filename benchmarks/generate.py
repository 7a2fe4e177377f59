"""Tokens a second and bytes of ``generate()`` at a context of 4096. Prints one JSON line.

A 4-layer Llama of random weights with 8 heads of 64, float32, one sequence. Every cache is filled with the
same random keys and values; then each in turn generates some tokens, round after round in one process. All
rounds together make a multiple of the 128 tokens after which transformers' int4 caches requantize all they
hold: ``tokens_per_s`` is all tokens by all seconds, ``speed`` that by DynamicCache's. ``ratio`` is the median
over the rounds of DynamicCache's time by a cache's, which leaves out the few that requantize. ``nbytes`` is
what a cache's tensors hold in the end.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import STOCK, Contender, fill, installed, kvloom, llama, quantized, static, stock
from rounds import Probes, in_turn, ratio
from torch import Tensor

CONTEXT = 4096
NEW = 16
ROUNDS = 24
WARMUP = 8
PAGE = 16


def contenders() -> list[Contender]:
    """DynamicCache first, then its peers, then ours."""
    ours = [kvloom(kv, in_place=True, bounded=True) for kv in ("float32", "bfloat16", "int8", "int4")]
    return [stock(), static(), quantized("quanto", 4), quantized("hqq", 4), *ours]


class Text:
    """A text that grows by ``generate``, and the cache of all of it but the last token."""

    def __init__(self, model: Any, contender: Contender, context: int, bound: int) -> None:
        self.model, self.attention = model, contender.attention
        self.cache = contender.make(model, bound)
        fill(self.cache, model, context, attention=contender.attention)
        self.tokens = torch.full((1, context + 1), 3)

    def grow(self, num_new: int) -> float:
        """Seconds of ``num_new`` new tokens."""
        self.model.set_attn_implementation(self.attention)
        start = time.perf_counter()
        self.tokens = self.model.generate(
            self.tokens,
            attention_mask=torch.ones_like(self.tokens),
            cache=self.cache,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start


def storages(x: object, found: dict[int, int], seen: set[int]) -> None:
    """Bytes of the storages that ``x`` reaches through attributes and containers, by address."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        parts = [getattr(x, name) for name in getattr(x, "__tensor_flatten__", lambda: ([], None))()[0]]
        if not parts:
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        for part in parts:
            storages(part, found, seen)
    elif isinstance(x, dict):
        for part in x.values():
            storages(part, found, seen)
    elif isinstance(x, (list, tuple, set)):
        for part in x:
            storages(part, found, seen)
    elif type(x).__module__.startswith(("transformers.cache", "kvloom", "hqq")):
        names = [*getattr(x, "__dict__", ()), *getattr(type(x), "__slots__", ())]
        for name in names:
            storages(getattr(x, name, None), found, seen)


def measure(
    model: Any, found: list[Contender], context: int, new: int, rounds: int, warmup: int
) -> list[dict[str, Any]]:
    """A row for each contender."""
    bound = -(-(context + (warmup + rounds) * new) // PAGE) * PAGE
    texts = {x.name: Text(model, x, context, bound) for x in found}
    calls: dict[str, Callable[[], float]] = {name: lambda x=x: x.grow(new) for name, x in texts.items()}
    times = in_turn(calls, rounds, warmup)
    rows = []
    for name, took in times.items():
        held: dict[int, int] = {}
        storages(texts[name].cache, held, set())
        rows.append(
            {
                "contender": name,
                "tokens_per_s": round(new * rounds / sum(took), 2),
                "speed": round(sum(times[STOCK]) / sum(took), 3),
                "ratio": ratio(times[STOCK], took),
                "nbytes": sum(held.values()),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short context, to see that it runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    context, new, rounds, warmup = (32, 2, 2, 1) if args.quick else (CONTEXT, NEW, ROUNDS, WARMUP)
    model = llama(8)
    found, missing = installed(contenders(), model)
    with torch.no_grad(), Probes().own_cores():
        rows = measure(model, found, context, new, rounds, warmup)
    print(
        json.dumps(
            {
                "figure": "generate",
                "threads": torch.get_num_threads(),
                "context": context,
                "new": new,
                "rounds": rounds,
                "missing": missing,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
