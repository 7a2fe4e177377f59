"""Recurrent states in a recording of pages: behind which texts they are kept, found and evicted."""

from collections.abc import Sequence
from typing import Any

from kvloom.paging import Events, PageRef, PrefixTree


class StateEvents:
    """Notes what becomes of states, whose pages are in a pool of their own, among the events of pages."""

    def __init__(self) -> None:
        self._events: Events | None = None
        self._nodes: dict[PageRef, int] = {}  # of each page of states, the last page of its text

    def __reduce__(self) -> Any:
        """A copy or a saved pool records nothing."""
        return StateEvents, ()

    def record(self, events: Events, tree: PrefixTree) -> None:
        """Note from now on what becomes of the states that ``tree`` finds; those that are there are kept."""
        self._events, self._nodes = events, {}
        self.note(events, tree, "kept", 0)

    def note(
        self,
        events: Events | None,
        tree: PrefixTree,
        what: str,
        request: int,
        found: Sequence[PageRef] = (),
    ) -> None:
        """Note which states came and went since the last time.

        Args:
            events: Those of the pages, if they are recorded.
            tree: Finds the pages of states.
            what: What has become of those that came: ``"kept"`` or ``"read"``.
            request: For which.
            found: Pages of states that the request goes on from.
        """
        if events is None or events is not self._events:
            return
        events.request, there = request, tree.sealed()
        for ref in self._nodes.keys() - there:
            events.note("states", [], what="evicted", nodes=[self._nodes.pop(ref)])
        for ref in there:
            if ref not in self._nodes:
                self._nodes[ref] = node = events.causes.nodes_of(*tree.text_of(ref))[-1].id
                events.note("states", [], what=what, nodes=[node])
        for ref in found:
            events.note("states", [], what="found", nodes=[self._nodes[ref]])
