"""Recording of events, for owners of a pool of pages with a prefix tree."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.errors import StateError
from kvloom.paging import Events, Miss, PagePool, PageTable, PrefixTree
from kvloom.paging.events import write_lines
from kvloom.tracing.page import write_page


class Recorded(NamedTuple):
    """Pool of pages and its prefix tree, to record.

    Attributes:
        pool: Pool of the pages.
        tree: Prefix tree of the pool.
        tables: Function that returns the tables that hold pages now.
        page_bytes: Bytes of a page in all layers, 0 if that is not known yet.
        lock: Lock for reading and changing any of these.
        record: Called with the events when recording begins, to add events of other things than pages.
    """

    pool: PagePool
    tree: PrefixTree
    tables: Callable[[], Sequence[PageTable]]
    page_bytes: int
    lock: AbstractContextManager[Any]
    record: Callable[[Events], None] | None = None


class Recorder:
    """Mixin of owners of pages that can record events of pages and causes of misses."""

    def _recorded(self) -> Recorded:
        """Pool and tree to record; callable from any thread."""
        raise NotImplementedError

    @property
    def events(self) -> Events | None:
        """Events that ``record`` records; ``None`` before. They change while pages do."""
        recorded = self._recorded()
        events = recorded.pool.events
        if events is not None:
            events.page_bytes = recorded.page_bytes
        return events

    def record(self, capacity: int = 100_000) -> Events:
        """Record events of the pages from now on; ``save_events`` writes them, and ``view`` shows them.

        Pages that are held already belong to no request. Calling it again restarts the recording.

        Args:
            capacity: Number of last events to keep.

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
        """Write the recording as a self-contained HTML page.

        Args:
            path: File to write.
            decode: Function from token ids to text; without it neither text nor token ids are written.

        Returns:
            ``path``.

        Raises:
            StateError: nothing was recorded.
        """
        write_page(self._lines(decode), Path(path))
        return Path(path)

    def save_events(self, path: str | Path, decode: Callable[[list[int]], str] | None = None) -> None:
        """Write the recording as JSON lines, for ``kvloom view`` and ``kvloom trace replay``.

        Args, Raises:
            As ``view``.
        """
        write_lines(self._lines(decode), path)

    def _why(self, tokens: Sequence[int], salt: str) -> list[Miss]:
        """Causes for which full pages of ``tokens`` would be missed now."""
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
        """Lines of one moment; text is decoded afterwards, without the lock."""
        with self._recorded().lock:
            lines = list(self._expect_events().lines(tokens=decode is not None))
        if decode is not None:
            for line in lines:
                if "tokens" in line and "node" in line:
                    line["text"] = decode(line["tokens"])
        return lines
