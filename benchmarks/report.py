"""Run every benchmark; write the figures to ``results.md`` and the README's table. Nothing is typed."""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results.md"
BEGIN, END = "<!-- table: cache kinds -->", "<!-- end -->"


def measure(name: str) -> dict[str, Any]:
    """The JSON line of one benchmark, run in a process of its own."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def machine() -> str:
    """Processor, cores, software and date."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next(
        (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor()
    )
    return (
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pivot(rows: list[dict[str, Any]], down: str, across: str, cell: str, form: str) -> str:
    """One row for each value of ``down``, one column for each of ``across``; empty where nothing was."""
    columns = list(dict.fromkeys(row[across] for row in rows))
    found = {(row[down], row[across]): format(row[cell], form) for row in rows}
    names = dict.fromkeys(row[down] for row in rows)
    return table(
        ["", *map(str, columns)],
        ([str(name), *(found.get((name, x), "") for x in columns)] for name in names),
    )


def left_out(result: dict[str, Any]) -> str:
    """Names the peers that were not installed."""
    missing = result.get("missing")
    return f" Not installed, so not measured: {', '.join(missing)}." if missing else ""


def kinds_section(result: dict[str, Any], where: str) -> str:
    """The table of cache kinds and what it means; also in the README."""
    stock = result["kinds"][0]
    head = ["cache", "bytes/token", "speed", "same tokens", "same choices", "mean KL, nats", "held-out loss"]
    rows = []
    for row in result["kinds"]:
        ratio = stock["nbytes_per_token"] / row["nbytes_per_token"]
        rows.append([
            row["kind"] if row is stock else f"kvloom {row['kind']}",
            f"{row['nbytes_per_token']:,.0f}" + (f" ({ratio:.2f}x less)" if ratio > 1 else ""),
            f"{row['speed_vs_stock']:.2f}x", f"{row['num_same']} of {row['num_tokens']}",
            f"{row['num_agreed'] / row['num_tokens']:.1%}", f"{row['mean_kl']:.1e}",
            f"{row['heldout_loss']:.4f}",
        ])  # fmt: skip
    return (
        f"{table(head, rows)}\n\nThe bundled model on {result['prompts']} held-out prompts: greedy tokens "
        "before the first that differs; choices of the next token and KL where both are fed the same tokens. "
        f"Loss on {result['loss_tokens']:,} held-out tokens. Groups of 64, float16 scales. {where}."
    )


def decode_section(result: dict[str, Any]) -> str:
    """Time of a decode step."""
    parts = [
        "Time of a decode step as a multiple of DynamicCache's in the same round (less is faster), by tokens "
        "of context: a 4-layer Llama in float32 with 8 query heads of 64, one thread. *In place*: "
        '`attn_implementation="kvloom"`; the others use scaled dot product attention. quanto and hqq with '
        f"their requantising spread over the steps between.{left_out(result)}"
    ]
    for heads in dict.fromkeys(row["kv_heads"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kv_heads"] == heads]
        for row in rows:
            row["ratio"] = row.get("ratio_amortised", row["ratio"])
        parts += [f"{heads} key/value heads:", pivot(rows, "contender", "context", "ratio", ".2f")]
    return "\n\n".join(parts)


def memory_section(result: dict[str, Any]) -> str:
    """Bytes held and at the peak."""
    rows = [
        [
            row["contender"] + (", `max_tokens`" * (row["max_tokens"] and "kvloom" in row["contender"])),
            *(f"{row[x] / 1e6:.1f}" for x in ("held", "peak", "peak_worst")),
            f"{row['held_ratio']:.2f}x", f"{row['peak_ratio']:.2f}x",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"Megabytes at {result['context']:,} tokens: between steps, at the peak of a step, and of the worst "
        f"of three; how many times less than DynamicCache.{left_out(result)}\n\n"
        + table(["cache", "held", "peak", "worst peak", "held less", "peak less"], rows)
    )


def quality_section(result: dict[str, Any]) -> str:
    """What quantisation costs in text."""
    rows = [
        [
            row["contender"], str(row["group"] or ""), str(row["unquantised"] or ""),
            f"{row['nbytes_per_token']:,.0f}", f"{row['perplexity']:.3f}", f"{row['mean_kl']:.1e}",
            f"{row['agreed']:.1%}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"The bundled model on {result['tokens']:,} tokens of held-out text, fed in pieces so that "
        "attention reads what the cache kept. *Raw*: newest tokens that a cache leaves unquantised."
        f"{left_out(result)}\n\n"
        + table(
            ["cache", "group", "raw", "bytes/token", "perplexity", "mean KL in nats", "same choices"], rows
        )
    )


def growth_section(result: dict[str, Any]) -> str:
    """The lesson of caching."""
    names = list(result["rows"][0]["saved"])
    rows = [[f"{row['length']:,}", *(f"{row['saved'][x]:.1f}x" for x in names)] for row in result["rows"]]
    return (
        "How many times cheaper the next token is than without a cache, which computes the whole text again, "
        f"by tokens of text.\n\n{table(['tokens', *names], rows)}\n\n![cost of the next token](growth.svg)"
    )


def sharing_section(result: dict[str, Any]) -> str:
    """Rows that move, and the beam step in which they do."""
    rows = [
        [
            row["case"], f"{row['num_tokens']:,}", f"{row['stock_ms']:.2f}", f"{row['kvloom_ms']:.2f}",
            f"{row['ratio']:.0f}x",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        "Milliseconds, DynamicCache and KVCache with the same tokens of a 4-layer model with 8 heads of "
        "64 in float32; the ratio is the median of pairs.\n\n"
        + table(["", "tokens", "DynamicCache", "kvloom", "ratio"], rows)
        + f"\n\nA step of beam search, 4 beams, as a multiple of DynamicCache's.{left_out(result)}\n\n"
        + pivot(result["beams"], "contender", "num_tokens", "ratio", ".2f")
    )


def prefix_section(result: dict[str, Any]) -> str:
    """Time to the first token."""
    rows = [
        [name, f"{row['first_token_ms']:.0f}", f"{row['times_faster']:.1f}x", f"{row['make_cache_us']:.0f}"]
        for name, row in result["contenders"].items()
    ]
    return (
        f"Milliseconds to the first token of a question of {result['question_tokens']} tokens behind a "
        f"system prompt of {result['prompt_tokens']:,}, and microseconds to make the cache or find the "
        f"prefix ({result['pages_of_the_prefix']} pages).\n\n"
        + table(["", "ms", "faster", "cache, us"], rows)
    )


def movement_section(result: dict[str, Any]) -> str:
    """Store, load and copy against memory."""
    rows = [
        [row["kind"], row["layout"], *(f"{row[x]:.0%}" for x in ("store_ratio", "load_ratio", "copy_ratio"))]
        for row in result["rows"]
    ]
    calls = ", ".join(f"{name} {us:.1f}" for name, us in result["call_us"].items())
    return (
        f"Share of the speed of the fastest copy of the same bytes: {result['tokens']:,} tokens of "
        f"{result['heads']} heads of {result['head_dim']} in random pages of {result['page']}, "
        f"{result['isa']}, {result['threads']} threads; medians of pairs. Quantised from and to bfloat16; "
        "copies count the bytes as stored.\n\n"
        + table(["cache", "layout", "store", "load", "copy"], rows)
        + f"\n\nMicroseconds of a whole call for one token: {calls}."
    )


def attend_cpu_section(result: dict[str, Any]) -> str:
    """Attention against memory and against torch's own."""
    rows = result["rows"]
    for row in rows:
        row["size"] = f"{row['batch']} x {row['context']:,}"
    return "\n\n".join((
        f"A decode step of one layer: {result['query_heads']} query heads over {result['heads']} of "
        f"{result['head_dim']}, random pages of {result['page']}, {result['isa']}, threads: "
        f"{result['threads']}. By sequences and tokens of context, medians of rounds. "
        "Queries over codes are bfloat16.",
        "Share of the speed of a read of the same bytes:",
        pivot(rows, "kind", "size", "of_read_speed", ".0%"),
        "How many times faster than torch's scaled dot product attention on contiguous keys and values of "
        "the query's dtype:",
        pivot(rows, "kind", "size", "torch_over_ours", ".2f"),
    ))  # fmt: skip


def dispatch_section(result: dict[str, Any]) -> str:
    """What a call costs before a kernel runs."""
    rows = [
        [name, *(f"{row[x]:.1f}" for x in ("public_us", "raw_us", "overhead_us"))]
        for name, row in result["ops"].items()
    ]
    return (
        "Microseconds of a decode step of one token, 8 heads of 64, 64 stored.\n\n"
        + table(["operator", "public call", "dispatched operator alone", "checks"], rows)
    )  # fmt: skip


def long_contexts(sections: dict[str, str]) -> str:
    """One sentence of the README out of three tables."""

    def cell(section: str, row: str, column: int = -1) -> str:
        line = next(x for x in sections[section].splitlines() if x.startswith(f"| {row} |"))
        return line.strip("| ").split(" | ")[column]

    steps, beams = (
        [cell(section, f"kvloom {kind} in place") for kind in ("float32", "int8")]
        for section in ("Decode", "Sharing pages")
    )
    peaks = [cell("Memory", f"kvloom {kind} in place, `max_tokens`") for kind in ("int8", "int4")]
    return (
        'At 8,192 tokens, with `attn_implementation="kvloom"`, a decode step takes '
        f"{steps[0]} of DynamicCache's time from a float32 cache and {steps[1]} from int8, a step of beam "
        f"search {beams[0]} and {beams[1]}; int8 peaks at {peaks[0]} less memory, int4 at {peaks[1]}: "
        "[all figures](benchmarks/results.md)."
    )


SECTIONS = {
    "decode": ("Decode", decode_section),
    "memory": ("Memory", memory_section),
    "quality": ("Quality", quality_section),
    "growth": ("What a cache is for", growth_section),
    "sharing": ("Sharing pages", sharing_section),
    "prefix": ("A known prefix", prefix_section),
    "movement": ("Moving keys and values", movement_section),
    "attend_cpu": ("Attention on the CPU", attend_cpu_section),
    "dispatch": ("Cost of a dispatched call", dispatch_section),
}


def main() -> None:
    """Measure, write both files. Named benchmarks replace their sections, the others stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help=f"of cache_kinds, {', '.join(SECTIONS)}; all if none")
    only = parser.parse_args().only or ["cache_kinds", *SECTIONS]
    where = machine()
    titles = {"Cache kinds": "cache_kinds"} | {title: name for name, (title, _) in SECTIONS.items()}
    parts = RESULTS.read_text(encoding="utf-8").split("\n## ")[1:] if RESULTS.exists() else []
    sections = {title: text for title, _, text in (part.partition("\n\n") for part in parts)}
    for title, name in titles.items():
        if name in only:
            result = measure(name)
            text = kinds_section(result, where) if name == "cache_kinds" else SECTIONS[name][1](result)
            sections[title] = text if name == "cache_kinds" else f"{text}\n\n{where}."
    body = "\n\n".join(f"## {x}\n\n{sections[x].strip()}" for x in titles if x in sections)
    RESULTS.write_text(f"# Results\n\nWritten by `make bench`.\n\n{body}\n", encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    block = f"{sections['Cache kinds'].strip()}\n\n{long_contexts(sections)}"
    README.write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
