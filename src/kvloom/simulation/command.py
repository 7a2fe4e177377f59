"""``kvloom simulate``: what another capacity or policy would have found."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvloom.errors import ArgumentError

if TYPE_CHECKING:
    from kvloom.simulation.replay import Hits

_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom simulate``."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines in Mooncake's format")
    parser.add_argument(
        "--capacity", default="1M,3M,10M", metavar="N,...", help="tokens of cache (default: 1M,3M,10M)"
    )
    parser.add_argument(
        "--policy",
        default="lru,opt",
        metavar="NAME,...",
        help="lru, fifo, lfu, slru, arc, s3-fifo, w-tinylfu, opt, or all (default: lru,opt)",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot")


def parse_tokens(text: str) -> int:
    """Tokens that ``"3M"`` (3 * 10^6), ``"1.5k"`` or a plain number spells.

    Raises:
        ArgumentError: ``text`` spells none.
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    if found is None:
        raise ArgumentError(f"capacity must be tokens such as 500k or 3M, got {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])


def run(args: argparse.Namespace) -> None:
    """Replay the trace, and print what each cache found."""
    from kvloom.simulation.replay import POLICIES, replay
    from kvloom.simulation.trace import read_trace

    capacities = [parse_tokens(text) for text in args.capacity.split(",")]
    policies = POLICIES if args.policy == "all" else args.policy.split(",")
    for policy in policies:  # before work that takes seconds
        replay([], min(capacities), policy)
    requests = list(read_trace(args.trace))
    results = {
        policy: {capacity: replay(requests, capacity, policy) for capacity in capacities}
        for policy in policies
    }
    if args.json:
        json.dump(_as_json(results), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(results)
    if args.svg is not None:
        from kvloom.simulation.chart import chart

        args.svg.write_text(chart(results), encoding="utf-8")


def _as_json(results: dict[str, dict[int, "Hits"]]) -> list[dict[str, object]]:
    return [
        {
            "policy": policy,
            "capacity": capacity,
            "blocks": x.blocks,
            "tokens": x.tokens,
            "block_rate": x.block_rate,
            "token_rate": x.token_rate,
        }
        for policy, hits in results.items()
        for capacity, x in hits.items()
    ]


def _print(results: dict[str, dict[int, "Hits"]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvloom.simulation.chart import spell

    first = next(iter(results.values()))
    hits, console = next(iter(first.values())), Console()
    console.width = max(console.width, 16 + 14 * len(first))  # a number that is cut says nothing
    console.print(
        f"{hits.blocks_asked:,} blocks and {hits.tokens_asked:,} tokens of prompts; found, in % of the "
        "blocks / of the tokens:"
    )
    table = Table("policy")
    for capacity in first:
        table.add_column(spell(capacity), justify="right", no_wrap=True)
    for policy, by_capacity in results.items():
        rates = [(100 * x.block_rate, 100 * x.token_rate) for x in by_capacity.values()]
        table.add_row(policy, *(f"{blocks:.1f} / {tokens:.1f}" for blocks, tokens in rates))
    console.print(table)
