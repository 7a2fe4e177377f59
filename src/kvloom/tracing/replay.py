"""Replay of look-ups through pool and prefix tree, one after the other, with a recording."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvloom.core.arguments import expect_least
from kvloom.errors import ArgumentError
from kvloom.paging import Events, PagePool, PrefixTree
from kvloom.simulation.trace import BLOCK_TOKENS, read_trace
from kvloom.terminal import tracked
from kvloom.tracing.recording import read_lines

_ALL: Final = 1 << 40


class Lookup(NamedTuple):
    """Look-up of a text.

    Attributes:
        time: Seconds from the beginning.
        tenant: Public name of its salt.
        tokens: Number of tokens of the text.
        pages: Unique number of each full page.
    """

    time: float
    tenant: str
    tokens: int
    pages: Sequence[int]


class _Clock:
    """Clock with the time of the present look-up."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read_lookups(path: Path) -> tuple[list[Lookup], int]:
    """Read the look-ups of a recording, or of a trace in Mooncake's format, and the page size.

    Raises:
        ArgumentError: the file is neither.
    """
    try:
        with path.open(encoding="utf-8") as file:
            is_recording = '"format"' in file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"trace must be a file of JSON lines: {error}") from error
    if is_recording:
        head, *lines = read_lines(path)
        return lookups_of(lines), head["page_size"]
    trace = [*read_trace(path)]
    found = [Lookup(x.timestamp / 1000, "", x.input_length, x.hash_ids) for x in trace]
    return found, trace[0].block_size if trace else BLOCK_TOKENS


def lookups_of(lines: Iterable[dict[str, Any]]) -> list[Lookup]:
    """Look-ups of the lines of a recording."""
    return [Lookup(x["t"], x["tenant"], x["tokens"], x["nodes"]) for x in lines if x.get("kind") == "begin"]


def replay(lookups: Iterable[Lookup], num_pages: int, page_size: int = 1) -> Events:
    """Replay requests one after the other: each finds, computes and leaves its pages.

    If a text has more pages than the pool, its first pages are kept. The pool has no more than all texts.

    Args:
        lookups: Look-ups in order.
        num_pages: Number of pages of the pool.
        page_size: Tokens in a page, which are counted, not compared.

    Raises:
        ArgumentError: ``num_pages`` is less than 1.
    """
    expect_least("num_pages", num_pages, 1)
    lookups = list(lookups)
    num_pages = min(num_pages, max(sum(len(text.pages) for text in lookups), 1))
    pool, clock = PagePool(num_pages), _Clock()
    tree = PrefixTree(pool, page_size=1)  # numbers of pages are used as tokens
    events = tree.record(_ALL, max_remembered=_ALL, clock=clock)
    events.scale = page_size
    for text in tracked(lookups, "look-ups"):
        clock.now = max(text.time, clock.now)
        kept = text.pages[:num_pages]
        found = tree.match(text.pages, text.tenant)
        refs = tree.insert(kept, found + pool.take(len(kept) - len(found)), text.tenant)
        if len(kept) < len(text.pages):
            events.refuse(text.tenant, list(tree.packed(text.pages)), num_pages)
        for ref in refs:
            pool.release(ref)
    return events
