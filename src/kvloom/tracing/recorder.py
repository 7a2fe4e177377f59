"""Recording for whatever owns a pool of pages and finds them by their tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.errors import StateError
from kvloom.paging import Events, Miss, PagePool, PageTable, PrefixTree
from kvloom.paging.events import write_lines
from kvloom.tracing.page import write_page


class Recorded(NamedTuple):
    """A pool of pages and its tree, which are recorded.

    Attributes:
        pool: The pages.
        tree: That finds them.
        tables: Gives those that hold pages now.
        page_bytes: Bytes of a page in all layers, 0 if that is not known yet.
        lock: Held by whoever changes or reads any of it.
        record: Is told of the events when they begin, to add what becomes of other things than pages.
    """

    pool: PagePool
    tree: PrefixTree
    tables: Callable[[], Sequence[PageTable]]
    page_bytes: int
    lock: AbstractContextManager[Any]
    record: Callable[[Events], None] | None = None


class Recorder:
    """Methods of an owner of pages that says, when told to, what happens to them and why a text is missed."""

    def _recorded(self) -> Recorded:
        """The pages, from any thread."""
        raise NotImplementedError

    @property
    def events(self) -> Events | None:
        """The events that ``record`` records, ``None`` before. They change while pages do."""
        recorded = self._recorded()
        events = recorded.pool.events
        if events is not None:
            events.page_bytes = recorded.page_bytes
        return events

    def record(self, capacity: int = 100_000) -> Events:
        """Record what happens to the pages from now on; ``save_events`` writes it, and ``view`` shows it.

        What is held already is nobody's, to events. Recording again begins anew.

        Args:
            capacity: Events that are kept, the latest ones.

        Raises:
            ArgumentError: ``capacity`` is less than 1; nothing was changed.
        """
        recorded = self._recorded()
        with recorded.lock:
            events = recorded.tree.record(capacity)
            for table in recorded.tables():
                table.request = 0
            if recorded.record is not None:
                recorded.record(events)
            return events

    def view(self, path: str | Path = "pages.html", decode: Callable[[list[int]], str] | None = None) -> Path:
        """Write what was recorded as a page of HTML, which has all of it inside.

        Args:
            path: File to write.
            decode: Token ids to text; without it neither text nor token ids are written.

        Returns:
            ``path``.

        Raises:
            StateError: nothing was recorded.
        """
        write_page(self._lines(decode), Path(path))
        return Path(path)

    def save_events(self, path: str | Path, decode: Callable[[list[int]], str] | None = None) -> None:
        """Write what was recorded as JSON lines, which ``kvloom view`` and ``kvloom trace replay`` read.

        Args, Raises:
            As ``view``.
        """
        write_lines(self._lines(decode), path)

    def _why(self, tokens: Sequence[int], salt: str) -> list[Miss]:
        """Why the full pages of ``tokens`` would be missed now; those that would be found have none."""
        pool, tree, _, _, lock, _ = self._recorded()
        with lock:
            events, found = self._expect_events(), tree.num_known(tokens, salt)
            return events.explain(salt, list(tree.packed(tokens)), found, pool.num_pages)

    def _expect_events(self) -> Events:
        events = self.events
        if events is None:
            raise StateError("events are not recorded, call record() before")
        return events

    def _lines(self, decode: Callable[[list[int]], str] | None) -> list[dict[str, Any]]:
        """Taken at one moment; text is made afterwards, without the lock."""
        with self._recorded().lock:
            lines = list(self._expect_events().lines(tokens=decode is not None))
        if decode is not None:
            for line in lines:
                if "tokens" in line and "node" in line:
                    line["text"] = decode(line["tokens"])
        return lines
