"""States of pages, reconstructed from the events of a recording. Integers only; imports no torch."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

Event: TypeAlias = tuple[float, str, int, list[int], dict[str, Any]]
"""Seconds since the recording began, kind, request, pages, and further fields:

==========  =========================================  ====================================================
kind        pages                                      further fields
==========  =========================================  ====================================================
grow                                                   ``num_pages`` of the pool from now on
begin                                                  a request looks a text up: ``tenant``, ``tokens`` of
                                                       it, ``nodes`` of its full pages
hit         found, and held by the request             ``nodes``
miss                                                   the fields of a ``Miss``
read        held already, filled from a store          ``first`` of them in the text
allocate    allocated to the request
share       held by the request once more
copy        source and target
seal        found by their tokens from now on          ``nodes``
release     that the request holds once less
evict       evictable, to make room for the request
damage                                                 ``name`` of a stored run and ``reason``
states                                                 recurrent states after the last of each of some
                                                       texts, ``nodes``: ``what`` became of them, ``kept``,
                                                       ``read``, ``found`` or ``evicted``
name                                                   ``name`` of the request
draft                                                  tokens that a step computed for the request behind its
                                                       newest one, ``drafted`` ``by`` ``"grammar"``,
                                                       ``"lookup"`` or ``"assistant"``, and how many of these
                                                       were ``accepted``
==========  =========================================  ====================================================
"""


class PageStates:
    """State of all pages after some events: their holders, and the text of each.

    Attributes:
        num_pages: Number of pages of the pool.
        holders: Number of references of each request to each held page.
        nodes: Node of the text of each sealed page.
        states: Last pages of the texts after which recurrent states are kept.
    """

    __slots__ = ("holders", "nodes", "num_pages", "states")

    def __init__(self) -> None:
        self.num_pages = 0
        self.holders: dict[int, Counter[int]] = {}
        self.nodes: dict[int, int] = {}
        self.states: dict[int, None] = {}

    def apply(self, event: Event) -> None:
        """Update the states by an event."""
        _, kind, request, pages, more = event
        match kind:
            case "allocate" | "hit" | "share":
                for page in pages:
                    self.holders.setdefault(page, Counter())[request] += 1
            case "release":
                for page in pages:
                    self._release(page, request)
            case "seal":
                self.nodes.update(zip(pages, more["nodes"], strict=True))
            case "evict":
                for page in pages:
                    self.nodes.pop(page, None)
            case "states" if more["what"] == "evicted":
                for node in more["nodes"]:
                    self.states.pop(node, None)
            case "states":
                self.states.update(dict.fromkeys(more["nodes"]))
            case "grow":
                self.num_pages = more["num_pages"]

    def events(self, time: float) -> list[Event]:
        """Events that lead a new pool to these states."""
        made: list[Event] = [(time, "grow", 0, [], {"num_pages": self.num_pages})]
        for page, counts in self.holders.items():
            for request, count in counts.items():
                made += [(time, "share", request, [page], {})] * count
        if self.nodes:
            made.append((time, "seal", 0, [*self.nodes], {"nodes": [*self.nodes.values()]}))
        if self.states:
            made.append((time, "states", 0, [], {"what": "kept", "nodes": [*self.states]}))
        return made

    def _release(self, page: int, request: int) -> None:
        counts = self.holders.get(page)
        if counts is None:
            return
        if request not in counts:  # released by another request than the one that took it
            request = next(iter(counts))
        counts[request] -= 1
        if not counts[request]:
            del counts[request]
        if not counts:
            del self.holders[page]
