"""``kvloom bench serve``: how fast a server answers many clients."""

import argparse
import asyncio
import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvloom.errors import ArgumentError, KVError
from kvloom.serving import expect_installed
from kvloom.serving.settings import KEYS_VARIABLE, Settings, expect_within, keys_from
from kvloom.serving.workloads import Conversation, chats, repeated, replay
from kvloom.simulation.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from kvloom.serving.answer_check import Answer

SCENARIOS: Final = ("shared", "chat", "trace")

BOUNDS: Final = {
    "requests": (1, 1_000_000),
    "clients": (1, 10_000),
    "system": (0, 1_000_000),
    "words": (1, 1_000_000),
    "new_tokens": (1, 1_000_000),
    "turns": (1, 1_000_000),
    "scale": (0.01, 1_000_000),
    "speed": (0.001, 1_000_000),
    "check_answers": (1, 1_000_000),
}
"""Least and most of each option that is a number."""

_APART: Final = 0.05
"""Shares that are as near as this are alike: a word is about one token, and a prompt ends within a page."""

_LEAST: Final = 0.01
"""Of a share that is worth a word where less was found; traces begin with a few hundredths."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvloom bench serve``."""
    parser.add_argument(
        "--url",
        default=f"http://{Settings.host}:{Settings.port}/v1",
        metavar="URL",
        help="with the path of the API, /v1 if there is none",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"the first of {KEYS_VARIABLE} if not said")
    parser.add_argument("--model", metavar="NAME", help="the server's first if not said")
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="shared",
        help="one system prompt; conversations of several turns; or the requests of --trace",
    )
    parser.add_argument("--requests", type=int, default=64, metavar="N")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="requests at a time")
    parser.add_argument("--system", type=int, default=256, metavar="N", help="words of the system prompt")
    parser.add_argument("--words", type=int, default=32, metavar="N", help="of each request behind it")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="of each conversation of chat")
    parser.add_argument("--trace", type=Path, metavar="F", help="JSON lines in Mooncake's format")
    parser.add_argument("--scale", type=float, default=64.0, metavar="X", help="divides lengths of a trace")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="divides times of a trace")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the texts, to repeat a run; a new one if not said"
    )
    parser.add_argument(
        "--check-answers",
        type=int,
        nargs="?",
        const=BOUNDS["check_answers"][1],
        metavar="N",
        help="ask each answered request, or N of them, again alone, and compare tokens and log "
        "probabilities; status 1 if any differ",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def conversations_of(args: argparse.Namespace, seed: int) -> list[Conversation]:
    """The conversations that the options ask for.

    Raises:
        ArgumentError: an option has no such value.
    """
    for name, (low, high) in BOUNDS.items():
        if getattr(args, name) is not None:
            expect_within(name, getattr(args, name), low, high)
    if (args.scenario == "trace") != (args.trace is not None):
        raise ArgumentError("trace must be given with --scenario trace, and with no other")
    if args.scenario == "trace":
        return replay(args.trace, args.requests, args.scale, args.speed, seed)
    turns = args.turns if args.scenario == "chat" else 1
    return chats(args.requests, turns, args.system, args.words, args.new_tokens, seed)


def base_url(text: str) -> str:
    """The URL of a server's API: its ``/v1`` if the URL has no path.

    Raises:
        ArgumentError: it is no URL of a server.
    """
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_url = False
    if not is_url or url.query or url.fragment:
        raise ArgumentError(f"url must be such as http://127.0.0.1:8000/v1, got {text!r}")
    return text if url.path.strip("/") else f"{text.rstrip('/')}/v1"


def run(args: argparse.Namespace) -> int:
    """Ask, and print what was measured.

    Returns:
        The exit status: 1 if answers were checked and some differ.

    Raises:
        KVError: an option has no such value, nobody answers, or no request was answered.
    """
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    args.url = base_url(args.url)
    conversations = conversations_of(args, seed)
    expect_installed(("openai", "rich"))
    summary = asyncio.run(_measure(args, conversations))
    summary |= {"seed": seed, "repeat_rate": repeated(conversations)}
    summary["note"] = _note(summary, args)
    if args.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        _print(summary)
    return int(bool(summary.get("answers", {}).get("other_logprobs")))


def _note(summary: dict[str, Any], args: argparse.Namespace) -> str | None:
    """Why a server found more than the run repeats, or much less."""
    found, asked = summary["hit_rate"], summary["repeat_rate"]
    if found > asked + _APART:
        return "more was found than this run repeats: the server keeps pages of a run with the same seed"
    if found > asked / 2 or asked < _LEAST:
        return None
    if args.scenario == "trace":
        return (
            f"less was found than this run repeats: full pages alone are found, and {BLOCK_TOKENS} tokens of "
            f"the trace are {max(1, round(BLOCK_TOKENS / args.scale))} words at --scale {args.scale:g}; "
            "a lower one keeps what requests share"
        )
    return "less was found than this run repeats: the server keeps no pages, or too few, or longer ones"


async def _measure(args: argparse.Namespace, conversations: list[Conversation]) -> dict[str, Any]:
    import openai
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.serving.answer_check import check_answers
    from kvloom.serving.load import Measured, measure

    key = args.api_key or next(iter(keys_from(())), "none")
    async with openai.AsyncOpenAI(base_url=args.url, api_key=key, max_retries=0) as client:
        try:
            model = args.model or (await client.models.list()).data[0].id
        except openai.APIError as error:
            raise KVError(f"no server answers at {args.url}: {error}") from error
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True)) as progress:
            total = sum(len(conversation.turns) for conversation in conversations)
            task = progress.add_task(args.scenario, total=total, rate="")

            def observe(measured: Measured) -> None:
                done = measured.ended + measured.refused + len(measured.errors)
                rate = f"{measured.new_tokens / measured.seconds:.0f} tokens/s, {measured.refused} refused"
                progress.update(task, completed=done, rate=rate)

            measured = await measure(
                client,
                model,
                conversations,
                args.clients,
                observe,
                keep_answers=args.check_answers is not None,
            )
            if not measured.ended:
                reason = measured.errors[0] if measured.errors else "the server refused all of them"
                raise KVError(f"no request was answered: {reason}")
            summary = {"scenario": args.scenario, "model": model, "clients": args.clients}
            summary |= measured.summary()
            if measured.answers is not None:
                answers = _some(measured.answers, args.check_answers)
                task = progress.add_task("again, alone", total=len(answers), rate="")
                try:
                    check = await check_answers(
                        client,
                        model,
                        answers,
                        lambda check: progress.update(task, completed=check.checked),
                    )
                except openai.APIError as error:
                    raise KVError(f"a request was answered in company, and not alone: {error}") from error
                summary["answers"] = {**asdict(check), "says": str(check)}
    return summary


def _some(answers: "list[Answer]", count: int) -> "list[Answer]":
    """At most ``count`` of all answers, as far from each other as can be."""
    count = min(count, len(answers))
    return [answers[i * len(answers) // count] for i in range(count)]


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{summary['model']}: {summary['scenario']}, {summary['clients']} clients"
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    ended = f"{summary['ended']} ended, {summary['refused']} refused, {summary['failed']} failed"
    table.add_row("requests", f"{ended} in {summary['seconds']:.1f} s")
    table.add_row("new tokens per second", f"{summary['new_tokens_per_s']:,.1f}")
    table.add_row("requests per second", f"{summary['requests_per_s']:,.2f}")
    table.add_row("prompt tokens found", f"{summary['hit_rate']:.1%} of {summary['prompt_tokens']:,}")
    table.add_row("prompt words repeated", f"{summary['repeat_rate']:.1%} with --seed {summary['seed']}")
    for name, title in (("first_token_ms", "to the first token"), ("between_tokens_ms", "between tokens")):
        shown = ", ".join(f"{p} {value:,.1f}" for p, value in summary[name].items())
        table.add_row(f"{title}, ms", shown)
    console = Console(width=int(os.environ.get("COLUMNS", "80")))
    console.print(table)
    for text in (summary.get("answers", {}).get("says"), summary["note"]):
        if text is not None:
            console.print(text)
