"""What each cache kind costs and changes on held-out text, with the bundled model. Prints one JSON line.

Prompts are the first characters of held-out files. Loss is that of whole windows in one pass, whose
attention sees what the cache gives back.
"""

import argparse
import json
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from kvloom.integrations.compare import STOCK, compare
from kvloom.integrations.transformers import KVCache, load_model
from kvloom.models import bundled_model_path, iter_texts

KINDS = ("float32", "float16", "bfloat16", "int8", "int4")
PROMPT_CHARACTERS = 1200
WINDOW = 512


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()

    model, tokenizer = load_model(bundled_model_path(), torch.float32)
    texts = [
        text
        for _, text in zip(range(args.prompts), iter_texts("heldout", 4 * PROMPT_CHARACTERS), strict=False)
    ]
    per_kind: dict[str, list[Any]] = {}
    for text in texts:
        ids = tokenizer(text[:PROMPT_CHARACTERS], return_tensors="pt").input_ids
        rows = compare(model, ids, list(KINDS), max_new_tokens=args.max_new_tokens, num_runs=args.runs)
        for row in rows:
            per_kind.setdefault(row.kind, []).append(row)
    windows = heldout_windows(tokenizer, args.windows)
    stock = per_kind[STOCK]
    print(
        json.dumps(
            {
                "figure": "cache_kinds",
                "prompts": len(texts),
                "loss_tokens": windows.numel(),
                "kinds": [
                    {
                        "kind": kind,
                        "nbytes_per_token": rows[0].nbytes_per_token,
                        "speed_vs_stock": median(
                            row.tokens_per_s / base.tokens_per_s
                            for row, base in zip(rows, stock, strict=True)
                        ),
                        "num_same": sum(row.num_same for row in rows),
                        "num_agreed": sum(row.num_agreed for row in rows),
                        "num_tokens": sum(row.num_tokens for row in rows),
                        "mean_kl": mean(row.mean_kl for row in rows),
                        "heldout_loss": loss(model, windows, kind),
                    }
                    for kind, rows in per_kind.items()
                ],
            }
        )
    )


def heldout_windows(tokenizer: Any, num_windows: int) -> Tensor:
    """``[num_windows, WINDOW]`` tokens of held-out files, one behind the other."""
    ids: list[int] = []
    for text in iter_texts("heldout"):
        ids += tokenizer(text, verbose=False).input_ids
        if len(ids) >= num_windows * WINDOW:
            break
    return torch.tensor(ids[: num_windows * WINDOW]).view(num_windows, WINDOW)


@torch.no_grad()
def loss(model: Any, windows: Tensor, kind: str) -> float:
    """Mean next-token loss in nats with keys and values through a cache of ``kind``."""
    total = 0.0
    for window in windows.split(4):
        cache = None if kind == STOCK else KVCache.for_model(model, kv=kind)
        logits = model(window, past_key_values=cache, use_cache=True).logits[:, :-1]
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
        )
    return total / windows[:, 1:].numel()


if __name__ == "__main__":
    main()
