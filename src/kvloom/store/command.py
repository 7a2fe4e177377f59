"""Arguments of ``kvloom store``. Imports no optional library."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any


def add_parser(
    commands: Any,
    ask: Callable[[argparse.Namespace], tuple[Any, list[int]]],
    exchange: Callable[[argparse.Namespace], None],
) -> None:
    """Add ``store`` to the commands.

    Args:
        commands: Result of ``add_subparsers``.
        ask: Function that loads model and text of ``why`` and returns a fingerprint and token ids.
        exchange: Function that runs ``convert``, which needs a model, too.
    """
    store = commands.add_parser("store", help="what a store holds: ls, show, verify, gc, why, convert")
    actions = store.add_subparsers(required=True, metavar="action")
    for name, text in (
        ("ls", "list all runs of pages"),
        ("show", "all that one run says of itself"),
        ("verify", "read everything; exit status 1 if something is damaged"),
        ("gc", "remove what is beyond limits"),
        ("why", "of each page of a prompt, why it is found or not"),
    ):
        action = actions.add_parser(name, help=text)
        action.set_defaults(run=_run, action=name)
        action.add_argument("--json", action="store_true", help="machine-readable output, one object a line")
        action.add_argument(
            "--key-file", metavar="FILE", help="file with the key of the store, if it has one"
        )
        action.add_argument("store", metavar="STORE", help="folder, or URL such as s3://bucket/folder")
        if name == "show":
            action.add_argument("name", metavar="NAME", help="of the run, as ls prints it, or its beginning")
        elif name == "gc":
            action.add_argument(
                "--max-bytes", metavar="BYTES", help="to keep, most recently used, such as 20GB or 20GiB"
            )
            action.add_argument("--max-age", type=float, metavar="DAYS", help="days that a run may be unused")
        elif name == "why":
            _add_question(action)
            action.set_defaults(ask=ask)
    convert = actions.add_parser(
        "convert", help="keys and values of a prompt from a store to a safetensors file, or back"
    )
    convert.add_argument("--json", action="store_true", help="machine-readable output")
    convert.add_argument("--key-file", metavar="FILE", help="file with the key of the store, if it has one")
    convert.add_argument("source", metavar="SOURCE", help="store, or file that ends with .safetensors")
    convert.add_argument("target", metavar="TARGET", help="the other of the two")
    _add_question(convert)
    convert.set_defaults(run=exchange)


def _add_question(action: Any) -> None:
    """Add the options that name a model and a text."""
    action.add_argument("prompt_file", metavar="PROMPT-FILE", help="file with the text")
    action.add_argument("--model", metavar="PATH", help="local Hugging Face causal model folder")
    action.add_argument("--kv", default="auto", metavar="KIND[:gGROUP]", help="how the cache is kept")
    action.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    action.add_argument("--salt", default="", help="whose prefixes")


def _run(args: argparse.Namespace) -> None:
    getattr(import_module("kvloom.store.actions"), args.action)(args)
