"""Run every benchmark; write the figures to ``results.md`` and the README's table. Nothing is typed."""

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
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


def kinds_table(result: dict[str, Any]) -> str:
    """The table of cache kinds in Markdown."""
    stock = result["kinds"][0]
    lines = [
        "| cache | bytes/token | speed | same tokens | same choices | mean KL, nats | held-out loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["kinds"]:
        ratio = stock["nbytes_per_token"] / row["nbytes_per_token"]
        lines.append(
            f"| {row['kind'] if row is stock else 'kvloom ' + row['kind']} | {row['nbytes_per_token']:,.0f}"
            f"{f' ({ratio:.2f}x less)' if ratio > 1 else ''} | {row['speed_vs_stock']:.2f}x "
            f"| {row['num_same']} of {row['num_tokens']} | {row['num_agreed'] / row['num_tokens']:.1%} "
            f"| {row['mean_kl']:.1e} | {row['heldout_loss']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, write both files."""
    where = machine()
    kinds, dispatch, sharing = measure("cache_kinds"), measure("dispatch"), measure("sharing")
    movement = measure("movement")
    table = kinds_table(kinds)
    note = (
        f"The bundled model on {kinds['prompts']} held-out prompts: greedy tokens before the first that "
        "differs; choices of the next token and KL where both are fed the same tokens. Loss on "
        f"{kinds['loss_tokens']:,} held-out tokens. Groups of 64, float16 scales. {where}."
    )
    ops = "\n".join(
        f"| {name} | {row['public_us']:.1f} | {row['raw_us']:.1f} | {row['overhead_us']:.1f} |"
        for name, row in dispatch["ops"].items()
    )
    shared = "\n".join(
        f"| {row['case']} | {row['num_tokens']:,} | {row['stock_ms']:.2f} | {row['kvloom_ms']:.2f} "
        f"| {row['ratio']:.0f}x |"
        for row in sharing["rows"]
    )
    moved = "\n".join(
        f"| {row['kind']} | {row['layout']} | {row['store_ratio']:.0%} | {row['load_ratio']:.0%} "
        f"| {row['copy_ratio']:.0%} |"
        for row in movement["rows"]
    )
    calls = ", ".join(f"{name} {us:.1f}" for name, us in movement["call_us"].items())
    (HERE / "results.md").write_text(
        f"# Results\n\nWritten by `make bench` on {where}.\n\n## Cache kinds\n\n{table}\n\n{note}\n\n"
        "## Sharing pages\n\nMilliseconds, DynamicCache and KVCache with the same tokens of a 4-layer model "
        "with 8 heads of 64 in float32; the ratio is the median of pairs.\n\n"
        f"| | tokens | DynamicCache | kvloom | ratio |\n|---|---|---|---|---|\n{shared}\n\n"
        f"## Moving keys and values\n\nShare of the speed of the fastest copy of the same bytes, "
        f"{movement['tokens']:,} tokens of {movement['heads']} heads of {movement['head_dim']} in random "
        f"pages of {movement['page']}, {movement['isa']}, {movement['threads']} threads; medians of pairs. "
        "Quantised from and to bfloat16; copies count the bytes as stored.\n\n"
        f"| cache | layout | store | load | copy |\n|---|---|---|---|---|\n{moved}\n\n"
        f"Microseconds of a whole call for one token: {calls}.\n\n"
        "## Cost of a dispatched call\n\nMicroseconds of a decode step of one token, 8 heads of 64, "
        "64 stored.\n\n"
        "| operator | public call | dispatched operator alone | checks |\n|---|---|---|---|\n"
        f"{ops}\n",
        encoding="utf-8",
    )
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table}\n\n{note}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
