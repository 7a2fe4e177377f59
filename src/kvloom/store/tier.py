"""One store: what can be read from it, what is wrong with it, and how much it may hold."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kvloom.store.backends import Backend, Stored, connect
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import DamagedRun, OtherFormat, Run, page_bytes, ranges_of
from kvloom.store.heads import Heads, head_of
from kvloom.store.index import Entry, Index, Segment
from kvloom.store.limits import evict, is_mark, quarantine, too_many
from kvloom.store.prefixes import Prefixes
from kvloom.store.probe import Probe, is_probe, probe_name

_LOG: Final = logging.getLogger("kvloom.store")
_READERS: Final = 8
_TOUCH_SECONDS: Final = 1.0
"""For how long a store that was told of a use need not be told of the next."""
_Result = TypeVar("_Result")


class Piece(NamedTuple):
    """Pages that were read and checked.

    Attributes:
        run: That they are of.
        segment: Which of its pages.
        data: The head of the file, and the pages, heads outermost, from ``start`` on.
        start: Bytes of the head.
    """

    run: Run
    segment: Segment
    data: memoryview
    start: int


class Tier:
    """A store that may be slow, full, damaged or away; none of that is an error for those who use it.

    After an error it is left alone for ``retry`` seconds, reading and writing each by itself.

    Args:
        url: Of the store.
        timeout: Seconds after which one request gives up.
        max_bytes: Bytes that it may hold; the least recently used runs go first, later ones of a text before
            earlier ones.
        max_age: Seconds after which a run that is not used goes.
        retry: Seconds.
        refresh: Seconds after which other processes' runs are looked for again.

    Raises:
        ArgumentError: the URL names no kind of store.
        ModuleNotFoundError: its library is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 5.0,
        max_bytes: int | None = None,
        max_age: float | None = None,
        retry: float = 30.0,
        refresh: float = 2.0,
    ) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.damages: deque[str] = deque(maxlen=16)
        """What was wrong with the last damaged runs."""
        self.seconds_per_byte: float | None = None
        self._timeout, self._retry, self._refresh = timeout, retry, refresh
        self._max_bytes, self._max_age = max_bytes, max_age
        self._lock = threading.RLock()
        self._indexes: dict[str, Index] = {}
        self._listed: dict[str, float] = {}  # when, of each folder
        self._probes: dict[str, Probe] = {}  # of each folder
        self._agreed: dict[str, bool] = {}  # whether the one that the store keeps is alike
        self._ignored: set[str] = set()
        self._objects: dict[str, Stored] = {}
        self._heads = Heads()
        self._touched: dict[str, float] = {}  # when, of each object
        self._down_until = {"read": 0.0, "write": 0.0}
        self._warned: set[str] = set()
        self._backend: Backend | None = None
        self._attempt("read", self._connected, None)

    def expect(self, fingerprint: Fingerprint, probe: Probe) -> None:
        """Use runs of a fingerprint only where the store keeps a probe like this one; the first is kept."""
        with self._lock:
            self._probes[fingerprint.folder] = probe
            self._agreed.pop(fingerprint.folder, None)
            if fingerprint.folder in self._indexes:
                del self._indexes[fingerprint.folder]

    def find(
        self, fingerprint: Fingerprint, prefixes: Prefixes, start: int, num_tokens: int
    ) -> list[Segment]:
        """As ``Index.find``, over what this store has now."""
        index = self._index_of(fingerprint)
        with self._lock:
            found = index.find(prefixes, start, num_tokens)
        if (not found or found[-1].end < num_tokens) and self._is_stale(fingerprint):
            self._attempt("read", lambda: self._list(fingerprint), None)
            with self._lock:
                found = index.find(prefixes, start, num_tokens)
        return found

    def refresh(self, fingerprint: Fingerprint) -> None:
        """List the store anew."""
        self._index_of(fingerprint)
        self._attempt("read", lambda: self._list(fingerprint), None)

    def known(self, fingerprint: Fingerprint, prefixes: Prefixes, ends: range) -> set[int]:
        """The ends of pages up to which runs are known here; nothing is asked of the store."""
        index = self._index_of(fingerprint)
        with self._lock:
            reached = max((x.end for x in index.find(prefixes, 0, ends[-1])), default=0)
            digests = prefixes.digests(ends)
            return {end for end, x in zip(ends, digests, strict=True) if end <= reached or x in index}

    def read(
        self,
        fingerprint: Fingerprint,
        salt: bytes,
        prefixes: Prefixes,
        segment: Segment,
        heads: range | None = None,
    ) -> Piece | None:
        """Pages of a run, if every byte of them is what was written for this text; else ``None``."""
        entry, start = segment.entry, segment.entry.head_size
        heads = range(fingerprint.num_heads) if heads is None else heads
        size = page_bytes(fingerprint, entry.page_size)
        wanted = ranges_of(segment.pages, heads, len(entry.digests), size, start)
        began = time.perf_counter()
        data = self._attempt("read", lambda: self._get(entry, wanted), None)
        if data is None:
            return None
        try:
            run = self._heads.read(entry.name, bytes(data[:start]), entry.size)
            if run.fingerprint != fingerprint or run.salt != salt:
                raise DamagedRun("the run is of another model or salt")
            run.expect_prefix(prefixes, segment.end)
            run.expect_whole(data[start:], segment.pages, heads)
        except DamagedRun as error:
            self._quarantine(entry.name, entry.size, str(error))
            return None
        if self.seconds_per_byte is None:
            self.seconds_per_byte = (time.perf_counter() - began) / len(data)
        self.counts["bytes_read"] += len(data)
        now = time.time()
        with self._lock:
            if entry.name in self._objects:
                self._objects[entry.name] = Stored(entry.name, entry.size, now)
            is_due = not 0 <= now - self._touched.get(entry.name, 0.0) < _TOUCH_SECONDS
            if is_due:
                self._touched[entry.name] = now
        if is_due:
            self._attempt("write", partial(self._touch, entry.name), None)
        return Piece(run, segment, data, start)

    def put(self, run: Run, data: bytearray | memoryview) -> bool:
        """Write a run; whether it lasts now."""
        if not self._attempt("write", lambda: self._agrees(run.fingerprint.folder), False):
            return False
        head = run.head()
        is_new = self._attempt("write", lambda: self._connected().put_if_absent(run.name, [head, data]), None)
        if is_new is None:
            return False
        self.counts["runs_written"] += is_new
        self.counts["bytes_written"] += (len(head) + len(data)) * is_new
        entry, index = Entry.of(run, len(head)), self._index_of(run.fingerprint)
        with self._lock:
            index.add(entry)
            self._objects[run.name] = Stored(run.name, entry.size, time.time())
        self.limit()
        return True

    def limit(self) -> None:
        """Remove runs until the limits hold."""
        while True:
            with self._lock:
                victims = too_many(self._objects.values(), time.time(), self._max_bytes, self._max_age)
            if not victims:
                return
            for x in victims:
                self._forget(x.name)
                mark = self._attempt("write", partial(self._evict, x), None)
                self.counts["runs_evicted"] += not is_mark(x.name)
                if mark is not None:
                    with self._lock:
                        self._objects[mark.name] = mark

    def _touch(self, name: str) -> None:
        self._connected().touch(name)

    def _evict(self, x: Stored) -> Stored | None:
        return evict(self._connected(), x, time.time())

    def _get(self, entry: Entry, ranges: list[tuple[int, int]]) -> memoryview | None:
        try:
            return self._connected().get_ranges(entry.name, [(0, entry.head_size), *ranges])
        except FileNotFoundError:  # another process removed it
            self._forget(entry.name)
            return None

    def _index_of(self, fingerprint: Fingerprint) -> Index:
        folder = fingerprint.folder
        with self._lock:
            is_new = folder not in self._indexes
            index = self._indexes.setdefault(folder, Index())
        if is_new:  # readers need the lock
            self._attempt("read", lambda: self._list(fingerprint), None)
        return index

    def _is_stale(self, fingerprint: Fingerprint) -> bool:
        listed = self._listed.get(fingerprint.folder, 0.0)
        return time.monotonic() - listed >= self._refresh

    def _list(self, fingerprint: Fingerprint) -> None:
        """Learn of runs that appeared or went since."""
        folder = fingerprint.folder
        if not self._agrees(folder):
            self._listed[folder] = time.monotonic()
            return
        is_limited = self._max_bytes is not None or self._max_age is not None
        objects = {x.name: x for x in self._connected().list_stored("" if is_limited else f"{folder}/")}
        with self._lock:
            index = self._indexes[folder]
            self._objects = objects
            for name in index.entries.keys() - objects.keys():
                index.remove(name)
            here = [x for x in objects.values() if x.name.startswith(f"{folder}/") and not is_probe(x.name)]
            new = [x for x in here if x.name not in index.entries and x.name not in self._ignored]
        deadline = time.monotonic() + self._timeout
        with ThreadPoolExecutor(_READERS) as readers:
            for found in readers.map(lambda x: self._entry_of(x, fingerprint, deadline), new):
                with self._lock:
                    if found is not None:
                        index.add(found)
        self._listed[folder] = time.monotonic()

    def _agrees(self, folder: str) -> bool:
        """Whether the store keeps a probe like that of this process, which is written if there is none."""
        probe = self._probes.get(folder)
        if probe is None or folder in self._agreed:
            return self._agreed.get(folder, True)
        kept = self._kept_probe(folder, len(probe.data))
        if kept is None:
            with suppress(OSError):  # who may not write here reads what others wrote
                self._connected().put_if_absent(probe_name(folder), [probe.data])
            kept = self._kept_probe(folder, len(probe.data))
        difference = ""
        if kept is not None:
            is_comparable = len(kept) == len(probe.data)
            difference = probe.difference(kept) if is_comparable else "its probe has another size"
        if difference:
            self._warn(
                f"probe {folder}",
                "%s has keys and values of this model that it does not compute, and is not used for it: %s",
                self.url,
                difference,
            )
        self._agreed[folder] = not difference
        return not difference

    def _kept_probe(self, folder: str, size: int) -> bytes | None:
        try:
            return bytes(self._connected().get_ranges(probe_name(folder), [(0, size + 1)]))
        except FileNotFoundError:
            return None

    def _entry_of(self, x: Stored, fingerprint: Fingerprint, deadline: float) -> Entry | None:
        """What the head of an object says, unless it is damaged or there is no time left."""
        if time.monotonic() > deadline:
            return None
        try:
            run, start = head_of(self._connected(), x)
            if run.name != x.name:
                raise DamagedRun("the head is not the one of this name")
            if run.fingerprint != fingerprint:
                raise DamagedRun(run.fingerprint.difference(fingerprint))
            return Entry.of(run, start)
        except FileNotFoundError:
            return None
        except OtherFormat as error:
            self._ignored.add(x.name)
            self._warn(f"other format {x.name}", "%s has a run of another format: %s", self.url, error)
        except DamagedRun as error:
            self._quarantine(x.name, x.size, str(error))
        return None

    def _quarantine(self, name: str, size: int, why: str) -> None:
        """Let nobody find a damaged object again; keep it for whoever wants to know."""
        self.counts["damaged"] += 1
        self.damages.append(why)
        self._ignored.add(name)
        self._forget(name)
        self._warn("damaged", "%s has a damaged run, which is not used: %s: %s", self.url, name, why)

        def move() -> None:
            quarantine(self._connected(), Stored(name, size, 0.0))
            self._ignored.discard(name)

        self._attempt("write", move, None)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._objects.pop(name, None)
            self._touched.pop(name, None)
            for index in self._indexes.values():
                index.remove(name)

    def _connected(self) -> Backend:
        if self._backend is None:
            self._backend = connect(self.url, self._timeout)
        return self._backend

    def _attempt(self, way: str, call: Callable[[], _Result], default: _Result) -> _Result:
        """What a call gives, or ``default`` if the store does not do it."""
        if time.monotonic() < self._down_until[way]:
            self.counts["refused"] += 1
            return default
        try:
            return call()
        except OSError as error:
            self.counts[f"{way}_errors"] += 1
            self._down_until[way] = time.monotonic() + self._retry
            verb = "read" if way == "read" else "written"
            self._warn(way, "%s cannot be %s, prefixes are computed instead: %s", self.url, verb, error)
            return default

    def _warn(self, about: str, message: str, *args: object) -> None:
        """Log something once."""
        if about not in self._warned:
            self._warned.add(about)
            _LOG.warning(message, *args)
