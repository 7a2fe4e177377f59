"""Options of ``kvloom serve``."""

import argparse
from pathlib import Path
from typing import Final

from kvloom.core.spelling import PACKS, STORAGE
from kvloom.paging import POLICIES
from kvloom.serving.settings import KEYS_VARIABLE, PICTURE_TOKENS, Settings

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of weights and of the computation; ``"auto"`` is that of the file."""

LOOKUP: Final = "lookup"
"""Value of ``--drafts`` without the folder of an assistant."""

LIMITS: Final = {
    "max_tokens": "new tokens of an answer",
    "max_answers": "answers of a model that are computed or wait at a time; then 429",
    "max_seconds": "from the last byte of a request to the last one of its answer; then 408",
    "max_body_bytes": "of a request; then 413",
    "max_header_bytes": "of a request, names and values; then 431",
    "body_seconds": "in which the body of a request must have come; then 408",
    "header_seconds": "in which headers must have come on a connection; then it is closed",
    "drain_seconds": "that a server which is stopped gives the answers that have begun",
    "session_share": "of all pages, what sessions of agents may hold, each key as much as another",
    "session_seconds": "after which a session of an agent that is not used is forgotten",
}
"""Fields of ``Settings`` that limit requests, each an option of that name, with their help texts."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="local Hugging Face causal model folder"
    )
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="one of several models, each with pages of its own; a request names it; may be repeated",
    )
    parser.add_argument("--name", metavar="NAME", help="of the model, to clients (default: the folder's)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of weights and of what is computed; auto is the file's, but float32 for float16 on a CPU",
    )
    parser.add_argument("--chat-template", type=Path, metavar="F", help="Jinja file, if the model has none")
    _add_pages(parser.add_argument_group("pages"))
    _add_layers(parser.add_argument_group("layers"))
    _add_server(parser.add_argument_group("server"))
    limits = parser.add_argument_group("limits")
    for name, help in LIMITS.items():
        usual = getattr(Settings, name)
        limits.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(usual),
            default=usual,
            metavar="N" if isinstance(usual, int) else "S",
            help=help,
        )


def _add_pages(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv",
        default="auto",
        metavar="KIND[:gGROUP]",
        help=f"how pages are kept: {', '.join(STORAGE)}, codes also as int8:g32",
    )
    group.add_argument("--values", metavar="KIND", help="how values alone are kept (default: as --kv)")
    group.add_argument(
        "--pages", type=int, metavar="N", help="of each model, at most (default: as memory is free)"
    )
    group.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens in a page")
    group.add_argument(
        "--picture-tokens",
        type=int,
        default=PICTURE_TOKENS,
        metavar="N",
        help="of chats with pictures that are kept at a time, beside the pages",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default="lru",
        help="which pages give way: those idle for longest, or those worth least by how pages were used",
    )
    group.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="below the pages, such as file:///var/cache/kvloom: what was computed before this server began, "
        "or elsewhere; may be repeated, the quickest first",
    )
    group.add_argument(
        "--record", type=Path, metavar="F", help="write what happened to pages at the end, for kvloom view"
    )
    group.add_argument(
        "--record-text", action="store_true", help="with the token ids and the text of all requests"
    )


def _add_layers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pack",
        choices=tuple(PACKS),
        default="no",
        help="weights of linear layers in oneDNN's order, which is faster: beside the others, or only so",
    )
    group.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="the same bits for a request alone and among others (default: on)",
    )
    group.add_argument(
        "--drafts",
        nargs="?",
        const=LOOKUP,
        metavar="PATH",
        help="steps also verify tokens that came earlier in a request's own text, and with the folder of a "
        "smaller model with the same tokenizer those that it drafts: the same answers, sooner",
    )
    group.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens of one step")


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default=Settings.host, help="beyond loopback there must be an API key")
    group.add_argument("--port", type=int, default=Settings.port, metavar="N", help="port to listen at")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"may be repeated; {KEYS_VARIABLE} is seen by fewer, commas between keys",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of a page in a browser that may ask, such as http://localhost:3000; may be repeated",
    )
    group.add_argument(
        "--tls-certificate", type=Path, metavar="F", help="PEM, with those that lead to a known one: HTTPS"
    )
    group.add_argument("--tls-key", type=Path, metavar="F", help="PEM of its key, without a password")
    group.add_argument(
        "--access-log",
        action="store_true",
        help="a line for each request: method, path, status, milliseconds, tokens; no text and no key",
    )
