"""``kvloom simulate``: hit rates with other capacities and policies."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from kvloom import terminal
from kvloom.errors import ArgumentError
from kvloom.graphics.plot_file import add_plot_option, write_plot

if TYPE_CHECKING:
    from kvloom.simulation.replay import Hits
    from kvloom.simulation.trace import Request

Results: TypeAlias = "dict[ReplayCache, dict[int, Hits]]"
"""Hits by cache, then by capacity."""
States: TypeAlias = int | Literal["all"] | None
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


class ReplayCache(NamedTuple):
    """Cache to replay the requests through, at every capacity.

    Attributes:
        policy: Eviction policy of pages.
        below: Capacity of the store below, in tokens.
        states: Number of texts whose recurrent states are kept; ``None`` for a model without states.
    """

    policy: str
    below: int = 0
    states: "States" = None

    @property
    def name(self) -> str:
        """Name in rows and curves."""
        from kvloom.simulation.chart import spell

        name = f"{self.policy} + {spell(self.below)}" if self.below else self.policy
        if self.states is None:
            return name
        return f"{name}, {'all' if self.states == 'all' else spell(self.states)} states"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom simulate``."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines in Mooncake's format")
    parser.add_argument(
        "--capacity",
        default="1M,3M,10M",
        metavar="N,...",
        help="tokens that the cache holds (default: 1M,3M,10M)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME,...",
        help="eviction policies: lru, ours, fifo, lfu, slru, arc, s3-fifo, w-tinylfu, opt, or all (default: "
        "lru,opt); with --states lru and ours (default: lru)",
    )
    parser.add_argument(
        "--page-size", type=int, default=512, metavar="N",
        help="tokens in a page, a multiple or a divisor of the trace's block_size (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--below",
        default="0",
        metavar="N,...",
        help="tokens that a store below the cache holds, 0 for no store (default: 0)",
    )
    parser.add_argument(
        "--states",
        metavar="N,...",
        help="for a model with recurrent states: number of texts whose states are kept; a row with the "
        "states of all texts comes last",
    )
    parser.add_argument(
        "--state-interval", type=int, metavar="N",
        help="states are kept at multiples of so many tokens (default: 256, or the next multiple of a page)",
    )  # fmt: skip
    parser.add_argument(
        "--state-tokens",
        type=int,
        metavar="N",
        help="with --states and --below: number of tokens with as many bytes as the states after one text, "
        "which kvloom plan prints",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_plot_option(parser, "hit rates by capacity")


def parse_tokens(text: str, name: str = "capacity", unit: str = "tokens") -> int:
    """Parse a number of tokens: ``"3M"`` (3 * 10^6), ``"1.5k"`` or a plain number.

    Raises:
        ArgumentError: ``text`` is no number in this form.
    """
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)([kMG]?)", text)
    if found is None:
        raise ArgumentError(f"{name} must be a number of {unit} such as 500k or 3M, got {text!r}")
    return round(float(found[1]) * _UNITS[found[2]])


def print_hits(args: argparse.Namespace) -> None:
    """Replay the trace, and print what each cache found."""
    from kvloom.simulation.replay import POLICIES
    from kvloom.simulation.trace import read_trace

    capacities = [parse_tokens(text) for text in args.capacity.split(",")]
    stores = [parse_tokens(text, "below") for text in args.below.split(",")]
    names = args.policy or ("lru,opt" if args.states is None else "lru")
    policies = POLICIES if names == "all" else names.split(",")
    caches = [
        ReplayCache(policy, below, states)
        for policy in policies
        for below in stores
        for states in _states(args)
    ]
    for cache in caches:  # refuse bad arguments before work that takes seconds
        _replay([], min(capacities), cache, args)
    requests = list(terminal.counted(read_trace(args.trace), "requests read"))
    if not requests:
        raise ArgumentError(f"trace must have a request, got none in {str(args.trace)!r}")
    results: Results = {cache: {} for cache in caches}
    work = [(cache, capacity) for cache in caches for capacity in capacities]
    for cache, capacity in terminal.tracked(work, f"replays of {len(requests):,} requests"):
        results[cache][capacity] = _replay(requests, capacity, cache, args)
    if args.json:
        json.dump(_as_json(results, args.page_size, requests[0].block_size), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(results, args.page_size)
    if args.plot is not None:
        from kvloom.simulation.chart import chart

        write_plot(args.plot, chart({cache.name: hits for cache, hits in results.items()}))


def _states(args: argparse.Namespace) -> list[States]:
    """Numbers of texts whose states are kept, unlimited last; only ``None`` if states are not simulated."""
    if args.states is None:
        for name in ("state_interval", "state_tokens"):
            if (given := getattr(args, name)) is not None:
                raise ArgumentError(f"{name} must be given only with --states, got {given} without it")
        return [None]
    counts = [parse_tokens(text, "states", "texts") for text in args.states.split(",") if text != "all"]
    return [*counts, "all"]


def _replay(requests: "list[Request]", capacity: int, cache: ReplayCache, args: argparse.Namespace) -> "Hits":
    from kvloom.simulation.replay import replay
    from kvloom.simulation.states import replay_states

    policy, below, states = cache
    if states is None:
        return replay(requests, capacity, policy, page_size=args.page_size, below=below)
    return replay_states(
        requests,
        capacity,
        policy,
        page_size=args.page_size,
        max_states=None if states == "all" else states,
        state_interval=args.state_interval,
        below=below,
        state_tokens=args.state_tokens,
    )


def _as_json(results: Results, page_size: int, block_size: int) -> list[dict[str, object]]:
    return [
        {
            "policy": cache.policy,
            "capacity": capacity,
            "page_size": page_size,
            "block_size": block_size,
            "below": cache.below,
            "blocks": x.blocks,
            "tokens": x.tokens,
            "blocks_below": x.blocks_below,
            "tokens_below": x.tokens_below,
            "block_rate": x.block_rate,
            "token_rate": x.token_rate,
        }
        | ({} if cache.states is None else _states_as_json(cache.states, x))
        for cache, hits in results.items()
        for capacity, x in hits.items()
    ]


def _states_as_json(states: States, x: "Hits") -> dict[str, object]:
    return {"states": states, "states_kept": x.states_kept, "states_evicted": x.states_evicted}


def _print(results: Results, page_size: int) -> None:
    from kvloom.simulation.chart import spell
    from kvloom.simulation.trace import BLOCK_TOKENS

    def print_table(cell: Callable[["Hits"], str]) -> None:
        table = terminal.table("policy", *map(spell, first))
        for cache, hits in results.items():
            table.add_row(cache.name, *map(cell, hits.values()))
        console.print(table)

    first = next(iter(results.values()))
    unit = "blocks" if page_size == BLOCK_TOKENS else f"pages of {page_size}"
    hits, longest = next(iter(first.values())), max(len(cache.name) for cache in results)
    console = terminal.console(4 + longest + 24 * len(first))  # numbers must not be cut
    console.print(
        f"{hits.blocks_asked:,} {unit} and {hits.tokens_asked:,} tokens of prompts; found, in % of the "
        f"{unit} / of the tokens, + found only in the store below:"
    )
    print_table(_cell)
    if any(cache.states for cache in results):
        console.print("texts whose states are kept at the end / were evicted:")
        print_table(lambda x: f"{x.states_kept:,} / {x.states_evicted:,}")


def _cell(x: "Hits") -> str:
    def share(found: int, below: int, asked: int) -> str:
        rate = f"{100 * found / max(asked, 1):.1f}"
        return f"{rate} + {100 * below / max(asked, 1):.1f}" if below else rate

    blocks = share(x.blocks, x.blocks_below, x.blocks_asked)
    return f"{blocks} / {share(x.tokens, x.tokens_below, x.tokens_asked)}"
