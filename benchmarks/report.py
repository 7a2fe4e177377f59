"""Run every benchmark; write the figures to ``results.md`` and the README's table. Nothing is typed."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from cpu_sections import attend_cpu_section, movement_section, prefill_cpu_section, threads_cpu_section
from tables import cell, left_out, pivot, table

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results.md"
OURS = ("torch", "transformers")
QUANTIZED = (*OURS, "optimum-quanto", "hqq")
RUNTIMES = ("torch", "onnxruntime", "openvino", "zentorch")
BEGIN, END = "<!-- table: long contexts -->", "<!-- end -->"
INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
COLUMNS = 120


def measure(name: str) -> dict[str, Any]:
    """The JSON line of one benchmark, run in a process of its own."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def machine(packages: tuple[str, ...] = ()) -> str:
    """Processor with its widest instructions, cores, versions of ``packages``, date."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name", platform.processor())
    widest = [with_it for flag, with_it in INSTRUCTIONS.items() if flag in fields.get("flags", "").split()]
    name += f" with {widest[0]}" if widest else ""
    versions = [f"{package} {version}" for package in packages if (version := installed_version(package))]
    today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    return ", ".join((name, f"{os.cpu_count()} cores", *versions, today))


def installed_version(package: str) -> str | None:
    """``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def kinds_section(result: dict[str, Any]) -> str:
    """Short prompts, with either attention."""
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
        f"{table(head, rows)}\n\nThe bundled model on {result['prompts']} held-out prompts of "
        f"{result['prompt_tokens'][0]} to {result['prompt_tokens'][1]} tokens: greedy tokens "
        "before the first that differs; choices of the next token and KL where both are fed the same tokens. "
        f"Loss on {result['loss_tokens']:,} held-out tokens. Groups of 64, float16 scales. *In place*: "
        '`attn_implementation="kvloom"`; the others use scaled dot product attention.'
    )


def decode_section(result: dict[str, Any]) -> str:
    """Time of a decode step."""
    parts = [
        "Time of a decode step as a multiple of DynamicCache's in the same round (less is faster), by "
        "sequences x tokens of context: a 4-layer Llama in float32 with 8 query heads of 64. *In place*: "
        '`attn_implementation="kvloom"`, as `enable` sets it; the others use scaled dot product attention. '
        "quanto and hqq with their requantizing spread over the steps between. Medians of "
        f"{result['rounds']} rounds, three times as many up to 256 tokens.{left_out(result)}"
    ]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        row["ratio"] = row.get("ratio_amortised", row["ratio"])
        row["shape"] = f"{row['sequences']} x {row['context']:,}"
        threads = "one thread" if row["threads"] == 1 else f"{row['threads']} threads"
        tables.setdefault(f"{row['kv_heads']} key/value heads, {threads}:", []).append(row)
    for title, rows in tables.items():
        parts += [title, pivot(rows, "contender", "shape", "ratio", ".2f")]
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
    """The README's table and what it means, out of three sections."""
    decode, memory, kinds = sections["Decode"], sections["Memory"], sections["Cache kinds"]
    rows = []
    for name in ("DynamicCache", "StaticCache", "kvloom float32 in place", "kvloom int8 in place"):
        peak, less = cell(memory, name, "peak"), cell(memory, name, "peak less")
        rows.append([
            name.removesuffix(" in place"),
            *(f"{cell(decode, name, column)}x" for column in ("1 x 8,192", "8 x 8,192")),
            f"{peak} MB ({less} less)" if float(less.rstrip("x")) > 1 else f"{peak} MB",
            "" if name == "StaticCache" else cell(kinds, name, "same tokens"),
        ])  # fmt: skip
    ordinary = [cell(decode, f"kvloom {kind}", "1 x 8,192") for kind in ("float32", "int8")]
    short = [cell(decode, f"kvloom {kind} in place", "1 x 64") for kind in ("float32", "int8")]
    head = ["8,192 tokens", "step", "step of 8 sequences", "peak memory", "same tokens"]
    where = decode.strip().splitlines()[-1].split(", ")
    where = [x for x in where if x.split()[0] not in QUANTIZED or x.split()[0] in OURS]
    text = (
        "Time of a decode step behind 8,192 tokens as a multiple of DynamicCache's, and the most bytes alive "
        "in it: a 4-layer Llama with 8 heads of 64 in float32, one thread. *Same tokens*: greedy text of the "
        f"bundled model behind short prompts. At 64 tokens a step takes {short[0]}x with "
        f"float32 and {short[1]}x with int8. "
        f"With the model's own attention, behind 8,192, it takes {ordinary[0]}x with float32 and "
        f"{ordinary[1]}x with int8, which is dequantized in every step. {', '.join(where)} "
        "[All figures](benchmarks/results.md)."
    )
    wrapped = textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return f"{table(head, rows)}\n\n{wrapped}"


SECTIONS = {
    "cache_kinds": ("Cache kinds", kinds_section, OURS),
    "decode": ("Decode", decode_section, QUANTIZED),
    "generate": ("Generating", generate_section, QUANTIZED),
    "memory": ("Memory", memory_section, QUANTIZED),
    "quality": ("Quality", quality_section, QUANTIZED),
    "growth": ("What a cache is for", growth_section, OURS),
    "sharing": ("Sharing pages", sharing_section, QUANTIZED),
    "prefix": ("A known prefix", prefix_section, OURS),
    "movement": ("Moving keys and values", movement_section, ("torch",)),
    "attend_cpu": ("Attention on the CPU", attend_cpu_section, RUNTIMES),
    "prefill_cpu": ("Prompts on the CPU", prefill_cpu_section, RUNTIMES),
    "threads_cpu": ("A second thread", threads_cpu_section, ("torch",)),
    "dispatch": ("Cost of a dispatched call", dispatch_section, ("torch",)),
}
"""By benchmark: the title and the text of its section, and the packages that it runs."""


def main() -> None:
    """Measure, write both files. Named benchmarks replace their sections, the others stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none")
    only = parser.parse_args().only or [*SECTIONS]
    parts = RESULTS.read_text(encoding="utf-8").split("\n## ")[1:] if RESULTS.exists() else []
    sections = {title: text for title, _, text in (part.partition("\n\n") for part in parts)}
    for name in only:
        title, section, packages = SECTIONS[name]
        sections[title] = f"{section(measure(name))}\n\n{machine(packages)}."
    titles = [title for title, _, _ in SECTIONS.values()]
    body = "\n\n".join(f"## {x}\n\n{sections[x].strip()}" for x in titles if x in sections)
    RESULTS.write_text(f"# Results\n\nWritten by `make bench`.\n\n{body}\n", encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    block = long_contexts(sections)
    README.write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
