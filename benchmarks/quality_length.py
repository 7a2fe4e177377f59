"""Loss of quality of quantized caches in long texts and with realistic keys. Prints one JSON line.

The bundled model decodes: the first half of each text is a prompt, and each later token is fed alone. Texts
are as long as those of quality.py and as the model has positions for: held-out text, and sources of two
packages of which the model saw nothing. On those of torch the model also has statistics of real keys: two
outlier pairs of RoPE in each head, biases before RoPE in five, or both.

Prediction: int8 costs nothing at any length, and int4 more after more tokens, for its residual window of 64
is a smaller part of what is read. Where keys are not smoothed, outliers and biases take bits from the
channels that share a scale with them: two digits of KL with int8. Rotation spreads outliers over a group, and
biases of a hundred standard deviations over all of it, so that int4 has no bits left for what differs.
Smoothed keys cost what benign ones do.
"""

import argparse
import json
from typing import Any

import torch
from peers import Contender, installed, quantized

from kvloom.integrations.transformers import KVCache, load_model
from kvloom.integrations.transformers.models.positions import positions_of
from kvloom.measuring.changed_keys import changed_keys
from kvloom.measuring.key_statistics import STATISTICS
from kvloom.measuring.quality import ROWS, WINDOW, Peer, quality, windows_of
from kvloom.measuring.texts import HELD_OUT, PACKAGES, texts_named
from kvloom.models import bundled_model_path

CHANGED = ("outliers", "biases", "both")


def contenders() -> list[Contender]:
    """All but DynamicCache."""
    ours = [_kvloom(kv, smooth=smooth) for kv in ("int8", "int4") for smooth in ("keys", "none")]
    return [*ours, _kvloom("int4", "int2"), quantized("quanto", 4), quantized("hqq", 4)]


def _kvloom(kv: str, values: str | None = None, smooth: str = "keys") -> Contender:
    name = f"kvloom {kv}{f'/{values}' if values else ''}{'' if smooth == 'keys' else ', not smoothed'}"
    return Contender(name, lambda model, _: KVCache.for_model(model, f"{kv},smooth={smooth}", values=values))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="short texts and few, to see that it runs")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    longest = positions_of(model) or WINDOW
    windows = (50,) if args.quick else (WINDOW, longest)
    tokens = windows[0] if args.quick else args.tokens
    cases = [(text, window, "plain") for text in (HELD_OUT, *PACKAGES) for window in windows]
    cases += [(PACKAGES[0], window, keys) for keys in CHANGED for window in windows]
    cases = [x for x in cases if not args.quick or x[0] == PACKAGES[0]]
    found, missing = installed(contenders()[:2] if args.quick else contenders(), model)
    peers = [Peer(x.name, lambda model, make=x.make: make(model, ROWS * longest)) for x in found]
    rows: list[dict[str, Any]] = []
    for text, window, keys in cases:
        texts = windows_of(tokenizer, texts_named(text), tokens, window=window)
        with changed_keys(model, STATISTICS[keys]):
            measured = quality(model, texts, peers, after=window // 2, decode=True)
        rows += [
            {
                "text": text,
                "window": window,
                "keys": keys,
                "contender": row.kind,
                "tokens": row.num_tokens,
                "nbytes_per_token": row.nbytes_per_token,
                "perplexity": row.perplexity,
                "change": row.perplexity / measured[0].perplexity - 1,
                "mean_kl": row.mean_kl,
                "agreed": row.agreed,
            }
            for row in measured
        ]
    print(json.dumps({"figure": "quality_length", "missing": missing, "rows": rows}))


if __name__ == "__main__":
    main()
