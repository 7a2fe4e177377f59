"""``kvloom simulate``: what another capacity or policy would have found."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from kvloom.errors import ArgumentError

if TYPE_CHECKING:
    from kvloom.simulation.replay import Hits

Results: TypeAlias = "dict[tuple[str, int], dict[int, Hits]]"
"""By policy and tokens of the store below, then by capacity."""
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
        help="lru, ours, fifo, lfu, slru, arc, s3-fifo, w-tinylfu, opt, or all (default: lru,opt)",
    )
    parser.add_argument(
        "--page-size", type=int, default=512, metavar="N",
        help="tokens in a page, a multiple or a divisor of the trace's 512 (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--below", default="0", metavar="N,...", help="tokens of a store below, 0 for none (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot")


def parse_tokens(text: str, name: str = "capacity") -> int:
    """Parse a number of tokens: ``"3M"`` (3 * 10^6), ``"1.5k"`` or a plain number.

    Raises:
        ArgumentError: ``text`` is no such number.
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    if found is None:
        raise ArgumentError(f"{name} must be tokens such as 500k or 3M, got {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])


def run(args: argparse.Namespace) -> None:
    """Replay the trace, and print what each cache found."""
    from kvloom.simulation.replay import POLICIES, replay
    from kvloom.simulation.trace import read_trace

    capacities = [parse_tokens(text) for text in args.capacity.split(",")]
    stores = [parse_tokens(text, "below") for text in args.below.split(",")]
    policies = POLICIES if args.policy == "all" else args.policy.split(",")
    for policy in policies:  # before work that takes seconds
        for below in stores:
            replay([], min(capacities), policy, page_size=args.page_size, below=below)
    requests = list(read_trace(args.trace))
    results: Results = {
        (policy, below): {
            capacity: replay(requests, capacity, policy, page_size=args.page_size, below=below)
            for capacity in capacities
        }
        for policy in policies
        for below in stores
    }
    if args.json:
        json.dump(_as_json(results, args.page_size), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(_named(results), args.page_size)
    if args.svg is not None:
        from kvloom.simulation.chart import chart

        args.svg.write_text(chart(_named(results)), encoding="utf-8")


def _named(results: Results) -> dict[str, dict[int, "Hits"]]:
    from kvloom.simulation.chart import spell

    return {
        f"{policy} + {spell(below)}" if below else policy: hits for (policy, below), hits in results.items()
    }


def _as_json(results: Results, page_size: int) -> list[dict[str, object]]:
    return [
        {
            "policy": policy,
            "capacity": capacity,
            "page_size": page_size,
            "below": below,
            "blocks": x.blocks,
            "tokens": x.tokens,
            "blocks_below": x.blocks_below,
            "tokens_below": x.tokens_below,
            "block_rate": x.block_rate,
            "token_rate": x.token_rate,
        }
        for (policy, below), hits in results.items()
        for capacity, x in hits.items()
    ]


def _print(results: dict[str, dict[int, "Hits"]], page_size: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvloom.simulation.chart import spell
    from kvloom.simulation.trace import BLOCK_TOKENS

    first = next(iter(results.values()))
    unit = "blocks" if page_size == BLOCK_TOKENS else f"pages of {page_size}"
    hits, console = next(iter(first.values())), Console()
    console.width = max(console.width, 24 + 24 * len(first))  # a number that is cut says nothing
    console.print(
        f"{hits.blocks_asked:,} {unit} and {hits.tokens_asked:,} tokens of prompts; found, in % of the "
        f"{unit} / of the tokens, + what is found below:"
    )
    table = Table("policy")
    for capacity in first:
        table.add_column(spell(capacity), justify="right", no_wrap=True)
    for policy, by_capacity in results.items():
        table.add_row(policy, *(_cell(x) for x in by_capacity.values()))
    console.print(table)


def _cell(x: "Hits") -> str:
    def share(found: int, below: int, asked: int) -> str:
        rate = f"{100 * found / max(asked, 1):.1f}"
        return f"{rate} + {100 * below / max(asked, 1):.1f}" if below else rate

    blocks = share(x.blocks, x.blocks_below, x.blocks_asked)
    return f"{blocks} / {share(x.tokens, x.tokens_below, x.tokens_asked)}"
