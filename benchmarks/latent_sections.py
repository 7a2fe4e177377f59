"""The section of results.md about latent attention."""

from typing import Any

from tables import table


def latents_section(result: dict[str, Any]) -> str:
    """Steps by dtype and length, then quality by kind."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in result["steps"]:
        found.setdefault((row["dtype"], row["kv"]), {})[row["tokens"]] = row
    lengths = sorted({row["tokens"] for row in result["steps"]})
    steps = [
        [dtype, kv, f"{of[lengths[-1]]['nbytes_per_token'] / 3:,.0f}"]
        + [f"{of[n]['over_dynamic_cache']:.3f} ({of[n]['ms']:.1f} ms)" for n in lengths]
        for (dtype, kv), of in found.items()
    ]
    costs = [
        [row["kv"], f"{row['nbytes_per_token']:,.0f}", f"{row['mean_kl']:.1e}", f"{row['agreed']:.1%}",
         f"{row['change']:+.2%}"]
        for row in result["costs"]
    ]  # fmt: skip
    text = (
        "A decode step of three layers of DeepSeek V2-Lite's sizes after so many tokens, over DynamicCache's "
        "step, which expands all latents. One thread.\n\n"
        + table(["dtype", "kv", "bytes/token of a layer", *(f"{n:,} tokens" for n in lengths)], steps)
    )
    if costs:
        head = ["cache", "bytes/token", "mean KL in nats", "same choices", "perplexity"]
        text += (
            "\n\nA small model that was trained with latents, decoded on held-out text after half of each "
            "text of 512 tokens.\n\n" + table(head, costs)
        )
    return text
