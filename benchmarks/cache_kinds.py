"""Costs and losses of each kind of cache on held-out text, with the bundled model. Prints one JSON line.

Prompts are the first characters of held-out files: short, so they show what a cache changes and costs, not
what a long context gains. Loss is that of whole windows in one pass, whose attention sees what the cache
returns. ``in place`` has kvloom's attention, the others the model's own.
"""

import argparse
import json
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from kvloom.integrations.transformers import load_model
from kvloom.measuring.compare import STOCK, attention_for, cache_of, compare
from kvloom.measuring.quality import WINDOW, windows_of
from kvloom.models import bundled_model_path, iter_texts

KINDS = ("float32", "float16", "bfloat16", "int8", "int4")
PROMPT_CHARACTERS = 1200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one prompt and few tokens, to see that it runs")
    args = parser.parse_args()
    characters = PROMPT_CHARACTERS
    if args.quick:
        args.prompts = args.windows = args.runs = 1
        args.max_new_tokens, characters = 4, 200

    model, tokenizer = load_model(bundled_model_path(), torch.float32)
    texts = [
        text
        for _, text in zip(range(args.prompts), iter_texts("heldout", 4 * PROMPT_CHARACTERS), strict=False)
    ]
    prompts = [tokenizer(text[:characters], return_tensors="pt").input_ids for text in texts]
    windows = windows_of(tokenizer, iter_texts("heldout"), args.windows * WINDOW)
    kinds, in_place = (
        measure(model, prompts, windows, args.max_new_tokens, args.runs, in_place=in_place)
        for in_place in (False, True)
    )
    kinds += [row | {"kind": f"{row['kind']} in place"} for row in in_place if row["kind"] != STOCK]
    lengths = [ids.shape[1] for ids in prompts]
    result = {"prompt_tokens": (min(lengths), max(lengths)), "loss_tokens": windows.numel(), "kinds": kinds}
    print(json.dumps({"figure": "cache_kinds", "prompts": len(prompts), **result}))


def measure(
    model: Any, prompts: list[Tensor], windows: Tensor, max_new_tokens: int, num_runs: int, *, in_place: bool
) -> list[dict[str, Any]]:
    """A row for DynamicCache and for each kind, over all prompts."""
    per_kind: dict[str, list[Any]] = {}
    for ids in prompts:
        found = compare(
            model, ids, list(KINDS), max_new_tokens=max_new_tokens, num_runs=num_runs, in_place=in_place
        )
        for row in found:
            per_kind.setdefault(row.kind, []).append(row)
    return [
        {
            "kind": kind,
            "nbytes_per_token": rows[0].nbytes_per_token,
            "speed_vs_stock": median(
                row.tokens_per_s / base.tokens_per_s for row, base in zip(rows, per_kind[STOCK], strict=True)
            ),
            "num_same": sum(row.num_same for row in rows),
            "num_agreed": sum(row.num_agreed for row in rows),
            "num_tokens": sum(row.num_tokens for row in rows),
            "mean_kl": mean(row.mean_kl for row in rows),
            "heldout_loss": loss(model, windows, kind, in_place=in_place),
        }
        for kind, rows in per_kind.items()
    ]


@torch.no_grad()
def loss(model: Any, windows: Tensor, kind: str, *, in_place: bool) -> float:
    """Mean next-token loss in nats with keys and values through a cache of ``kind``."""
    total = 0.0
    with attention_for(model, kind, in_place=in_place):
        for window in windows.split(4):
            logits = model(window, cache=cache_of(model, kind), use_cache=True).logits[:, :-1]
            targets = window[:, 1:].flatten()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
    return total / windows[:, 1:].numel()


if __name__ == "__main__":
    main()
