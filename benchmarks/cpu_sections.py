"""The sections of results.md about the compiled CPU backend."""

from typing import Any

from plots import link, place, share_of_the_limit, time_by_context
from tables import left_out, pivot, table

NAMES = {"ours": "kvloom", "pages": "read of its pages"}


def layer(result: dict[str, Any]) -> str:
    """Sizes of the layer, and the machine."""
    return (
        f"{result['query_heads']} query heads over {result['heads']} of {result['head_dim']}, random pages "
        f"of {result['page']}, layout `{result['layout']}`, {result['isa']}"
    )


def movement_section(result: dict[str, Any]) -> str:
    """Store, load and copy against memory."""
    parts = [
        f"Share of the speed of the fastest copy of the same bytes: {result['heads']} heads of "
        f"{result['head_dim']} in random pages of {result['page']}, {result['isa']}, {result['threads']} "
        "threads; medians of pairs. Quantized from and to bfloat16; copies count the bytes as stored. The "
        "last columns are how many times a store's time `index_copy_` takes for the same tokens, into rows "
        "that stay unquantized, and a store of smoothed keys."
    ]
    for tokens in dict.fromkeys(row["tokens"] for row in result["rows"]):
        rows = [
            [
                row["kind"],
                row["layout"],
                *(f"{row[x]:.0%}" for x in ("store_ratio", "load_ratio", "copy_ratio")),
                f"{row['index_copy_over_store']:.2f}",
                f"{row['smoothed_over_not']:.2f}" if "smoothed_over_not" in row else "",
            ]
            for row in result["rows"]
            if row["tokens"] == tokens
        ]
        parts += [
            f"{tokens:,} tokens:",
            table(["cache", "layout", "store", "load", "copy", "index_copy_", "smoothed store"], rows),
        ]
    calls = ", ".join(f"{name} {us:.1f}" for name, us in result["call_us"].items())
    return "\n\n".join((*parts, f"Microseconds of a whole call for one token: {calls}."))


def peers_table(result: dict[str, Any], names: list[str], cell: str, form: str) -> str:
    """One row for each row of the result, one column for each contender; empty where it has no such cache."""
    return table(
        ["", *(NAMES.get(name, name) for name in names)],
        (
            [row["name"], *(format(row[cell][name], form) if name in row[cell] else "" for name in names)]
            for row in result["rows"]
        ),
    )


def attend_cpu_section(result: dict[str, Any]) -> str:
    """Attention against memory and against its peers."""
    for row in result["rows"]:
        row["size"] = f"{row['batch']} x {row['context']:,}"
        row["name"] = f"{row['kind']}, {row['size']}"
    peers = result["peers"]
    parts = [
        f"A decode step of one layer: {layer(result)}, threads: {result['threads']}. By kind of cache, "
        "sequences and tokens of context, medians of rounds. Queries over codes are bfloat16. torch and "
        "zentorch have no cache of codes and read bfloat16 there; both take the query heads of a group for "
        "new tokens, but for the column `enable_gqa`. llama.cpp's codes are q8_0 and q4_0, in groups of 32. "
        "Empty where a peer has no such cache."
        f"{left_out(result)}",
        "Share of the speed of a read of the bytes that kvloom stores, one after the other. *Read of its "
        "pages*: the same bytes page by page in random order, and nothing computed.",
        peers_table(result, ["ours", "pages", *peers], "of_read_speed", ".0%"),
        "Share of the speed of that read of its pages:",
        pivot(result["rows"], "kind", "size", "of_pages_speed", ".0%"),
        "How many times kvloom's time a peer takes:",
        peers_table(result, peers, "peer_over_ours", ".2f"),
    ]
    share, context = place("attend_cpu_share.svg"), place("attend_cpu_context.svg")
    parts += [link("share of the limit", share)] * share_of_the_limit(result, share)
    parts += [link("time by context", context)] * time_by_context(result, context)
    return "\n\n".join(parts)


def prefill_cpu_section(result: dict[str, Any]) -> str:
    """Prompts against matrix products and against its peers."""
    for row in result["rows"]:
        row["name"] = row["kind"]
    names = ["ours", *result["peers"]]
    return "\n\n".join((
        f"A prompt of {result['rows'][0]['tokens']:,} tokens, causal, one layer: {layer(result)}, threads: "
        f"{result['threads']}. GFLOP/s of the pairs that are seen; ONNX Runtime and OpenVINO store the "
        f"tokens as well. Empty where a peer has no such cache.{left_out(result)}",
        peers_table(result, [*names, "matmul"], "gflops", ".0f"),
        "Share of the speed of torch's matrix product of 2,048 x 2,048 (for float16, of float32):",
        peers_table(result, names, "of_matmul", ".0%"),
    ))  # fmt: skip


def vllm_cpu_section(result: dict[str, Any]) -> str:
    """Attention beside vLLM's kernel."""
    (peer,) = result["peers"]
    names = [name for name in result["rows"][0]["us"] if name != peer]

    def cells(row: dict[str, Any]) -> list[str]:
        times = {name: f"{us:,.0f}" for name, us in row["us"].items()}
        shares = {name: f" ({share:.2f})" for name, share in row.get("of_vllm", {}).items()}
        return [times.get(peer, ""), *(times[name] + shares.get(name, "") for name in names)]

    return (
        "Microseconds of one layer by sequences x tokens of context, and of a causal prompt, and in brackets "
        f"as a multiple of {peer}'s over bfloat16: {layer(result)}. Processor time of one thread, queries in "
        f"bfloat16, medians of {result['rounds']} rounds that time all in turn.{left_out(result)}\n\n"
        + table(
            ["", f"{peer} bfloat16", *(f"kvloom {name}" for name in names)],
            ([row["case"], *cells(row)] for row in result["rows"]),
        )
    )


def threads_cpu_section(result: dict[str, Any]) -> str:
    """Section on the gain of a second thread."""
    one, two = map(str, result["threads"])
    for row in result["rows"]:
        row["us"] = f"{row['us'][one]:,.0f} / {row['us'][two]:,.0f} ({row['speedup']:.2f}x)"
    return (
        f"Microseconds by one thread and by two, with {result['context']} tokens that stay in the "
        f"processor's caches: {layer(result)}. *Read*: of the bytes that are stored.\n\n"
        + pivot(result["rows"], "kind", "case", "us", "")
    )
