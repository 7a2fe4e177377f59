"""``kvloom plan``: whether a model and its cache will fit, and the bytes of each part."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvloom import terminal
from kvloom.core.arguments import parse_bytes
from kvloom.core.spelling import PACKS, STORAGE, expect_kv
from kvloom.graphics.plot_file import add_plot_option, write_plot
from kvloom.planning.verdict import verdict

if TYPE_CHECKING:
    from kvloom.planning.plan import Plan

_WIDTH: Final = 120
_PARTS: Final = ("weights", "packed", "cache", "scales", "states", "tables", "waste", "total")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom plan``."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="config.json or a GGUF file, or a folder with one",
    )
    parser.add_argument(
        "--kv", metavar="KIND[:gGROUP]", help=f"how the cache is kept: {', '.join(STORAGE)} (default: each)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of each sequence (default: the model's maximum)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="number of sequences, or of inputs with beams"
    )
    parser.add_argument("--beams", type=int, default=1, metavar="N", help="beams or samples of each input")
    parser.add_argument(
        "--encoder-tokens",
        type=int,
        metavar="N",
        help="tokens that the encoder makes of each input (default: the model's maximum)",
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="bytes after prompts of one forward, not the maximum over forwards of any size",
    )
    parser.add_argument(
        "--pack",
        choices=tuple(PACKS),
        default="no",
        help="packed weights of linear layers, as serve's --pack",
    )
    parser.add_argument(
        "--weights",
        metavar="BYTES",
        help="bytes of the weights, such as 5.7GB, if not those that the configuration says",
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help="also print how much fits in this size, such as 24GB or 24GiB"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_plot_option(parser, "bytes by length of the texts")


def print_plans(args: argparse.Namespace) -> None:
    """Print the plans that the options ask for."""
    if args.kv is not None:
        expect_kv("--kv", args.kv)
    memory = None if args.memory is None else parse_bytes("--memory", args.memory)
    weights = None if args.weights is None else parse_bytes("--weights", args.weights)
    with terminal.waiting("making the model without its weights"):
        from kvloom.planning.making import read_config
        from kvloom.planning.model import ModelShape
        from kvloom.planning.plan import kinds_for, plan

        shape = ModelShape.of(read_config(args.model), weights)
    kinds = kinds_for(shape) if args.kv is None else [args.kv]
    plans = [
        plan(
            shape,
            kv,
            context=args.context,
            batch=args.batch,
            page_size=args.page_size,
            pack=PACKS[args.pack],
            at_once=args.at_once,
            encoder_tokens=args.encoder_tokens,
            beams=args.beams,
        )
        for kv in terminal.tracked(kinds, "kinds of caches")
    ]
    if args.json:
        json.dump([_as_json(x, memory) for x in plans], sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(plans, memory)
    if args.plot is not None:
        from kvloom.planning.chart import chart

        write_plot(args.plot, chart(plans, memory))


def _as_json(plan: "Plan", memory: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(plan, name)
        for name in ("kv", "context", "batch", "beams", "encoder_tokens", "page_size", *_PARTS)
    }
    found |= {"state_page": plan.state_page, "state_tokens": plan.state_tokens}
    found["layers"] = [
        {"kind": x.kind} | {name: getattr(x, name) for name in ("cache", "scales", "states", "waste")}
        for x in plan.layers
    ]
    if memory is not None:
        found |= {
            "memory": memory,
            "fits": plan.total <= memory,
            "longest_context": plan.longest_context(memory),
            "largest_batch": plan.largest_batch(memory),
        }
    return found


def _print(plans: list["Plan"], memory: int | None) -> None:
    first, console = plans[0], terminal.console(_WIDTH)  # numbers must not be cut
    parts = [part for part in _PARTS[1:] if any(getattr(x, part) for x in plans)]
    beams = "" if first.beams == 1 else f" x {first.beams} beams"
    read = f" and {first.batch} x {first.encoder_tokens:,} of the encoder" if first.encoder_tokens else ""
    console.print(
        f"weights of {first.weights:,} bytes; {first.batch}{beams} x {first.context:,} tokens{read} in pages "
        f"of {first.page_size}:"
    )
    table = terminal.table("kv", *parts, *(() if memory is None else ("longest", "batch")))
    for x in plans:
        row = [f"{getattr(x, part):,}" for part in parts]
        if memory is not None:
            row += [
                "any" if n is None else f"{n:,}" for n in (x.longest_context(memory), x.largest_batch(memory))
            ]
        table.add_row(x.kv, *row)
    console.print(table)
    names = ("cache", "scales", "states", "waste", "total")
    layers = terminal.table("layers", *names)
    for kind, (count, total) in first.by_kind().items():
        layers.add_row(f"{count} {kind}", *(f"{getattr(total, name):,}" for name in names))
    console.print(f"by kind of layer, kv {first.kv}:")
    console.print(layers)
    if first.state_page:
        console.print(
            f"a KVPool keeps the states after a text in {first.state_page:,} bytes of its max_state_bytes, "
            f"as many as {first.state_tokens:,} tokens take; {first.batch} texts take "
            f"{first.batch * first.state_page:,} bytes of states and {first.cache + first.scales:,} bytes of "
            f"pages for {first.batch * first.context:,} tokens"
        )
    if memory is not None:
        console.print(
            f"fit in {memory:,} bytes: longest, tokens of each of {first.batch}{beams}; batch, "
            f"{'sequences' if not (beams or read) else f'inputs{beams}'} of {first.context:,} tokens"
        )
        console.print(verdict(plans, memory))
