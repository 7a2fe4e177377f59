"""One store of a chain: its runs, failures and limits."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kvloom.store.backends import Backend, connect, expect_own, public_url
from kvloom.store.digests import TextDigests
from kvloom.store.fingerprint import Fingerprint, Probe
from kvloom.store.format import DamagedRun, OtherFormat, Run, page_bytes, ranges_of
from kvloom.store.index import IndexEntry, Segment
from kvloom.store.names import ObjectKind, folder_of, kind_of, probe_name
from kvloom.store.sums import PLAIN, Sums
from kvloom.store.tiers.catalog import Catalog
from kvloom.store.tiers.heads import Heads
from kvloom.store.tiers.limits import Room, is_full, quarantine
from kvloom.store.tiers.patience import Speed
from kvloom.store.tiers.readers import Readers

_LOG: Final = logging.getLogger("kvloom.store")
_TOUCH_SECONDS: Final = 1.0
"""Minimum interval between two records of an object's use."""
_ATTEMPTS: Final = 3
"""Number of attempts to read a run that seems damaged: another process may be replacing it."""
_Result = TypeVar("_Result")


class ReadPages(NamedTuple):
    """Pages that were read and checked.

    Attributes:
        run: Run of the pages.
        segment: Pages of the run that were read.
        data: The pages, heads outermost. Nobody writes this memory, which may be the store's own.
    """

    run: Run
    segment: Segment
    data: memoryview


class Tier:
    """Store that may be slow, full, damaged or unreachable, without an error for its users.

    After an error it is not used for ``retry`` seconds; reading and writing are separate. If a permission for
    a folder is missing, only that folder is not used.

    Args:
        url: URL of the store.
        timeout: Timeout of one request, in seconds.
        max_bytes: Bytes that it may hold; the least recently used runs are evicted first, and later ones
            of a text before earlier ones.
        max_age: Seconds after which a run that is not used is evicted.
        retry: Seconds without use after an error.
        mode: Permissions of files in a local folder.
        sums: Method of the runs' checksums.

    Raises:
        ArgumentError: the URL names no kind of store, or with limits a folder of other files.
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
        mode: int = 0o600,
        sums: Sums = PLAIN,
    ) -> None:
        self.url, self.name = url, public_url(url)
        self.sums = sums
        self.counts: Counter[str] = Counter()
        self.damages: deque[str] = deque(maxlen=16)
        """Descriptions of the last damaged runs."""
        self.readers, self.speed = Readers(), Speed()
        self.catalog = Catalog(self)
        self._timeout, self._retry, self._mode = timeout, retry, mode
        self._room = Room(self.connected, max_bytes, max_age, sums, self._evicted)
        self._writing = threading.Lock()  # from making room to taking it
        self._probes: dict[str, Probe] = {}  # by folder
        self._agreed: dict[str, bool] = {}  # by folder, whether the store's probe is alike
        self._heads = Heads(sums=sums)
        self._touched: dict[str, float] = {}  # time by object
        self._down_until: dict[str, float] = {}  # by "read" or "write", alone and with a folder
        self._warned: set[str] = set()
        self._backend: Backend | None = None
        if self._room.is_limited:
            expect_own(url)
        self.attempt("read", self.connected, None)

    def is_down(self, fingerprint: Fingerprint) -> bool:
        """Whether writing runs of a fingerprint is suspended now."""
        return self._is_down("write", self.sums.folder(fingerprint.digest))

    def expect(self, fingerprint: Fingerprint, probe: Probe) -> None:
        """Use runs of a fingerprint only if the store's probe equals this one; a missing probe is written."""
        folder = self.sums.folder(fingerprint.digest)
        self._probes[folder] = probe
        self._agreed.pop(folder, None)
        self.catalog.forget(fingerprint)

    def read(
        self,
        fingerprint: Fingerprint,
        salt: bytes,
        prefixes: TextDigests,
        segment: Segment,
        heads: range | None = None,
    ) -> ReadPages | None:
        """Read pages of a run and check every byte against this text; ``None`` if that fails."""
        name, why = segment.entry.name, ""
        for _ in range(_ATTEMPTS):
            try:
                return self._read(fingerprint, salt, prefixes, segment, heads)
            except DamagedRun as error:
                why, entry = str(error), segment.entry
            try:  # maybe the listing is wrong, not the run; or it was replaced while it was read
                right = self.attempt("read", partial(self.catalog.corrected, entry), None, folder_of(name))
            except OtherFormat:
                return None
            except DamagedRun as error:
                why = str(error)
                continue
            if right is None or right.digests != entry.digests:
                return None
            segment = segment._replace(entry=right)
        self.damaged(name, why)
        return None

    def _read(
        self,
        fingerprint: Fingerprint,
        salt: bytes,
        prefixes: TextDigests,
        segment: Segment,
        heads: range | None,
    ) -> ReadPages | None:
        entry, start = segment.entry, segment.entry.head_size
        heads = range(fingerprint.num_heads) if heads is None else heads
        size = page_bytes(fingerprint, entry.page_size)
        wanted = ranges_of(segment.pages, heads, len(entry.digests), size, start)
        began = time.perf_counter()
        found = self.attempt("read", lambda: self._get(entry, wanted), None)
        if found is None:
            return None
        head, *parts = found
        data = parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
        run = self._heads.read(entry.name, bytes(head), entry.size)
        if run.fingerprint != fingerprint or run.salt != salt:
            raise DamagedRun("the run is of another model or salt")
        run.expect_prefix(prefixes, segment.end)
        run.expect_whole(data, segment.pages, heads)
        self.speed.note(time.perf_counter() - began, len(head) + len(data))
        return ReadPages(run, segment, data)

    @property
    def is_limited(self) -> bool:
        """Whether the store has limits."""
        return self._room.is_limited

    def used(self, names: Sequence[str]) -> None:
        """Let the runs of a text, in order, count as used by this process: the first last."""
        for name in reversed(names):
            self._room.used(name)

    def touch(self, name: str) -> None:
        """Record the use of an object, at most once a second."""
        self._room.used(name)
        now = time.time()
        if not 0 <= now - self._touched.get(name, 0.0) < _TOUCH_SECONDS:
            self._touched[name] = now
            self.attempt("write", lambda: self.connected().touch(name), None)

    def put(self, run: Run, data: bytearray | memoryview) -> bool:
        """Write a run, if its pages are missing; returns whether they are stored durably."""
        if self.catalog.has(run):
            return True
        folder = folder_of(run.name)
        if not self.attempt("write", lambda: self.agrees(folder), False, folder):
            return False
        head = run.head()
        nbytes = len(head) + len(data)
        if not self._room.holds(nbytes):
            self.counts["runs_too_large"] += 1
            self._warn("large", "%s may hold less than one run of %d bytes", self.name, nbytes)
            return False
        is_new = self.attempt("write", lambda: self.write(run.name, [head, data]), None, folder)
        if is_new is None:
            return False
        if not is_new:  # its head differs, with or without a text, or an index was wrong
            self.catalog.look_again(run)
            return True
        self.counts["runs_written"] += 1
        self.counts["bytes_written"] += nbytes
        self.catalog.add(run, len(head))
        self.attempt("write", lambda: self._room.make(0), False, folder)
        return True

    def write(self, name: str, parts: list[bytes | bytearray | memoryview]) -> bool | None:
        """Write an object within the limits; returns whether it is new, ``None`` if it alone exceeds them.

        Raises:
            OSError: it cannot be written.
        """
        if not self._room.is_limited:
            return self.connected().put_if_absent(name, parts)
        nbytes = sum(map(len, parts))
        with self._writing:
            if not self._room.make(nbytes):
                return None
            put = partial(self.connected().put_if_absent, name, parts)
            try:
                is_new = put()
            except OSError as error:
                if not is_full(error):
                    raise
                self._room.free(nbytes)
                is_new = put()
            if is_new:
                self._room.wrote(name, nbytes)
            return is_new

    def connected(self) -> Backend:
        """Backend of the store, opened if needed.

        Raises:
            OSError: it cannot be opened.
        """
        if self._backend is None:
            self._backend = connect(self.url, self._timeout, self._mode)
        return self._backend

    def agrees(self, folder: str) -> bool:
        """Whether the store's probe is like that of this process, which is written if there is none."""
        probe = self._probes.get(folder)
        if probe is None or folder in self._agreed:
            return self._agreed.get(folder, True)
        kept = self._kept_probe(folder, len(probe.data))
        if kept is None:
            with suppress(OSError):  # without write permission the store can still be read
                self.write(probe_name(folder), [probe.data])
            kept = self._kept_probe(folder, len(probe.data))
        difference = ""
        if kept is not None:
            is_comparable = len(kept) == len(probe.data)
            difference = probe.difference(kept) if is_comparable else "its probe has another size"
        if difference:
            self._warn(
                f"probe {folder}",
                "%s has keys and values of this model that it does not compute, and is not used for it: %s",
                self.name,
                difference,
            )
        self._agreed[folder] = not difference
        return not difference

    def damaged(self, name: str, why: str) -> None:
        """Quarantine a damaged object, so that it is not found again but can be examined."""
        self.counts["damaged"] += 1
        self.damages.append(why)
        self._forget(name)
        self.catalog.ignore(name, True)
        self._warn("damaged", "%s has a damaged run, which is not used: %s: %s", self.name, name, why)

        def move() -> None:
            quarantine(self.connected(), name)
            self.catalog.ignore(name, False)

        self.attempt("write", move, None, "quarantine")

    def left_out(self, name: str, why: Exception) -> None:
        """Record an object that has another format or may not be read."""
        self.counts["left_out"] += 1
        self._warn(f"left out {type(why)}", "%s has objects that are not used: %s: %s", self.name, name, why)

    def attempt(self, way: str, call: Callable[[], _Result], default: _Result, folder: str = "") -> _Result:
        """Result of a call, or ``default`` if the store fails.

        If a permission is missing in ``folder``, the operation is suspended there, but not in other folders.
        """
        if self._is_down(way, folder):
            self.counts["refused"] += 1
            return default
        try:
            return call()
        except OSError as error:
            self.counts[f"{way}_errors"] += 1
            where = f"/{folder}" if folder and isinstance(error, PermissionError) else ""
            self._down_until[way + where] = time.monotonic() + self._retry
            message = "%s cannot be %s, prefixes are computed instead: %s"
            verb = "read" if way == "read" else "written"
            self._warn(f"{way} {bool(where)}", message, f"{self.name}{where}", verb, error)
            return default

    def pause(self) -> None:
        """List the store no more unless a look-up waits for that."""
        self.catalog.pause()

    def close(self, timeout: float) -> None:
        """Start no more background reads."""
        self.catalog.close(timeout)

    def after_fork(self) -> None:
        """Continue in a child process, without the threads and their connections."""
        self.readers, self.catalog = Readers(), Catalog(self)
        self._heads = Heads(sums=self.sums)
        self._room.after_fork()
        self._writing = threading.Lock()
        self.speed = Speed()
        self._backend = None

    def _is_down(self, way: str, folder: str) -> bool:
        until = max(self._down_until.get(x, 0.0) for x in (way, f"{way}/{folder}"))
        return time.monotonic() < until

    def _evicted(self, name: str) -> None:
        self._forget(name)
        self.counts["runs_evicted"] += kind_of(name) is not ObjectKind.MARK

    def _get(self, entry: IndexEntry, ranges: list[tuple[int, int]]) -> list[memoryview] | None:
        try:
            return self.connected().get_ranges(entry.name, [(0, entry.head_size), *ranges])
        except FileNotFoundError:  # removed by another process
            self._forget(entry.name)
            return None
        except PermissionError as error:
            self._forget(entry.name)
            self.left_out(entry.name, error)
            return None
        except MemoryError:
            self._warn("memory", "%s has a prefix for which there is no memory", self.name)
            return None

    def _kept_probe(self, folder: str, size: int) -> bytes | None:
        try:
            began = time.perf_counter()
            found = bytes(self.connected().get_ranges(probe_name(folder), [(0, size + 1)])[0])
            self.speed.note(time.perf_counter() - began, 0)
        except FileNotFoundError:
            return None
        return found

    def _forget(self, name: str) -> None:
        self._touched.pop(name, None)
        self._room.remove(name)
        self.catalog.remove(name)

    def _warn(self, about: str, message: str, *args: object) -> None:
        """Log a warning once for each ``about``."""
        if about not in self._warned:
            self._warned.add(about)
            _LOG.warning(message, *args)
