"""The sections of results.md that are of traces."""

from typing import Any

from tables import pivot, table


def simulate_section(result: dict[str, Any]) -> str:
    """Section on the blocks of traces that caches find."""
    speed = result["blocks_per_s"]
    parts = [
        "Blocks of prompts that a cache finds, of those that are asked for, by tokens of cache "
        "([docs](../docs/simulation.md)): `KVLOOM_TRACE=conversation_trace.jsonl make bench ARGS=simulate`. "
        "*lru* and *ours*: the pool and the tree of real caches, with either policy; they replay up to "
        f"{speed['lru']:,.0f} and {speed['ours']:,.0f} blocks a second of a processor here. "
        "*opt* knows the future. "
        "*conversation_trace* is of Mooncake (FAST 25, Apache-2.0); the traces below it are made up."
    ]
    traces: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        traces.setdefault(row["trace"], []).append(row | {"tokens": f"{row['capacity'] / 1e6:g} M"})
    for name, rows in traces.items():
        parts += [f"{name}:", pivot(rows, "policy", "tokens", "block_rate", ".3f")]
    return "\n\n".join(parts)


def knowledge_section(result: dict[str, Any]) -> str:
    """Section on the blocks that more knowledge would find."""
    rows = [row | {"column": f"{row['capacity'] / 1e6:g} M, {row['odds']}"} for row in result["rows"]]
    return (
        f"Blocks of {result['trace']} that can be found by what is known of each use of a block, by tokens "
        "of cache: `KVLOOM_TRACE=conversation_trace.jsonl make bench ARGS=knowledge`. Each block is kept for "
        "as long as earns most for its room, with as many blocks as there is room for on average. How likely "
        "a block is used again at which age is counted for each kind: in *other texts* of the whole trace, "
        "by five parts, which no server has; or in what came *before*, eight times. *Ours*: the "
        'kinds of `policy="ours"`. Depths, blocks, gaps and lengths are grouped by octaves. '
        "([Decision 27](../docs/decisions/0027-pages-go-by-what-they-are-worth.md).)\n\n"
        + pivot(rows, "known", "column", "block_rate", ".3f")
    )


def events_section(result: dict[str, Any]) -> str:
    """Section on the cost of recording."""
    times, off = result["request_us"], result["off_ns"] / 1e6 / result["step_ms"]
    return (
        "A decode step after 256 tokens of a `KVPool` that records its events, by one of a pool that does "
        f"not, in turn: {result['ratio']:.3f}x in the median of {result['steps']} pairs, "
        f"{result['mean_ratio']:.3f}x in all; a step takes {result['step_ms']:.1f} ms, a 4-layer Llama in "
        "float32, one thread. Not recording is one comparison in each method of the pool, "
        f"{result['off_ns']:.0f} ns, {off:.5%} of a step. A request of {result['request_pages']} pages, half "
        "of them known, is looked up, sealed and released in "
        f"{times['off']:.0f} us, and in {times['on']:.0f} us where that is recorded."
    )


def causes_section(result: dict[str, Any]) -> str:
    """Why pages are missed."""
    names = sorted({x for row in result["rows"] for x in row["causes"]})
    rows = [
        [
            f"{row['capacity'] / 1e6:g} M",
            *(f"{x:,}" for x in (row["asked"], row["found"], row["asked"] - row["found"])),
            *(f"{row['causes'].get(x, 0):,}" for x in names),
            f"{row['more_tokens'] / 1e6:.1f} M",
        ]
        for row in result["rows"]
    ]
    fastest = max(row["blocks_per_s"] for row in result["rows"])
    return (
        f"Pages of {result['trace']} that are asked for, found and missed, and the cause of each missed one "
        "([docs](../docs/trace.md)), by tokens of cache; the last column is how much more would have kept "
        "the median of the evicted ones: `KVLOOM_TRACE=conversation_trace.jsonl make bench ARGS=causes`. "
        f"Recorded, the pool replays up to {fastest:,.0f} pages a second here.\n\n"
        + table(["cache", "asked", "found", "missed", *names, "more"], rows)
    )
