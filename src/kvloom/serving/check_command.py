"""``kvloom check-answers``: whether a server answers a request among others, and with drafts, as alone."""

import argparse
import asyncio
import json
import random
import secrets
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvloom.core.arguments import expect_within
from kvloom.errors import ArgumentError, KVError
from kvloom.serving import expect_installed
from kvloom.serving.settings import KEYS_VARIABLE, Settings, keys_from
from kvloom.terminal import bar

if TYPE_CHECKING:
    import openai

    from kvloom.serving.answer_check import AnswerCheck

BOUNDS: Final = {
    "requests": (1, 1_000_000),
    "clients": (1, 10_000),
    "system": (0, 1_000_000),
    "words": (1, 1_000_000),
    "new_tokens": (1, 1_000_000),
}
"""Least and largest value of each numeric option."""

_WORDS: Final = (
    "and as assert break class continue def del elif else except finally for from if import in is not or "
    "pass raise return try while with yield None True False self print len range open file name path"
).split()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom check-answers``."""
    url = f"http://{Settings.host}:{Settings.port}/v1"
    parser.add_argument(
        "--url", default=url, metavar="URL", help="with the path of the API, /v1 if there is none"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key of the server (default: the first of {KEYS_VARIABLE})"
    )
    parser.add_argument("--model", metavar="NAME", help="model to ask (default: the server's first)")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="number of requests")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="requests at a time")
    parser.add_argument("--system", type=int, default=256, metavar="N", help="words with which all begin")
    parser.add_argument(
        "--words", type=int, default=32, metavar="N", help="of each request after them, the first half twice"
    )
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="of each answer")
    parser.add_argument("--seed", type=int, metavar="N", help="of the texts (default: a new one)")
    parser.add_argument("--json", action="store_true", help="print JSON, not a sentence")


def print_check(args: argparse.Namespace) -> int:
    """Ask, compare, and print what differs.

    Returns:
        The exit status: 1 if an answer differs.

    Raises:
        KVError: an option has an invalid value, no server answers, or a request was not answered.
    """
    url = _api_url(args.url)
    for name, bounds in BOUNDS.items():
        expect_within(name, getattr(args, name), *bounds)
    expect_installed(("openai", "rich"))
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    system = _text(args.system, (seed, "system"))
    prompts = [system + _copying(_text(args.words, (seed, number))) for number in range(args.requests)]
    check = asyncio.run(_check(args, url, prompts))
    if args.json:
        sys.stdout.write(json.dumps({"url": url, "seed": seed, **asdict(check), "says": str(check)}) + "\n")
    else:
        sys.stdout.write(f"{check}\n")
    return int(check.other_logprobs > 0)


def _api_url(text: str) -> str:
    """The URL of a server's API: its ``/v1`` if the URL has no path."""
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_url = False
    if not is_url or url.query or url.fragment:
        raise ArgumentError(f"url must be such as http://127.0.0.1:8000/v1, got {text!r}")
    return text if url.path.strip("/") else f"{text.rstrip('/')}/v1"


def _text(count: int, seed: object) -> str:
    """``count`` random words of about a token each, the same for the same seed."""
    return "".join(f" {word}" for word in random.Random(repr(seed)).choices(_WORDS, k=count))


def _copying(text: str) -> str:
    """A text, and its first half again, so that a model may go on with the rest and drafts may hold."""
    return text + text[: len(text) // 2].rpartition(" ")[0]


async def _first_model(client: "openai.AsyncOpenAI", url: str) -> str:
    """Name of the first model that a server lists."""
    import openai

    try:
        listed = await client.get("/models", cast_to=object)  # as it is: what answers may be any server
    except openai.APIError as error:
        raise KVError(f"no server answers at {url}: {error}") from error
    models = listed.get("data") if isinstance(listed, dict) else None
    if not models:
        raise KVError(f"url must be of a server that lists a model, got none at {url}")
    return str(models[0]["id"])


async def _check(args: argparse.Namespace, url: str, prompts: list[str]) -> "AnswerCheck":
    import openai
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from kvloom.serving.answer_check import check_answers

    key = args.api_key or next(iter(keys_from(())), "none")  # a server without keys takes any text
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = args.model or await _first_model(client, url)
        with bar(*columns) as progress:
            task = progress.add_task(f"{model}: among others, then alone", total=2 * len(prompts))
            try:
                check = await check_answers(
                    client,
                    model,
                    prompts,
                    args.new_tokens,
                    args.clients,
                    lambda num_answers: progress.update(task, completed=num_answers),
                )
            except openai.APIError as error:
                raise KVError(f"a request was not answered: {error}") from error
    if not check.checked:
        raise KVError("no request was answered: the server refused all of them")
    return check
