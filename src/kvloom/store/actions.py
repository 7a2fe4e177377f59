"""Actions of ``kvloom store``, one function each."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from kvloom import terminal
from kvloom.core.arguments import expect_options, parse_bytes
from kvloom.errors import ArgumentError
from kvloom.store import survey
from kvloom.store.backends import Backend, Stored, connect, expect_own, store_url
from kvloom.store.format import Run
from kvloom.store.names import ObjectKind, kind_of
from kvloom.store.sums import read_sums
from kvloom.store.survey import Surveyed, look_at, runs_of
from kvloom.store.tiers.limits import evict, evictions, too_many

_TIMEOUT = 30.0
_SHOWN = 29
"""Number of first characters of a name that identify a run, which ``show`` accepts for the whole."""


def ls(args: argparse.Namespace) -> None:
    """List all runs."""
    sums = read_sums(args.key_file)
    backend, objects = _opened(args)
    found = [look_at(backend, x, sums) for x in terminal.tracked(runs_of(objects), "runs")]
    if args.json:
        _print_lines(_described(x) for x in found)
        return
    headings = "name", "tokens", "page", "kept as", "bytes", "unused", "problem"
    table = terminal.table(*headings, texts=[x for x in headings if x not in ("page", "bytes")])
    for x in found:
        run = x.run
        table.add_row(
            x.stored.name[:_SHOWN],
            "" if run is None else f"{run.first}-{run.end}",
            "" if run is None else str(run.page_size),
            "" if run is None else _kept(run),
            f"{x.stored.size:,}",
            _age(x.stored),
            x.problem,
        )
    total = sum(x.stored.size for x in found)
    terminal.console().print(table)
    sys.stdout.write(f"{len(found)} runs, {total:,} bytes\n")


def show(args: argparse.Namespace) -> None:
    """Print all fields of one run."""
    backend, objects = _opened(args)
    named = [x for x in runs_of(objects) if x.name.startswith(args.name)]
    if len(named) != 1:
        raise ArgumentError(
            f"NAME must be the beginning of one run's name, got {args.name!r}, with which {len(named)} begin"
        )
    described = _described(look_at(backend, named[0], read_sums(args.key_file), is_thorough=True))
    if args.json:
        _print_lines([described])
        return
    for name, value in described.items():
        for inner, part in value.items() if isinstance(value, dict) else [("", value)]:
            sys.stdout.write(f"{f'{name} {inner}'.strip():24}{part}\n")


def verify(args: argparse.Namespace) -> None:
    """Read everything; exit with 1 if something is damaged."""
    backend, objects = _opened(args)
    sums = read_sums(args.key_file)
    here = [x for x in runs_of(objects) if kind_of(x.name) is ObjectKind.RUN]
    found = [look_at(backend, x, sums, is_thorough=True) for x in terminal.tracked(here, "runs")]
    damaged = [x for x in found if x.problem]
    if args.json:
        _print_lines({"name": x.stored.name, "problem": x.problem} for x in found)
    else:
        for x in damaged:
            sys.stdout.write(f"{x.stored.name}: {x.problem}\n")
        sys.stdout.write(f"{len(found) - len(damaged)} of {len(found)} runs are whole\n")
    if damaged:
        sys.exit(1)


def gc(args: argparse.Namespace) -> None:
    """Remove objects until limits hold."""
    expect_options(args, 0, "max_age")
    limit = None if args.max_bytes is None else parse_bytes("--max-bytes", args.max_bytes)
    expect_own(store_url(args.store))
    backend, objects = _opened(args)
    sums, lasting = read_sums(args.key_file), set[Stored]()
    seconds = None if args.max_age is None else 86400 * args.max_age
    gone: list[Stored] = []
    while victims := too_many(objects, time.time(), limit, seconds):
        marks = []
        for x in terminal.tracked(victims, "runs"):
            is_gone, mark = evict(backend, x, time.time(), sums)
            marks += [] if mark is None else [mark]
            if is_gone:
                gone += runs_of([x])
            else:
                lasting.add(x)
        objects = [*(set(objects) - set(victims)), *marks]
    for x in sorted(lasting):
        sys.stderr.write(f"{x.name} is left: it cannot be read as a run of this format, or not removed\n")
    if args.json:
        _print_lines({"name": x.name, "size": x.size} for x in gone)
    else:
        freed, kept = sum(x.size for x in gone), len(runs_of([*objects, *lasting]))
        sys.stdout.write(f"{len(gone)} runs removed, {freed:,} bytes; {kept} runs kept\n")


def why(args: argparse.Namespace) -> None:
    """Print for each page of a prompt why it is found or not."""
    expect_options(args, 1, "page_size")
    backend, objects = _opened(args)
    fingerprint, tokens = args.ask(args)
    sums = read_sums(args.key_file)
    found = [look_at(backend, x, sums) for x in terminal.tracked(runs_of(objects), "runs")]
    evicted = evictions(backend, objects, sums.folder(fingerprint.digest))
    verdicts = list(survey.verdicts_on(found, evicted, fingerprint, args.salt, tokens, args.page_size))
    if args.json:
        for x in verdicts:
            page = {"first": x.tokens.start, "end": x.tokens.stop, "found": x.is_found, "reason": x.reason}
            _print_lines([page])
        return
    table = terminal.table("tokens", "found", "why", texts=("tokens", "found", "why"))
    for x in verdicts:
        table.add_row(f"{x.tokens.start}-{x.tokens.stop}", "hit" if x.is_found else "miss", x.reason)
    hits = sum(x.is_found for x in verdicts)
    terminal.console().print(table)
    sys.stdout.write(f"{hits} of {len(verdicts)} pages are found\n")


def _opened(args: argparse.Namespace) -> tuple[Backend, list[Stored]]:
    backend = connect(store_url(args.store), _TIMEOUT, create=False)
    return backend, sorted(x for x in backend.list_stored() if kind_of(x.name) is not None)


def _described(x: Surveyed) -> dict[str, Any]:
    """All fields of a run."""
    described: dict[str, Any] = {"name": x.stored.name, "size": x.stored.size, "used": x.stored.used}
    if x.problem:
        described["problem"] = x.problem
    if x.run is not None:
        described |= {
            "first": x.run.first,
            "end": x.run.end,
            "page_size": x.run.page_size,
            "num_pages": x.run.num_pages,
            "text": "digests" if x.run.tokens is None else "tokens",
            "salt": x.run.salt.hex(),
            "before": x.run.before.hex(),
            "fingerprint": json.loads(x.run.fingerprint.to_json()),
        }
    return described


def _kept(run: Run) -> str:
    """Format of the first layer's keys and, if they differ, values."""
    layer = run.fingerprint.layers[0]
    return " ".join(dict.fromkeys(side.kind for side in layer.sides))


def _age(x: Stored) -> str:
    seconds = max(time.time() - x.used, 0)
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"


def _print_lines(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        sys.stdout.write(f"{json.dumps(row)}\n")
