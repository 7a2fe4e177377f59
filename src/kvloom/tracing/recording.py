"""A file of events, and of each request which pages it found and why it missed the others."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.paging.events import FORMAT


@dataclass(slots=True)
class Asked:
    """The lookup of a request: which of its full pages were found, read or missed.

    Attributes:
        tenant: That stands for its salt.
        tokens: Of its text.
        nodes: The pages, in order.
        found: How many at the beginning were there.
        read: Pages that were read from a store, by their places.
        misses: Of each other page, by its place, the fields of its ``Miss``.
    """

    tenant: str
    tokens: int
    nodes: list[int]
    found: int = 0
    read: set[int] = field(default_factory=set)
    misses: dict[int, dict[str, Any]] = field(default_factory=dict)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that ``Events.save`` wrote, the head first.

    Raises:
        ArgumentError: the file cannot be read, or a line is none of a recording.
    """
    lines: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                lines.append(_line(number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"events must be a file of JSON lines: {error}") from error
    if not lines:
        raise ArgumentError("events must have a head, got an empty file")
    return lines


def requests_of(lines: Iterable[dict[str, Any]]) -> dict[int, Asked]:
    """The lookup of each request, by its number; those that are not in the recording are left out."""
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
}
_SAID: Final = ("cause", "at", "time", "by", "more", "what")


def causes_of(requests: Iterable[Asked]) -> Counter[str]:
    """Missed pages of all requests by their causes."""
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
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ArgumentError(f"events must be of format {FORMAT}, got line {number}: {text.strip()[:60]!r}")
