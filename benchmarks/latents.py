"""Latent attention (MLA): decode steps, and what quantized latents cost. Prints one JSON line.

Steps are those of three layers of DeepSeek V2-Lite's sizes with random weights, over DynamicCache's, of one
sequence, in alternating rounds. Quality is that of a small model that was trained with latents, decoded on
held-out text, each token after half of its text.

Prediction: DynamicCache's layers expand all latents in each step, 4.2 million multiplications a token, and
kvloom's attend to them by 17,000 multiplications a token, so steps are 100 times as fast once expansion is
all; after few tokens both read the weights. Codes of 8 bits cost nothing, and 4 bits more than with keys and
values apart, since a latent is both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from latent_model import LENGTH, trained_model, untrained_model
from transformers import AutoTokenizer, DynamicCache

from kvloom.integrations.transformers import KVCache
from kvloom.measuring.quality import quality, windows_of
from kvloom.measuring.texts import HELD_OUT, texts_named
from kvloom.models import bundled_model_path

TOKENS: Final = (128, 2048, 8192)
KINDS: Final = ("auto", "int8", "int4")
LITE: Final = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
}
"""Attention of DeepSeek V2-Lite, with a smaller hidden size."""


def steps(dtype: torch.dtype, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Medians of a step after so many tokens, of each kind over DynamicCache's."""
    model = untrained_model(3, **LITE).to(dtype)
    latents, rope = (torch.randn(1, 1, tokens, n).to(dtype) for n in (512, 64))
    model.set_attn_implementation("kvloom")
    caches: dict[str, tuple[str, Any]] = {"DynamicCache": ("sdpa", DynamicCache(config=model.config))}
    caches |= {kv: ("kvloom", KVCache.for_model(model, kv)) for kv in KINDS}
    for _, cache in caches.values():
        for layer in range(3):
            cache.update(latents, rope, layer)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for i in range(rounds + 2):
        for name, (attention, cache) in caches.items():
            model.set_attn_implementation(attention)
            times[name].append(_seconds(lambda cache=cache, i=i: _step(model, cache, tokens + i)))
    found = {name: seconds[2:] for name, seconds in times.items()}
    stock = found.pop("DynamicCache")
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": tokens,
            "kv": name,
            "ms": 1e3 * statistics.median(seconds),
            "over_dynamic_cache": statistics.median(a / b for a, b in zip(seconds, stock, strict=True)),
            "nbytes_per_token": caches[name][1].nbytes_per_token,
        }
        for name, seconds in found.items()
    ]


def _step(model: Any, cache: Any, position: int) -> None:
    with torch.no_grad():
        model(torch.tensor([[7]]), past_key_values=cache, position_ids=torch.tensor([[position]]))


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def costs(tokens: int) -> list[dict[str, Any]]:
    """KL, same choices and perplexity of quantized latents in the trained model."""
    model = trained_model()
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path(), local_files_only=True)
    texts = windows_of(tokenizer, texts_named(HELD_OUT), tokens, window=LENGTH)
    measured = quality(model, texts, ["int8", "int4", "int4,recent=0"], after=LENGTH // 2, decode=True)
    return [
        {
            "kv": row.kind,
            "nbytes_per_token": row.nbytes_per_token,
            "mean_kl": row.mean_kl,
            "agreed": row.agreed,
            "change": row.perplexity / measured[0].perplexity - 1,
            "perplexity": row.perplexity,
        }
        for row in measured
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096, help="of held-out text")
    parser.add_argument(
        "--quick", action="store_true", help="few tokens and no training, to see that it runs"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for tokens in (TOKENS[:1] if args.quick else TOKENS)
        for row in steps(dtype, tokens, 2 if args.quick else args.rounds)
    ]
    line = {"figure": "latents", "steps": found, "costs": [] if args.quick else costs(args.tokens)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
