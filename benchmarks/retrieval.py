"""Share of right answers from far back in a cache, exactly and by distance. Prints one JSON line.

A small model was trained on key-value recall (recall_task.py, recall_model.py), for the bundled one cannot
copy from far back; perplexity hides a lost answer among many words that need no memory. It reads texts of
1,024 tokens, whose records are 160 tokens or more before their questions: beyond every residual window.
Questions are decoded token by token. The keys are the model's own, or have statistics of real ones: outliers,
which leave the model's function unchanged, and biases, which do not.

Prediction: a symbol is found by one product that is far above the others, and errors of other tokens average
out, so int8 answers as DynamicCache does, int4 at most one answer in a hundred worse, and values of two bits
add little: they only have to tell 320 symbols apart. int2 keys lose several in a hundred. Outliers and
biases take bits from what differs: int4 that does not smooth its keys loses some answers to outliers, which
rotation spreads, and nearly all to biases; smoothed keys answer as plain ones do.
"""

import argparse
import json
import random
from typing import Any

import torch
from peers import STOCK, Contender, installed, quantized, stock
from quality import nbytes_per_token
from recall_model import LENGTH, trained_model, untrained_model
from recall_task import MOST_RECORDS, RECORD, Texts, answered, make_texts

from kvloom.integrations.transformers import KVCache
from kvloom.measuring.changed_keys import changed_keys
from kvloom.measuring.key_statistics import STATISTICS

KINDS = (("int8", None), ("int4", None), ("int4", "int2"), ("int2", None))
KEYS = ("plain", "outliers", "biases")
GAP = 160
"""Tokens of noise before the first question: more than the 128 that peers keep unquantized."""
FARTHER = (GAP, 400, 700)
"""Tokens from which on a distance is called by the number."""
QUESTIONS = 20
ROWS = 16
"""Texts that are read together."""


def contenders() -> list[Contender]:
    """All caches."""
    ours = [_kvloom(kv, values, smooth) for kv, values in KINDS for smooth in ("", ",smooth=none")]
    return [stock(), *ours, quantized("quanto", 4), quantized("hqq", 4)]


def _kvloom(kv: str, values: str | None, smooth: str) -> Contender:
    name = f"kvloom {kv}{f'/{values}' if values else ''}{smooth}"
    return Contender(name, lambda model, _: KVCache.for_model(model, kv + smooth, values=values))


def rates(right: torch.Tensor, distances: torch.Tensor) -> list[float | None]:
    """Share of right answers, of those at each distance of ``FARTHER``; ``None`` where none was asked."""
    found = torch.bucketize(distances, torch.tensor(FARTHER), right=True)
    shares = [right[found == i].double().mean() for i in range(1, len(FARTHER) + 1)]
    return [None if share.isnan() else float(share) for share in shares]


def measure(model: Any, contender: Contender, batches: list[Texts]) -> dict[str, Any]:
    """A row: what is answered, of all questions and by distance."""
    right = torch.cat([answered(model, x, contender.make(model, LENGTH)) for x in batches])
    distances = torch.cat([x.distances for x in batches])
    return {
        "contender": contender.name,
        "exact": float(right.double().mean()),
        "by_distance": rates(right, distances),
    }


def main() -> None:
    """Train unless it was done before, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--keys", nargs="*", default=KEYS, choices=STATISTICS)
    parser.add_argument("--quick", action="store_true", help="an untrained model, to see that it runs")
    args = parser.parse_args()

    torch.set_num_threads(1)
    load = untrained_model if args.quick else trained_model
    model = load()
    length, questions, num_texts = (256, 2, 1) if args.quick else (LENGTH, QUESTIONS, args.texts)
    records = min(MOST_RECORDS, (length - GAP - questions * RECORD) // (2 * RECORD))
    rng = random.Random(1)
    batches = [
        make_texts(rng, min(ROWS, num_texts - i), length, records=records, questions=questions, gap=GAP)
        for i in range(0, num_texts, ROWS)
    ]
    found, missing = installed(contenders()[:3] if args.quick else contenders(), model)
    nbytes = {x.name: nbytes_per_token(model, x, 1024 if args.quick else 8192) for x in found}
    rows: list[dict[str, Any]] = []
    for keys in args.keys:
        model = load()  # beside a model stays what was calibrated with keys of another case
        with changed_keys(model, STATISTICS[keys]):
            for contender in found:
                row = measure(model, contender, batches)
                rows.append({"keys": keys, "nbytes_per_token": nbytes[contender.name], **row})
    print(
        json.dumps(
            {
                "figure": "retrieval",
                "stock": STOCK,
                "tokens": length,
                "questions": num_texts * questions,
                "farther": FARTHER,
                "missing": missing,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
