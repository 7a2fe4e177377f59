"""``kvloom bench serve``: speed of a server with many clients, or of two servers with the same requests."""

import argparse
import asyncio
import json
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvloom.errors import ArgumentError, KVError
from kvloom.serving import expect_installed
from kvloom.serving.bench_report import show
from kvloom.serving.chart import chart
from kvloom.serving.settings import KEYS_VARIABLE, Settings, expect_within, expect_writable, keys_from
from kvloom.serving.workloads import Conversation, arriving, chats, repeated, replay
from kvloom.simulation.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from kvloom.serving.answer_check import Answer

SCENARIOS: Final = ("shared", "chat", "trace")

CLIENTS: Final = 8
"""Default number of clients."""

RATES: Final = (0.001, 100_000.0)
"""Least and largest rate, in requests per second."""

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
"""Least and largest value of each numeric option."""

_APART: Final = 0.05
"""Difference of shares that is ignored, since a word is about one token, and a prompt ends within a page."""

_LEAST: Final = 0.01
"""Least repeated share for which a note is shown if less was found; traces begin with a few hundredths."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom bench serve``."""
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
    parser.add_argument(
        "--clients", type=int, metavar="N", help=f"requests at a time, each after another ({CLIENTS})"
    )
    parser.add_argument(
        "--rate",
        metavar="R1,R2,...",
        help="instead of clients: requests, or conversations, that begin in a second, at random times; a run "
        "for each",
    )
    parser.add_argument("--plot", type=Path, metavar="F", help="draw tokens per second over times, as SVG")
    parser.add_argument(
        "--against",
        metavar="URL",
        help="another server, that is asked the same at the same times, afterwards",
    )
    parser.add_argument("--against-key", metavar="KEY", help="of the other server, if it needs one")
    parser.add_argument("--against-model", metavar="NAME", help="the other server's first if not said")
    parser.add_argument("--system", type=int, default=256, metavar="N", help="words of the system prompt")
    parser.add_argument("--words", type=int, default=32, metavar="N", help="of each request after it")
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
    """The conversations for the options.

    Raises:
        ArgumentError: an option has an invalid value.
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


@dataclass(frozen=True, slots=True)
class Server:
    """A server to be measured.

    Attributes:
        url: URL of its API.
        key: API key; any text if it needs none.
        model: Name of the model on the server; the first that it lists if ``None``.
    """

    url: str
    key: str
    model: str | None


def base_url(name: str, text: str) -> str:
    """The URL of a server's API: its ``/v1`` if the URL has no path.

    Args:
        name: Name of the option.
        text: The URL.

    Raises:
        ArgumentError: the text is no URL of a server.
    """
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_url = False
    if not is_url or url.query or url.fragment:
        raise ArgumentError(f"{name} must be such as http://127.0.0.1:8000/v1, got {text!r}")
    return text if url.path.strip("/") else f"{text.rstrip('/')}/v1"


def rates_of(args: argparse.Namespace) -> list[float] | None:
    """The rates of ``--rate``; ``None`` if it is not given.

    Raises:
        ArgumentError: they are invalid, or another option determines the times of requests.
    """
    if args.rate is None:
        if args.plot is not None:
            raise ArgumentError("plot must be given with --rate, got it alone")
        return None
    if args.clients is not None or args.scenario == "trace":
        raise ArgumentError("rate must be given without --clients and a trace, which say when requests come")
    try:
        rates = [float(text) for text in args.rate.split(",")]
    except ValueError:
        raise ArgumentError(f"rate must be numbers with commas between them, got {args.rate!r}") from None
    for rate in rates:
        expect_within("rate", rate, *RATES)
    return rates


def run(args: argparse.Namespace) -> int:
    """Measure, and print the results.

    Returns:
        The exit status: 1 if answers were checked and some differ.

    Raises:
        KVError: an option has an invalid value, no server responds, or no request was answered.
    """
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    servers = servers_of(args)
    rates = rates_of(args)
    all_conversations = [conversations_of(args, seed + i) for i in range(len(rates or (None,)))]
    if args.plot is not None:
        expect_writable("plot", args.plot)
    expect_installed(("openai", "rich"))
    runs = []
    for i, conversations in enumerate(
        all_conversations
    ):  # each rate has its own texts, so it finds no pages of another
        rate = None if rates is None else rates[i]
        if rate is not None:
            conversations = arriving(conversations, rate, seed + i)
        for server in servers:
            summary = asyncio.run(_measure(args, server, conversations, rate))
            summary |= {"seed": seed, "repeat_rate": repeated(conversations)}
            runs.append({**summary, "note": _note(summary, args)})
    if args.plot is not None:
        args.plot.write_text(chart(runs), encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}) + "\n")
    else:
        show(runs)
    return int(any(run.get("answers", {}).get("other_logprobs") for run in runs))


def servers_of(args: argparse.Namespace) -> list["Server"]:
    """The one or two servers that the options name.

    Raises:
        ArgumentError: a URL is invalid, or an option of the second server is given without it.
    """
    servers = [
        Server(base_url("url", args.url), args.api_key or next(iter(keys_from(())), "none"), args.model)
    ]
    if args.against is not None:
        url = base_url("against", args.against)
        servers.append(Server(url, args.against_key or "none", args.against_model))
    elif args.against_key is not None or args.against_model is not None:
        raise ArgumentError("against must be given with --against-key and --against-model, got these alone")
    return servers


def _note(summary: dict[str, Any], args: argparse.Namespace) -> str | None:
    """Note if a server found more than the run repeats, or much less, else ``None``."""
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


async def _measure(
    args: argparse.Namespace, server: Server, conversations: list[Conversation], rate: float | None
) -> dict[str, Any]:
    import openai
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvloom.serving.answer_check import check_answers
    from kvloom.serving.load import Measured, measure

    num_clients = len(conversations) if rate is not None else args.clients or CLIENTS
    async with openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0) as client:
        try:
            model = server.model or (await client.models.list()).data[0].id
        except openai.APIError as error:
            raise KVError(f"no server answers at {server.url}: {error}") from error
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True)) as progress:
            total = sum(len(conversation.turns) for conversation in conversations)
            asked = args.scenario if rate is None else f"{args.scenario} at {rate:g}/s"
            task = progress.add_task(
                asked if args.against is None else f"{model}: {asked}", total=total, rate=""
            )

            def observe(measured: Measured) -> None:
                done = measured.ended + measured.refused + len(measured.errors)
                rate = f"{measured.new_tokens / measured.seconds:.0f} tokens/s, {measured.refused} refused"
                progress.update(task, completed=done, rate=rate)

            measured = await measure(
                client,
                model,
                conversations,
                num_clients,
                observe,
                keep_answers=args.check_answers is not None,
            )
            if not measured.ended:
                reason = measured.errors[0] if measured.errors else "the server refused all of them"
                raise KVError(f"no request was answered: {reason}")
            summary: dict[str, Any] = {"url": server.url, "model": model, "scenario": args.scenario}
            summary |= {"rate": rate, "clients": None if rate is not None else num_clients}
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
                    raise KVError(f"a request was answered among others, and not alone: {error}") from error
                summary["answers"] = {**asdict(check), "says": str(check)}
    return summary


def _some(answers: "list[Answer]", count: int) -> "list[Answer]":
    """At most ``count`` of all answers, evenly spaced."""
    count = min(count, len(answers))
    return [answers[i * len(answers) // count] for i in range(count)]
