"""Files of events, and the pages that each request found or missed."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.paging.events import FORMAT
from kvloom.terminal import counted


@dataclass(slots=True)
class Asked:
    """Look-up of a request: its full pages that were found, read or missed.

    Attributes:
        tenant: Public name of its salt.
        tokens: Number of tokens of its text.
        nodes: Nodes of the pages, in order.
        found: Number of first pages that were found.
        read: Places of the pages that were read from a store.
        misses: Fields of the ``Miss`` of each other page, by place.
    """

    tenant: str
    tokens: int
    nodes: list[int]
    found: int = 0
    read: set[int] = field(default_factory=set)
    misses: dict[int, dict[str, Any]] = field(default_factory=dict)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file by ``Events.save``, the header first.

    Raises:
        ArgumentError: the file cannot be read, or a line is not one of a recording.
    """
    lines: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(counted(file, "lines read"), 1):
                lines.append(_line(number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"events must be a file of JSON lines: {error}") from error
    if not lines:
        raise ArgumentError("events must have a head, got an empty file")
    return lines


def requests_of(lines: Iterable[dict[str, Any]]) -> dict[int, Asked]:
    """Look-up of each request in the recording, by number."""
    made: dict[int, Asked] = {}
    for line in lines:
        kind, request = line.get("kind"), made.get(line.get("request", 0))
        if kind == "begin":
            made[line["request"]] = Asked(line["tenant"], line["tokens"], line["nodes"])
        elif request is None:
            continue
        elif kind == "hit":
            request.found = len(line["nodes"])
        elif kind == "miss":
            for place in range(line["first"], min(line["first"] + line["num_pages"], len(request.nodes))):
                request.misses[place] = {x: line[x] for x in _SAID if x in line}
        elif kind == "read":
            for place in range(line["first"], line["first"] + len(line["pages"])):
                request.misses.pop(place, None)
                request.read.add(place)
    return made


_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "begin": ("tenant", "tokens", "nodes"),
    "hit": ("nodes",),
    "miss": ("cause", "first", "num_pages"),
    "read": ("first",),
    "seal": ("nodes",),
    "states": ("what", "nodes"),
    "grow": ("num_pages",),
    "draft": ("by", "drafted", "accepted"),
}
_SAID: Final = ("cause", "at", "time", "by", "more", "what")


def causes_of(requests: Iterable[Asked]) -> Counter[str]:
    """Number of missed pages of all requests, by cause."""
    return Counter(miss["cause"] for request in requests for miss in request.misses.values())


def _line(number: int, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if number == 1:
            if line["format"] == FORMAT and line["page_size"] >= 1:
                return dict(line)
        elif "node" in line:
            if type(line["node"]) is int and (line["parent"] is None or type(line["parent"]) is int):
                return dict(line)
        elif type(line["request"]) is int and all(type(x) is int for x in line["pages"]):
            if line["t"] >= 0 and all(x in line for x in _NEEDED.get(line["kind"], ())):
                return dict(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ArgumentError(f"events must be of format {FORMAT}, got line {number}: {text.strip()[:60]!r}")
