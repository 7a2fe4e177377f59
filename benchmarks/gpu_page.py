"""Writes ``gpu_results.md`` from the figures of ``gpu.py``. Nothing on that page is typed."""

from typing import Any

WHATS = ("decode", "append", "prefill", "chunk", "latents")
PARTS = {
    "step": "steps of a whole model",
    "graph": "steps in a CUDA graph, of 8 layers",
    "shared": "sessions of prompts that share 512 tokens",
    "apart": "sessions of prompts that share nothing",
}
"""Parts of ``gpu_model.py``."""
PEERS = ("sdpa", "in_place", "flex_attention", "flashinfer")
HEAD = ("model", "cache", "batch", "context", "us", "of copy bandwidth", "TFLOP/s", "bf16 / this", *PEERS)


PARTS_BY_NAME = {said: what for what, said in PARTS.items()}
OF_PARTS = ("cache", "rows or requests", "tokens before", "ms", "over stock", "most bytes / DynamicCache's")


def page(results: list[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Figures on a GPU",
        "",
        "Made by `make bench-gpu`. Times are of CUDA graphs over memory that no cache holds, those of",
        "prompts and chunks of queued calls. `bf16 / this` is the time of our own bf16 cache over that of",
        "the row; peers are their time over ours, above 1 where ours is shorter. `in_place` is our kernel",
        "that reads pages; rows of `prefill` without it are of that kernel, from before prompts were",
        "gathered for torch's attention. FlashInfer has a figure where it is installed.",
        "",
        "A whole model (`make bench-gpu ARGS=model`) has Llama-3-8B's geometry and random weights in",
        "bfloat16. Stock is DynamicCache with sdpa, StaticCache in a graph, or `generate_batch`, all of",
        "transformers; a session's milliseconds are of a new token, prompts included.",
    ]
    measured = {row["what"] for result in results for row in result["rows"]}
    if missing := [x for x in (*WHATS, *PARTS.values()) if PARTS_BY_NAME.get(x, x) not in measured]:
        lines += ["", f"No device has measured these yet: {', '.join(missing)}."]
    for result in results:
        lines += ["", *_of_device(result)]
    return "\n".join(lines) + "\n"


def _of_device(result: dict[str, Any]) -> list[str]:
    checks = "; ".join(f"{name}: {said}" for name, said in result["checks"].items()) or "not run"
    versions = ", ".join(f"{x} {result[x]}" for x in ("torch", "triton", "transformers") if x in result)
    said = f"{versions}."
    if "copy_gb_per_s" in result:
        said += f" It copies {result['copy_gb_per_s']:,.1f} GB/s, read and written. Checks before: {checks}."
    lines = [f"## {result['device']}, {result['date']}", "", said]
    for what in WHATS:
        rows = [row for row in result["rows"] if row["what"] == what]
        if rows:
            lines += ["", f"### {what}", "", _line(HEAD), _line(["---"] * len(HEAD))]
            lines += [_line(_cells(row, rows)) for row in rows]
            lines += [f"\n{name} did not run everywhere: {why}." for name, why in _failures(rows)]
    for what, title in PARTS.items():
        rows = [row for row in result["rows"] if row["what"] == what]
        if rows:
            lines += ["", f"### {title}", "", _line(OF_PARTS), _line(["---"] * len(OF_PARTS))]
            lines += [_line(_cells_of_part(row)) for row in rows]
    return lines


def _cells_of_part(row: dict[str, Any]) -> list[str]:
    ms = f"{row['ms']:,.3f}" if "ms" in row else row["why_not"]
    more = [f"{row[x]:.2f}" if x in row else "" for x in ("ratio", "peak")]
    return [row["kind"], str(row["batch"]), str(row["context"]), ms, *more]


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    same = [
        x for x in rows if x["kind"] == "bf16" and all(x[k] == row[k] for k in ("model", "batch", "context"))
    ]
    ours = row["kvloom_us"]
    peers = [f"{row[f'{name}_us'] / ours:.2f}" if f"{name}_us" in row else "" for name in PEERS]
    return [
        row["model"],
        row["kind"],
        str(row["batch"]),
        str(row["context"]),
        f"{ours:,.1f}",
        f"{row['of_copy_bandwidth']:.0%}",
        f"{row['tflops']:,.1f}",
        f"{same[0]['kvloom_us'] / ours:.2f}" if same else "",
        *peers,
    ]


def _failures(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Peers that stopped with an error, and what they said, each once."""
    found = [(name, row[f"{name}_why_not"]) for name in PEERS for row in rows if f"{name}_why_not" in row]
    return list(dict.fromkeys(found))


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
