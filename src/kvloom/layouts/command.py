"""``kvloom layouts`` and ``kvloom convert``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloom import terminal


def add_layouts(commands: Any, named: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Add both to the commands.

    Args:
        commands: Result of ``add_subparsers``.
        named: Decorator whose errors name the options of ``convert``.
    """
    layouts = commands.add_parser("layouts", help="the named layouts: axes, owner, document and a picture")
    layouts.add_argument("names", nargs="*", metavar="NAME", help="only these")
    layouts.set_defaults(run=_print_layouts)

    convert = commands.add_parser("convert", help="a safetensors file of keys and values in another layout")
    convert.add_argument("source", type=Path, metavar="IN.safetensors", help="file to read")
    convert.add_argument("target", type=Path, metavar="OUT.safetensors", help="file to write")
    convert.add_argument(
        "--from", dest="source_layout", required=True, metavar="LAYOUT", help="of IN, name or axes"
    )
    convert.add_argument(
        "--to", dest="target_layout", required=True, metavar="LAYOUT", help="of OUT, name or axes"
    )
    convert.add_argument("--page-size", type=int, metavar="N", help="slots in a page (default: the source's)")
    convert.add_argument("--shards", type=int, default=1, metavar="N", help="parts of the heads, 1 to 8")
    convert.add_argument("--heads", type=int, metavar="N", help="of all shards, where IN merges H with D")
    convert.set_defaults(run=named(_convert))


def _print_layouts(args: argparse.Namespace) -> None:
    from kvloom.layouts import LAYOUTS, find_layout
    from kvloom.layouts.pictures import as_text

    for layout in [find_layout("NAME", name) for name in args.names] or LAYOUTS.values():
        said = ": ".join(word for word in (layout.owner, layout.document) if word)
        sys.stdout.write(f"{layout.name}  [{layout.axes}]\n  {said}\n{as_text(layout)}\n\n")


def _convert(args: argparse.Namespace) -> None:
    from kvloom.layouts import Placement, convert_file, find_layout

    layouts = [
        find_layout(f"--{x}", getattr(args, y))
        for x, y in (("from", "source_layout"), ("to", "target_layout"))
    ]
    placement = Placement(layouts[1], args.page_size, args.shards)
    with terminal.progress("layers") as tell:
        done = convert_file(args.source, args.target, layouts[0], placement, args.heads, tell)
    nbytes = sum(x.nbytes for x in done.tensors.values())
    sys.stdout.write(
        f"{len(done.views)} layers, {done.num_slots} slots, {done.heads} heads: {nbytes:,} bytes in "
        f"{len(done.tensors)} tensors [{layouts[1].axes}]\n"
    )
