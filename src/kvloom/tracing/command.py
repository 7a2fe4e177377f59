"""``kvloom trace record | replay`` and ``kvloom view``. Imports no optional library."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloom import terminal
from kvloom.simulation.command import parse_tokens


def add_parsers(commands: Any, record: Callable[[argparse.Namespace], None]) -> None:
    """Add ``trace`` and ``view`` to the commands.

    Args:
        commands: Result of ``add_subparsers``.
        record: Function that runs ``trace record``, which needs a model.
    """
    actions = commands.add_parser("trace", help="what happened to pages: record, replay").add_subparsers(
        required=True, metavar="action"
    )
    recording = actions.add_parser("record", help="continue prompts in one pool, and write its events")
    recording.add_argument("events", type=Path, metavar="EVENTS", help="file of JSON lines to write")
    recording.add_argument(
        "--prompt-file",
        type=Path,
        metavar="F",
        action="append",
        required=True,
        help="a text; may be repeated",
    )
    recording.add_argument(
        "--model", type=Path, metavar="PATH", help="local Hugging Face causal model folder"
    )
    recording.add_argument("--kv", default="auto", metavar="KIND[:gGROUP]", help="how the cache is kept")
    recording.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    recording.add_argument("--pages", type=int, default=256, metavar="N", help="of the pool")
    recording.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens to write")
    recording.add_argument("--no-text", action="store_true", help="write neither token ids nor text")
    recording.set_defaults(run=record)

    replaying = actions.add_parser("replay", help="its lookups once more: what is found, and why not")
    replaying.add_argument(
        "trace", type=Path, metavar="TRACE", help="what record wrote, or a trace in Mooncake's format"
    )
    replaying.add_argument("--capacity", metavar="N", help="tokens of cache (default: as recorded, or 3M)")
    replaying.add_argument("--events", type=Path, metavar="FILE", help="write the events of the replay")
    replaying.add_argument("--why", type=int, metavar="R", help="each missed page of request R")
    replaying.add_argument("--json", action="store_true", help="machine-readable output")
    replaying.set_defaults(run=_replay)

    view = commands.add_parser("view", help="a page that shows what happened to pages over time")
    view.add_argument("events", type=Path, metavar="EVENTS", help="what trace record wrote")
    view.add_argument("--out", type=Path, metavar="FILE", help="HTML to write (default: EVENTS.html)")
    view.set_defaults(run=_view)


def _replay(args: argparse.Namespace) -> None:
    from kvloom.errors import ArgumentError
    from kvloom.tracing.recording import causes_of, read_lines, requests_of
    from kvloom.tracing.replay import read_lookups, replay

    capacity = None if args.capacity is None else parse_tokens(args.capacity, "--capacity")
    _expect_another("--events", args.events, args.trace)
    lookups, page_size = read_lookups(args.trace)
    if capacity is not None:
        num_pages = -(-capacity // page_size)
        if capacity < page_size:
            raise ArgumentError(f"--capacity must be at least {page_size} tokens, got {capacity}")
    elif '"format"' in _first_line(args.trace):
        num_pages = max(
            (x["num_pages"] for x in read_lines(args.trace) if x.get("kind") == "grow"), default=1
        )
    else:
        num_pages = 3_000_000 // page_size
    events = replay(lookups, num_pages, page_size)
    if args.events is not None:
        events.save(args.events)
    requests = requests_of(events.lines(tokens=False))
    if args.why is not None:
        if args.why not in requests:
            raise ArgumentError(f"--why must be a request from 1 to {len(requests)}, got {args.why}")
        requests = {args.why: requests[args.why]}
        for place, miss in sorted(requests[args.why].misses.items()):
            _write_miss(place, miss, args.json)
        return
    causes = causes_of(requests.values())
    found = sum(x.found for x in requests.values())
    said: dict[str, Any] = {
        "requests": len(requests),
        "num_pages": num_pages,
        "asked": sum(len(x.nodes) for x in requests.values()),
        "found": found,
        "missed": sum(causes.values()),
        "causes": dict(causes.most_common()),
    }
    if args.json:
        sys.stdout.write(f"{json.dumps(said)}\n")
        return
    sys.stdout.write(
        f"{said['requests']:,} requests asked a pool of {num_pages:,} pages for {said['asked']:,}; "
        f"found {found:,} ({found / max(said['asked'], 1):.2%}), missed {said['missed']:,}:\n"
    )
    for cause, number in causes.most_common():
        sys.stdout.write(f"{number:>12,}  {cause}\n")


def _write_miss(place: int, miss: dict[str, Any], is_json: bool) -> None:
    from kvloom.paging import Miss

    if is_json:
        sys.stdout.write(f"{json.dumps({'page': place} | miss)}\n")
    else:
        sys.stdout.write(f"page {place}: {Miss(first=place, **miss)}\n")


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline()


def _expect_another(name: str, target: Path | None, source: Path) -> None:
    """Raise ArgumentError if the file to write is the one that was read, which would be lost."""
    from kvloom.errors import ArgumentError

    if target is not None and target.resolve() == source.resolve():
        raise ArgumentError(f"{name} must be another file than the one that is read, got {str(target)!r}")


def _view(args: argparse.Namespace) -> None:
    from kvloom.tracing.page import write_page
    from kvloom.tracing.recording import read_lines

    with terminal.waiting("making the page"):
        lines = read_lines(args.events)
        out = args.out or args.events.with_suffix(".html")
        _expect_another("--out", out, args.events)
        write_page(lines, out)
    sys.stdout.write(f"{out}\n")
