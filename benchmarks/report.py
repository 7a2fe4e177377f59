"""Run every benchmark; write the figures to ``results.md`` and the README's table. Nothing is typed."""

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cpu_sections import attend_cpu_section, movement_section, prefill_cpu_section, threads_cpu_section
from tables import left_out, pivot, table

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results.md"
PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq", "onnxruntime", "openvino", "zentorch")
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
    versions = [f"{package} {version}" for package in PACKAGES if (version := installed_version(package))]
    today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    return ", ".join((name, f"{torch.get_num_threads()} threads", *versions, today))


def installed_version(package: str) -> str | None:
    """``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        f"their requantizing spread over the steps between.{left_out(result)}"
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
    """What quantization costs in text."""
    rows = [
        [
            row["contender"], str(row["group"] or ""), str(row["unquantized"] or ""),
            f"{row['nbytes_per_token']:,.0f}", f"{row['perplexity']:.3f}", f"{row['mean_kl']:.1e}",
            f"{row['agreed']:.1%}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"The bundled model on {result['tokens']:,} tokens of held-out text, fed in pieces so that "
        "attention reads what the cache kept. *Raw*: newest tokens that a cache leaves unquantized."
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


def generate_section(result: dict[str, Any]) -> str:
    """Tokens a second of whole calls."""
    rows = [
        [
            row["contender"], f"{row['tokens_per_s']:.1f}", f"{row['speed']:.2f}x", f"{row['ratio']:.2f}x",
            f"{row['nbytes'] / 1e6:.1f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"`generate()` behind {result['context']:,} stored tokens: a 4-layer Llama in float32 with 8 heads "
        f"of 64, greedy, one sequence, threads: {result['threads']}. Speed as a multiple of DynamicCache's: "
        f"of all {result['rounds']} rounds of {result['new']} tokens, and the median of rounds; megabytes "
        f"that the cache holds.{left_out(result)}\n\n"
        + table(["cache", "tokens/s", "speed", "median round", "MB"], rows)
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
    "generate": ("Generating", generate_section),
    "memory": ("Memory", memory_section),
    "quality": ("Quality", quality_section),
    "growth": ("What a cache is for", growth_section),
    "sharing": ("Sharing pages", sharing_section),
    "prefix": ("A known prefix", prefix_section),
    "movement": ("Moving keys and values", movement_section),
    "attend_cpu": ("Attention on the CPU", attend_cpu_section),
    "prefill_cpu": ("Prompts on the CPU", prefill_cpu_section),
    "threads_cpu": ("A second thread", threads_cpu_section),
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
