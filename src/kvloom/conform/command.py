"""``kvloom conform``: lists, writes and runs vectors. Imports no torch before it runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from kvloom.core.arguments import expect_options
from kvloom.errors import ArgumentError


def add_conform(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``kvloom conform`` to its parser."""
    commands = parser.add_subparsers(required=True, metavar="command")

    listing = commands.add_parser("list", help="the dialects and how many vectors each has")
    listing.set_defaults(run=_list)

    mistakes = commands.add_parser("mistakes", help="the known mistakes that a failure is compared with")
    mistakes.set_defaults(run=_mistakes)

    described = commands.add_parser("describe", help="an operator: arguments, shapes, rules")
    described.add_argument("dialect", metavar="NAME", help="as list prints it")
    described.set_defaults(run=_describe)

    written = commands.add_parser("vectors", help="write vectors as safetensors with JSON manifests")
    written.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write into")
    written.add_argument("--dialect", action="append", metavar="NAME", help="these only")
    _add_seed(written)
    written.set_defaults(run=_vectors)

    run = commands.add_parser("run", help="run an implementation; exit status 1 if any vector fails")
    run.add_argument("target", metavar="TARGET", help="package.module:function, onnxruntime, "
                     "onnx.reference, model.onnx, library.so (custom operators), library.so:function, "
                     "command:PROGRAM ARGUMENTS")  # fmt: skip
    run.add_argument("--dialect", required=True, metavar="NAME", help="the operator, as list prints it")
    run.add_argument("--vector", action="append", metavar="NUMBER", type=int, help="these only")
    run.add_argument(
        "--only",
        metavar="NAME=VALUE,...",
        help="vectors whose attributes have these values, such as cache_layout=0,quant_bit=8",
    )
    run.add_argument("--vectors", type=Path, metavar="FOLDER", help="a set that `vectors` wrote")
    run.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="that one vector may take (default: 60)"
    )
    _add_seed(run)
    for kind in ("json", "junit", "html"):
        run.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write a report as {kind.upper()}")
    run.set_defaults(run=_run)


def _add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, metavar="N", help="of vectors that are made now, not published")
    parser.add_argument("--count", type=int, metavar="N", help="legal calls of each dialect")


def _dialect(name: str) -> str:
    from kvloom.conform.operators import OPERATORS

    if name not in OPERATORS:
        raise ArgumentError(f"--dialect must be one of {', '.join(OPERATORS)}, got {name!r}")
    return name


def _list(args: argparse.Namespace) -> None:
    import json

    from kvloom.conform.mistakes import MISTAKES
    from kvloom.conform.operators import OPERATORS
    from kvloom.conform.vectors import published

    folder = published()
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    counts = index["dialects"]
    for name in OPERATORS:
        sys.stdout.write(f"{name:50}{counts[name]['legal']:6} legal{counts[name]['refused']:5} refused\n")
    legal, refused = (sum(each[kind] for each in counts.values()) for kind in ("legal", "refused"))
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    sys.stdout.write(
        f"{len(counts)} dialects, {legal + refused:,} vectors, {refused} of them calls that must be refused, "
        f"{nbytes / 1e6:.1f} MB, version {index['version']}; "
        f"{len({m.name for m in MISTAKES})} known mistakes\n"
    )


def _mistakes(args: argparse.Namespace) -> None:
    from kvloom.conform.mistakes import MISTAKES

    for name, text in sorted({mistake.name: mistake.text for mistake in MISTAKES}.items()):
        sys.stdout.write(f"{name}: {text}\n")


def _describe(args: argparse.Namespace) -> None:
    from kvloom.conform.describe import COMPARED
    from kvloom.conform.operators import OPERATORS
    from kvloom.conform.vectors import argument_text

    operator = OPERATORS[_dialect(args.dialect)]
    sys.stdout.write(f"{operator.name}\n{operator.document}\n\n")
    for argument in operator.arguments:
        sys.stdout.write(f"  {argument.name:28}{argument_text(argument)}\n")
    for name in (*operator.outputs, *operator.updated):
        shape = f"[{operator.axes[name]}]" if name in operator.axes else "updated"
        asked = f", if {operator.asked_by[name]} is given" if name in operator.asked_by else ""
        sys.stdout.write(f"  -> {name:25}{shape}{asked}, compared {COMPARED[operator.how(name)]}\n")
    for rule in operator.rules:
        sys.stdout.write(f"  {rule.argument}: {rule.holds}\n")


def _vectors(args: argparse.Namespace) -> None:
    from kvloom.conform.operators import OPERATORS
    from kvloom.conform.vectors import SEED, write

    expect_options(args, 1, "count")
    names = [_dialect(name) for name in args.dialect or OPERATORS]
    index = write(args.folder, names, SEED if args.seed is None else args.seed, args.count)
    for name, each in index["dialects"].items():
        sys.stdout.write(f"{name:50}{each['legal']:6} legal{each['refused']:5} refused\n")


def _run(args: argparse.Namespace) -> int:
    from kvloom.conform import vectors
    from kvloom.conform.isolation import isolated
    from kvloom.conform.reports import as_html, as_json, as_junit, print_report, progress
    from kvloom.conform.running import run
    from kvloom.conform.targets import TIMEOUT

    expect_options(args, 1, "count")
    name = _dialect(args.dialect)
    made: list[Any]
    if args.seed is not None or args.count is not None:
        if args.vectors is not None:
            raise ArgumentError("--vectors must not be given with --seed or --count, which make vectors now")
        made = [*vectors.make(name, vectors.SEED if args.seed is None else args.seed, args.count)]
    else:
        made = [*vectors.read(args.vectors or vectors.published(), name)]
    if args.vector:
        made = [each for each in made if int(each.name.rpartition("/")[2]) in args.vector]
    if args.only is not None:
        made = vectors.having(made, name, args.only)
    timeout = TIMEOUT if args.timeout is None else args.timeout
    with isolated(args.target, timeout) as target, progress(name, len(made)) as tick:
        report = run(target, made, args.target, tick)
    print_report(report)
    for kind, text in (("json", as_json), ("junit", as_junit), ("html", as_html)):
        file = getattr(args, kind)
        if file is not None:
            file.write_text(text(report), encoding="utf-8")
    return 0 if report.passed else 1
