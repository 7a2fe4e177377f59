"""Events of recurrent states in a recording of pages: kept, found and evicted ones."""

from collections.abc import Sequence
from typing import Any

from kvloom.paging import Events, PageRef, PrefixTree


class StateEvents:
    """Recorder of states, whose pages are in their own pool, among the events of pages."""

    def __init__(self) -> None:
        self._events: Events | None = None
        self._nodes: dict[PageRef, int] = {}  # last page of the text of each page of states

    def __reduce__(self) -> Any:
        """Pickle as empty: a copy or a saved pool records nothing."""
        return StateEvents, ()

    def record(self, events: Events, tree: PrefixTree) -> None:
        """Record events of the states in ``tree`` from now on; present ones are recorded as kept."""
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
        """Record states that were added or evicted since the last call.

        Args:
            events: Events of the pages; ``None`` if they are not recorded.
            tree: Prefix tree of the pages of states.
            what: Event of added states: ``"kept"`` or ``"read"``.
            request: Number of the request.
            found: Pages of states that the request continues from.
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
