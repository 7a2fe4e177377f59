"""The sections of results.md that are of traces."""

from typing import Any

from tables import pivot


def simulate_section(result: dict[str, Any]) -> str:
    """What caches find of traces."""
    parts = [
        "Blocks of prompts that a cache finds, of those that are asked for, by tokens of cache "
        "([docs](../docs/simulation.md)): `KVLOOM_TRACE=conversation_trace.jsonl make bench ARGS=simulate`. "
        "*lru*: the pool and the tree that serve, which replay up to "
        f"{result['blocks_per_s']:,.0f} blocks a second here. *opt* knows the future. "
        "*conversation_trace* is of Mooncake (FAST 25, Apache-2.0); the traces below it are made up."
    ]
    traces: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        traces.setdefault(row["trace"], []).append(row | {"tokens": f"{row['capacity'] / 1e6:g} M"})
    for name, rows in traces.items():
        parts += [f"{name}:", pivot(rows, "policy", "tokens", "block_rate", ".3f")]
    return "\n\n".join(parts)
