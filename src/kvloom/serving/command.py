"""``kvloom serve``: its options, and what they start."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvloom.core.spelling import PACKS, STORAGE, expect_kv
from kvloom.errors import ArgumentError
from kvloom.models import bundled_model_path, check_model_folder
from kvloom.paging import POLICIES
from kvloom.serving import expect_installed
from kvloom.serving.settings import KEYS_VARIABLE, MOST, Settings, expect_within, keys_from

_LEAST_PAGE_SIZE: Final = 4
"""Of transformers' sessions."""

_MOST_STEP: Final = 1 << 20
"""Tokens of a page, or of a step, whose tensors are made at the beginning."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvloom serve``."""
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="local Hugging Face causal model folder"
    )
    parser.add_argument(
        "--kv",
        default="auto",
        metavar="KIND[:gGROUP]",
        help=f"how pages are kept: {', '.join(STORAGE)}, codes also as int8:g32",
    )
    parser.add_argument("--name", metavar="NAME", help="of the model, to clients; the folder's if not said")
    parser.add_argument("--chat-template", type=Path, metavar="F", help="Jinja file, if the model has none")
    parser.add_argument("--pages", type=int, metavar="N", help="at most; as memory is free if not said")
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="lru",
        help="which pages give way: those idle for longest, or those worth least by how pages were used",
    )
    parser.add_argument(
        "--pack",
        choices=tuple(PACKS),
        default="no",
        help="weights of linear layers in oneDNN's order, which is faster: beside the others, or only so",
    )
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="the same bits for a request alone and in company; on if not said",
    )
    parser.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="below the pages, such as file:///var/cache/kvloom: what was computed before this server began, "
        "or elsewhere; may be repeated, the quickest first",
    )
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens of one step")
    parser.add_argument("--host", default=Settings.host, help="beyond loopback there must be an API key")
    parser.add_argument("--port", type=int, default=Settings.port, metavar="N")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"may be repeated; {KEYS_VARIABLE} is seen by fewer, commas between keys",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of a page in a browser that may ask, such as http://localhost:3000; may be repeated",
    )
    parser.add_argument("--max-tokens", type=int, default=Settings.max_tokens, metavar="N", help="new tokens")
    parser.add_argument(
        "--max-answers", type=int, default=Settings.max_answers, metavar="N", help="at a time; then 429"
    )
    parser.add_argument("--max-seconds", type=float, default=Settings.max_seconds, metavar="S")
    parser.add_argument(
        "--record", type=Path, metavar="F", help="write what happened to pages at the end, for kvloom view"
    )
    parser.add_argument(
        "--record-text", action="store_true", help="with the token ids and the text of all requests"
    )
    parser.add_argument("--drain-seconds", type=float, default=Settings.drain_seconds, metavar="S")


def run(args: argparse.Namespace, load: Callable[[Path | None], tuple[Any, Any]]) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        args: The options.
        load: Gives the model and the tokenizer of a folder, or the bundled ones.

    Returns:
        The exit status.
    """
    expect_installed()
    expect_kv("--kv", args.kv)
    settings = Settings(
        host=args.host,
        port=args.port,
        api_keys=keys_from(args.api_key),
        allowed_origins=tuple(args.allow_origin),
        max_tokens=args.max_tokens,
        max_answers=args.max_answers,
        max_seconds=args.max_seconds,
        drain_seconds=args.drain_seconds,
    )
    expect_within("--page-size", args.page_size, _LEAST_PAGE_SIZE, _MOST_STEP)
    if args.pages is not None:
        expect_within("--pages", args.pages, 1, MOST)
    if args.max_batch_tokens is not None:
        expect_within("--max-batch-tokens", args.max_batch_tokens, 1, _MOST_STEP)
    template = _read_template(args.chat_template)
    if args.record_text and args.record is None:
        raise ArgumentError("--record-text must be given with --record, got it alone")
    if args.record is not None:
        _expect_writable(args.record)
    path = args.model or bundled_model_path()
    check_model_folder(path)  # before imports that take seconds
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when it is imported
    model, tokenizer = load(args.model)
    tokenizer.chat_template = template or tokenizer.chat_template

    from transformers import ContinuousBatchingConfig

    from kvloom.serving import server
    from kvloom.serving.session import Session

    config = ContinuousBatchingConfig(
        page_size=args.page_size, num_blocks=args.pages, max_batch_tokens=args.max_batch_tokens
    )
    session = Session(
        model,
        tokenizer,
        settings,
        config,
        kv=args.kv,
        policy=args.policy,
        batch_invariant=args.batch_invariant,
        pack=PACKS[args.pack],
        store=args.store,
    )
    if args.record is not None:
        session.manager.record()
    status = server.run(session, (args.name or path.resolve().name, str(path)), settings)
    if args.record is not None:
        session.manager.save_events(args.record, tokenizer.decode if args.record_text else None)
    return status


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--chat-template must be text in UTF-8: {error}") from error


def _expect_writable(path: Path) -> None:
    """Before hours are recorded; what the file holds stays until it is written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentError(f"--record must be a file that can be written: {error}") from error
