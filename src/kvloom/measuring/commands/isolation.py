"""``kvloom isolation``: test whether requests share only what they may. Imports no torch before it runs."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloom import terminal
from kvloom.core.spelling import expect_kv


def add_parser(commands: Any, load: Callable[[Path | None], tuple[Any, Any]]) -> argparse.ArgumentParser:
    """Add ``isolation`` to the commands, and return its parser.

    Args:
        commands: Result of ``add_subparsers``.
        load: Function that loads model and tokenizer of a folder, or the bundled ones.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "isolation", help="test that a model's prefixes are shared where they may be, and nowhere else"
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="local Hugging Face causal model folder")
    parser.add_argument("--kv", default="auto", metavar="KIND[:gGROUP]", help="how the cache is kept")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(load=load)
    return parser


def print_isolation(args: argparse.Namespace) -> int:
    """Run all tests, and print results; returns 1 if one fails."""
    expect_kv("--kv", args.kv)
    model, _ = args.load(args.model)
    from kvloom.integrations.transformers.isolation import check_isolation

    with terminal.waiting("asking for texts again, after changes of the model"):
        checks = check_isolation(model, args.kv)
    wrong = [x for x in checks if x.problem]
    if args.json:
        told = {"checks": [x._asdict() for x in checks], "is_isolated": not wrong}
        sys.stdout.write(f"{json.dumps(told, indent=1)}\n")
        return bool(wrong)
    title = "tokens that are found when a text is asked for again"
    headings = "what was done before", "expected", "found", "result"
    table = terminal.table(*headings, texts=(headings[0], headings[3]), title=title)
    for x in checks:
        table.add_row(
            x.name, str(x.expected), str(x.actual), x.problem or "ok", style="red" if x.problem else ""
        )
    console = terminal.console()
    console.print(table)
    console.print(f"{len(checks) - len(wrong)} of {len(checks)} tests passed")
    return bool(wrong)
