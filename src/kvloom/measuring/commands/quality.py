"""``kvloom quality``: quality of kinds of caches. Imports no torch before it runs."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvloom import terminal
from kvloom.core.arguments import expect_least, expect_options, expect_within, read_text
from kvloom.core.spelling import expect_kv, is_plan
from kvloom.errors import ArgumentError
from kvloom.graphics.html import results_page
from kvloom.graphics.plot_file import add_html_option, add_plot_option, write_plot
from kvloom.measuring.key_statistics import STATISTICS, parse_statistics
from kvloom.measuring.texts import HELD_OUT, PACKAGES, texts_named
from kvloom.models import check_model_folder, iter_texts

if TYPE_CHECKING:
    from kvloom.measuring.quality import Peer, Quality

_KINDS: Final = ["float16", "int8", "int4"]
_NUM_TOKENS: Final = 4096
_WINDOW: Final = 512
_LONGEST: Final = "max"
_WIDTH: Final = 120
"""Columns of a table with an encoder's bytes and heads."""
_CALIBRATED: Final = 1024
"""Number of tokens to calibrate a plan."""
_PEERS: Final = (("quanto", 0), ("hqq", 1))
"""Quantization libraries of transformers, and the axis that its documentation recommends for each."""


def add_parser(commands: Any, load: Callable[[Path | None], tuple[Any, Any]]) -> argparse.ArgumentParser:
    """Add ``quality`` to the commands, and return its parser.

    Args:
        commands: Result of ``add_subparsers``.
        load: Function that loads model and tokenizer of a folder, or the bundled ones.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "quality", help="quality and bytes of kinds of caches, compared with DynamicCache"
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="local Hugging Face causal model folder")
    parser.add_argument("--text", default=HELD_OUT, metavar="TEXT",
                        help=f"text to read: a file, {HELD_OUT} (default), or {' or '.join(PACKAGES)} for "
                        "the source code of that package")  # fmt: skip
    parser.add_argument("--document", type=Path, metavar="FILE",
                        help="file that an encoder reads; --text is then the decoder's text")  # fmt: skip
    parser.add_argument("--kv", action="append", metavar="KIND[:gGROUP]",
                        help=f"kind of cache; may be repeated (default: {', '.join(_KINDS)})")  # fmt: skip
    parser.add_argument("--peers", action="store_true",
                        help="also measure transformers' int4 caches of quanto and hqq, if these are "
                        "installed")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=_NUM_TOKENS, metavar="N",
                        help=f"maximum number of tokens to read (default: {_NUM_TOKENS})")  # fmt: skip
    parser.add_argument("--window", type=_tokens, metavar="N",
                        help=f"tokens in each text; {_LONGEST} for as many as the model has positions "
                        f"(default: {_WINDOW}, or fewer if the model has fewer positions)")  # fmt: skip
    parser.add_argument("--after", type=int, metavar="N",
                        help="count only predictions after more than N tokens of a text (default: 0, or "
                        "with --decode half of a text)")  # fmt: skip
    parser.add_argument("--decode", action="store_true",
                        help="feed tokens as generation does: --after at once, then one by one")  # fmt: skip
    parser.add_argument("--keys", default="plain", metavar="KEYS[:N]",
                        help=f"change the model's keys to have statistics of real models: "
                        f"{', '.join(STATISTICS)} (biases:30: biases of 30 standard deviations; without "
                        "a number: 100)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--plan", type=Path, metavar="FILE.json",
                        help="choose bits for each layer, write them to it, and measure them")  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--bits", type=float, metavar="X", help="bits of an element that the plan may use, on average"
    )
    size.add_argument(
        "--budget", type=float, metavar="N", help="bytes of a token that it may use, instead of --bits"
    )
    parser.add_argument("--calibrate", type=Path, metavar="FILE",
                        help="text to choose the plan by (default: training text of the bundled "
                        "model)")  # fmt: skip
    add_plot_option(parser, "error by bytes of a token")
    add_html_option(parser)
    parser.set_defaults(load=load)
    return parser


def print_quality(args: argparse.Namespace) -> None:
    """Measure and print."""
    kinds = args.kv or _KINDS
    for kind in kinds:
        expect_kv("--kv", kind)
    _expect_plan(args)
    expect_options(args, 2, "tokens")
    statistics = parse_statistics("--keys", args.keys)
    if args.window != _LONGEST:
        window = _WINDOW if args.window is None else args.window
        expect_least("--window", window, 2)
        _expect_after(args.after, window)
    document = None if args.document is None else read_text("--document", args.document)
    texts = texts_named(args.text)
    if args.model is not None:
        check_model_folder(args.model)  # before imports that take seconds
    with terminal.waiting("importing torch and transformers"):
        from kvloom.measuring.changed_keys import changed_keys
        from kvloom.measuring.quality import quality

    model, tokenizer = args.load(args.model)
    window = _within_positions(model, args.window)
    if args.window is None and window < _WINDOW:
        sys.stderr.write(
            f"kvloom: --window is {window}, not {_WINDOW}, for the model has no more positions\n"
        )
    _expect_after(args.after, window)
    windows, inputs = _read(args, model, tokenizer, texts, window, document)
    prompt = min(windows.shape[1] // 2, windows.shape[1] - 2) if args.decode else 0
    after = prompt if args.after is None else args.after
    with changed_keys(model, statistics), terminal.bar() as bar:
        if args.plan is not None:
            _save_plan(args, model, tokenizer)
            kinds = [*kinds, str(args.plan)]
        peers = _installed_peers(model) if args.peers else []
        task = bar.add_task(f"{windows.numel():,} tokens", total=None)
        rows = quality(
            model,
            windows,
            [*kinds, *peers],
            encoder_inputs=inputs,
            after=after,
            decode=args.decode,
            on_step=lambda done, total: bar.update(task, completed=done, total=total),
        )
    how = f"decoded after {after:,} of {windows.shape[1]:,}" if args.decode else "fed in chunks"
    keys = "" if args.keys == "plain" else f", keys with {args.keys}"
    title = f"{rows[0].num_tokens:,} tokens of {args.text}, {how}{keys}"
    if args.json:
        sys.stdout.write(json.dumps([_as_json(row) for row in rows], indent=2) + "\n")
    else:
        _print_table(rows, len(kinds), title)
    if args.plot is not None:
        write_plot(args.plot, _drawn(rows, len(kinds)))
    if args.html is not None:
        title = f"{Path(tokenizer.name_or_path).name}: {title}"
        cells = [_cells(n, row, rows, len(kinds)) for n, row in enumerate(rows)]
        page = results_page(title, _headings(rows), cells, _drawn(rows, len(kinds)), _notes(rows))
        args.html.write_text(page, encoding="utf-8")


def _read(
    args: argparse.Namespace, model: Any, tokenizer: Any, texts: Any, window: int, document: str | None
) -> tuple[Any, Any]:
    """Texts ``[N, W]``, and what an encoder reads for them; ``None`` without one."""
    from kvloom.measuring.encoder_inputs import document_inputs, started
    from kvloom.measuring.quality import windows_of

    name = type(model).__name__
    if not model.config.is_encoder_decoder:
        if document is not None:
            raise ArgumentError(f"--document must not be given for {name}, which has no encoder")
        return windows_of(tokenizer, texts, args.tokens, "--text", window), None
    if document is None or args.text == HELD_OUT:
        raise ArgumentError(
            f"--document and --text must be given as files for {name}: texts of its encoder and its decoder"
        )

    def of_target(text: str, **options: Any) -> Any:
        return tokenizer(text_target=text, **options)

    windows = started(model, windows_of(of_target, texts, args.tokens, "--text", max(window - 1, 1)))
    return windows, document_inputs(model, tokenizer, document, len(windows))


def _tokens(text: str) -> int | str:
    """Parse a number of tokens, or ``_LONGEST``."""
    return text if text == _LONGEST else int(text)


def _expect_after(after: int | None, window: int) -> None:
    if after is not None:
        expect_within("--after", after, 0, window - 2)


def _within_positions(model: Any, window: int | str | None) -> int:
    """The given window, or one of ``_WINDOW`` tokens if the model has as many positions."""
    from kvloom.integrations.transformers.models.positions import expect_positions, positions_of

    longest = positions_of(model)
    if window is None:
        return min(_WINDOW, longest or _WINDOW)
    if not isinstance(window, int):
        if longest is None:
            raise ArgumentError(
                f"--window must be a number if the model's configuration says no positions, got {window!r}"
            )
        return longest
    expect_positions("--window", model, window)
    return window


def _expect_plan(args: argparse.Namespace) -> None:
    """Check that options of a plan fit together."""
    is_sized = args.bits is not None or args.budget is not None
    if args.plan is None and (is_sized or args.calibrate is not None):
        raise ArgumentError(
            "--plan must be given with --bits, --budget or --calibrate, got one of these without it"
        )
    if args.plan is not None and not is_sized:
        raise ArgumentError("--bits or --budget must be given with --plan, got neither")
    if args.plan is not None and not is_plan(str(args.plan)):
        raise ArgumentError(f"--plan must be a file that ends in .json, got {args.plan}")


def _save_plan(args: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    """Choose bits on the text of ``--calibrate``, and write them."""
    from kvloom.measuring.planned_bits import plan_bits
    from kvloom.measuring.quality import windows_of

    texts = iter_texts("train") if args.calibrate is None else [read_text("--calibrate", args.calibrate)]
    windows = windows_of(tokenizer, texts, _CALIBRATED, "--calibrate", _within_positions(model, None))
    plan_bits(model, windows, bits=args.bits, budget=args.budget).save(args.plan)


def _installed_peers(model: Any) -> "list[Peer]":
    """Peers: transformers' int4 caches of installed libraries, with a residual window of 128 tokens."""
    from transformers.cache_utils import QuantizedCache

    from kvloom.measuring.quality import Peer

    def peer(backend: str, axis: int) -> "Peer":
        return Peer(
            f"{backend} int4",
            lambda model: QuantizedCache(backend, model.config, nbits=4, axis_key=axis, axis_value=axis),
        )

    found = []
    for each in (peer(backend, axis) for backend, axis in _PEERS):
        try:
            each.make(model)
        except (ImportError, ValueError) as error:
            sys.stderr.write(f"kvloom: left out {each.name}: {str(error).strip().splitlines()[0]}\n")
        else:
            found.append(each)
    return found


def _name(n: int, row: "Quality", num_ours: int) -> str:
    """Name of row n: DynamicCache, then kvloom's kinds, then peers."""
    return f"kvloom {row.kind}" if 1 <= n <= num_ours else row.kind


def _as_json(row: "Quality") -> dict[str, Any]:
    worst = {name: getattr(row, name) for name in ("worst_head", "worst_encoder_head")}
    names = ("layer", "head", "error")
    return asdict(row) | {name: x and dict(zip(names, x, strict=True)) for name, x in worst.items()}


def _worst(head: tuple[int, int, float] | None) -> str:
    return "" if head is None else f"{head[2]:.1%} ({head[0]}, {head[1]})"


def _has_encoder(rows: "list[Quality]") -> bool:
    return rows[0].nbytes_per_encoder_token > 0


def _headings(rows: "list[Quality]") -> list[str]:
    names = ["cache", "bytes", "perplexity", "KL", "agree", "worst head"]
    return [*names[:2], "encoder's", *names[2:], "encoder's head"] if _has_encoder(rows) else names


def _cells(n: int, row: "Quality", rows: "list[Quality]", num_ours: int) -> list[str]:
    """Texts of row n of the table."""
    change, has_encoder = row.perplexity / rows[0].perplexity - 1, _has_encoder(rows)
    return [
        _name(n, row, num_ours),
        f"{row.nbytes_per_token:,.0f}",
        *([f"{row.nbytes_per_encoder_token:,.0f}"] if has_encoder else []),
        f"{change:+.2%}" if n else f"{row.perplexity:.3f}",
        f"{row.mean_kl:.1e}" if n else "",
        f"{row.agreed:.1%}" if n else "",
        _worst(row.worst_head),
        *([_worst(row.worst_encoder_head)] if has_encoder else []),
    ]


def _notes(rows: "list[Quality]") -> list[str]:
    of_encoder = " of the text, and of one of the encoder's" if _has_encoder(rows) else ""
    return [
        f"bytes: of a token{of_encoder}; KL (nats), agree: next tokens against DynamicCache's",
        "worst head: relative error of its output if only its layer has this cache (layer, head)",
    ]


def _print_table(rows: "list[Quality]", num_ours: int, title: str) -> None:
    table = terminal.table(*_headings(rows), title=title)
    for n, row in enumerate(rows):
        table.add_row(*_cells(n, row, rows, num_ours))
    console = terminal.console(_WIDTH if _has_encoder(rows) else 0)
    console.print(table)
    for note in _notes(rows):
        console.print(note)


def _drawn(rows: "list[Quality]", num_ours: int) -> str:
    """Error by bytes of a token, as SVG."""
    from kvloom.measuring.chart import Point, as_svg

    return as_svg(
        Point(_name(n, row, num_ours), row.nbytes_per_token, row.mean_kl, n > num_ours)
        for n, row in enumerate(rows)
    )
