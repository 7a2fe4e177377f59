"""Catalog of a store's runs, which a thread of low priority lists."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import TextDigests
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import DamagedRun, OtherFormat, Run
from kvloom.store.index import Folder, IndexedStore, IndexEntry, Segment
from kvloom.store.names import ObjectKind, folder_of, kind_of
from kvloom.store.tiers.heads import FIRST_READ, head_from, head_of
from kvloom.store.tiers.patience import Speed
from kvloom.store.tiers.readers import Readers, started

_LOG: Final = logging.getLogger("kvloom.store")
_REFRESH_SECONDS: Final = 2.0
"""Interval of listing runs of other processes, if a listing takes at most a twentieth of it."""
_SHARE: Final = 20
_SLICE: Final = 1e-3
"""Maximum seconds of work for which other threads may wait for Python's lock."""
_AT_ONCE: Final = 64
"""Number of heads that are read before the first is parsed."""


class CatalogedStore(IndexedStore, Protocol):
    """The part of a store that its catalog needs."""

    speed: Speed
    readers: Readers

    def attempt(self, way: str, call: Callable[[], bool], default: bool, folder: str = "") -> bool:
        """Result of a call, or ``default`` if the store fails or denies it in this folder."""

    def agrees(self, folder: str) -> bool:
        """Whether a folder is used."""


class Catalog:
    """Runs of each fingerprint of one store, by digest. Thread-safe.

    Args:
        store: The store.
    """

    def __init__(self, store: CatalogedStore) -> None:
        self._store = store
        self.refresh_seconds = _REFRESH_SECONDS
        self._changed = threading.Condition(threading.RLock())
        self._folders: dict[str, Folder] = {}
        self._wanted: list[Folder] = []
        self._now: Folder | None = None
        self._thread: threading.Thread | None = None
        self._num_waiting = 0
        self._is_closed = self._is_paused = False
        self._began = self._used = 0.0  # present listing, monotonic; seconds that the thread has worked

    def watch(self, fingerprint: Fingerprint) -> None:
        """Begin to list the runs of a fingerprint."""
        with self._changed:
            folder = self._folder(fingerprint)
            if not folder.num_listed:
                self._want(folder)

    def wait(self, fingerprint: Fingerprint, seconds: float) -> None:
        """Wait for the first listing of a fingerprint, for at most ``seconds``."""
        with self._changed:
            folder = self._folder(fingerprint)
            if not folder.num_listed:
                self._listed(folder, seconds)

    def find(
        self, fingerprint: Fingerprint, prefixes: TextDigests, start: int, num_tokens: int, wait: float | None
    ) -> list[Segment]:
        """``Index.find`` over all runs of a fingerprint.

        Args:
            fingerprint: Fingerprint of the runs.
            prefixes: As of ``Index.find``.
            start: The same.
            num_tokens: The same.
            wait: Maximum seconds to wait for a listing, if it may help; ``None`` for no limit.
        """
        with self._changed:
            folder = self._folder(fingerprint)
            if not folder.num_listed:
                self._listed(folder, wait)
            found = folder.index.find(prefixes, start, num_tokens)
            if (not found or found[-1].end < num_tokens) and self._is_stale(folder, wait):
                if wait is not None and folder.took > wait:  # the next look-up will have it
                    self._want(folder)
                    return found
                self._listed(folder, wait)
                found = folder.index.find(prefixes, start, num_tokens)
            return found

    def refresh(self, fingerprint: Fingerprint) -> None:
        """List the store again, and wait for that."""
        with self._changed:
            folder = self._folder(fingerprint)
            if self._now is folder:  # began before this call
                self._listed(folder, None)
            self._listed(folder, None)

    def known(self, fingerprint: Fingerprint, prefixes: TextDigests, ends: range) -> set[int]:
        """Ends of pages, among ``ends``, of known runs; sends no request."""
        with self._changed:
            index = self._folder(fingerprint).index
            start = max(ends[0] - ends.step, 0)
            reached = max((x.end for x in index.find(prefixes, start, ends[-1])), default=0)
            digests = prefixes.digests(ends)
            return {end for end, x in zip(ends, digests, strict=True) if end <= reached or x in index}

    def has(self, run: Run) -> bool:
        """Whether every page of a run is known to be in the store."""
        with self._changed:
            index = self._folder(run.fingerprint).index
            return all(digest in index for digest in run.digests)

    def add(self, run: Run, head_size: int) -> None:
        """Add a run that was written."""
        with self._changed:
            folder = self._folder(run.fingerprint)
            folder.index.add(IndexEntry.of(run, head_size))
            folder.written.add(run.name)

    def look_again(self, run: Run) -> None:
        """Read the head of the object with a run's name again soon, even if it is known."""
        with self._changed:
            folder = self._folder(run.fingerprint)
            folder.index.remove(run.name)
            folder.doubted.add(run.name)
            folder.must_list = True
            self._want(folder)

    def remove(self, name: str) -> None:
        """Remove a run from the catalog."""
        with self._changed:
            for folder in self._folders.values():
                folder.must_list |= name in folder.index.entries
                folder.index.remove(name)

    def ignore(self, name: str, is_ignored: bool) -> None:
        """Ignore an object in all listings, or no longer, once its name is free."""
        with self._changed:
            for folder in self._folders.values():
                folder.index.remove(name)
                (folder.ignored.add if is_ignored else folder.ignored.discard)(name)

    def corrected(self, entry: IndexEntry) -> IndexEntry | None:
        """Entry of this name from its present head; ``None`` if the object is missing.

        Raises:
            DamagedRun: its head is no run's.
        """
        backend, sums = self._store.connected(), self._store.sums
        listed = [x for x in backend.list_stored(f"{folder_of(entry.name)}/") if x.name == entry.name]
        if not listed:
            self.remove(entry.name)
            return None
        run, start = head_of(backend, listed[0], sums)
        found = IndexEntry.of(run, start)
        with self._changed:
            index = self._folder(run.fingerprint).index
            index.remove(entry.name)
            index.add(found)
        return found

    def forget(self, fingerprint: Fingerprint) -> None:
        """Discard the entries of a fingerprint, to be listed again before use."""
        with self._changed:
            self._folders.pop(self._store.sums.folder(fingerprint.digest), None)

    def pause(self) -> None:
        """Stop listing until a look-up waits for it."""
        with self._changed:
            self._is_paused = True
            if not self._num_waiting:
                self._wanted.clear()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Stop listing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread not in (None, threading.current_thread()):
            thread.join(timeout)

    def _folder(self, fingerprint: Fingerprint) -> Folder:
        name = self._store.sums.folder(fingerprint.digest)
        if name not in self._folders:
            self._folders[name] = Folder(fingerprint, name)
        return self._folders[name]

    def _is_stale(self, folder: Folder, wait: float | None) -> bool:
        """Whether the last listing is too old; sooner if the wait has no limit."""
        seconds = 0.0 if wait is None else _SHARE * folder.took
        return time.monotonic() - folder.ended >= max(self.refresh_seconds, seconds)

    def _want(self, folder: Folder) -> None:
        """Request a listing of a folder; the caller holds the lock."""
        if self._is_closed or folder in self._wanted or (self._now is folder and not folder.num_listed):
            return
        if self._is_paused and not self._num_waiting:
            return
        self._wanted.append(folder)
        self._thread = self._thread or started(self._run, "kvloom-list")
        if self._thread is None:  # as a listing that failed, or waiting threads would wait forever
            self._wanted.remove(folder)
            folder.end(time.monotonic())
        self._changed.notify_all()

    def _listed(self, folder: Folder, wait: float | None) -> None:
        """Wait until a folder is listed again; the caller holds the lock."""
        if wait is not None and (
            wait <= 0 or (self._now is folder and time.monotonic() - self._began > wait)
        ):
            self._want(folder)  # a listing that took longer than the wait will hardly end within it
            return
        before = folder.num_listed
        self._num_waiting += 1
        self._changed.notify_all()  # wake a thread that rests
        try:
            if self._now is not folder:
                self._want(folder)
            self._changed.wait_for(lambda: folder.num_listed > before or self._is_closed, wait)
        finally:
            self._num_waiting -= 1

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or not self._wanted:
                    self._thread = None
                    return
                folder = self._now = self._wanted.pop(0)
                self._began = time.monotonic()
            began, self._used, is_stopped = self._began, time.thread_time(), False
            try:
                self._store.attempt("read", partial(self._list, folder), False, folder.name)
            except CancelledError:
                is_stopped = folder.must_list = True
            except Exception:  # or waiting threads would wait forever
                _LOG.exception("%s was not listed", folder.fingerprint.folder)
            with self._changed:
                self._now = None
                if not is_stopped:
                    folder.end(began)
                elif self._num_waiting:  # a look-up that began to wait meanwhile
                    self._wanted.append(folder)
                self._changed.notify_all()

    def _rest(self) -> None:
        """Sleep after each slice of work, unless a thread waits for the listing."""
        worked = time.thread_time() - self._used
        if worked >= _SLICE:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._num_waiting or self._is_closed or self._is_paused, _SHARE * worked
                )
            self._used = time.thread_time()
        if self._is_closed or (self._is_paused and not self._num_waiting):
            raise CancelledError

    def _list(self, folder: Folder) -> bool:
        """Update a folder's runs by a listing."""
        name = folder.name
        if not self._store.agrees(name):
            return False
        backend, began = self._store.connected(), time.time()
        version = backend.version(f"{name}/")
        with self._changed:
            if version is not None and version == folder.version and not folder.must_list:
                return True
            folder.must_list = False
            folder.written.clear()
        asked = time.perf_counter()
        listed = []
        for x in backend.list_stored(f"{name}/"):
            listed.append(x)
            self._rest()
        if len(listed) < _AT_ONCE:  # one request instead of many
            self._store.speed.note(time.perf_counter() - asked, 0)
        here = {x.name: x for x in listed if kind_of(x.name) is ObjectKind.RUN}
        objects = [x for x in listed if kind_of(x.name) is ObjectKind.INDEX and x.name not in folder.ignored]
        with self._changed:
            for gone in folder.index.entries.keys() - here.keys() - folder.written:
                folder.index.remove(gone)
        for entry in folder.objects.read(self._store, objects, self._rest):
            is_here = entry.name in here and here[entry.name].size == entry.size
            is_right = is_here and entry.may_be_of(folder.fingerprint)
            if is_right and entry.name not in folder.doubted:
                with self._changed:
                    folder.index.add(entry)
            self._rest()
        new = [
            x for x in here.values() if x.name not in folder.index.entries and x.name not in folder.ignored
        ]
        doubtful: dict[Stored, str] = {}
        for some in range(0, len(new), _AT_ONCE):
            for entry in self._entries(folder, new[some : some + _AT_ONCE], doubtful):
                with self._changed:
                    folder.index.add(entry)
        self._put_aside(folder, doubtful)
        # A change within the clock's last tick may be followed by another in the same tick.
        folder.version = version if version is not None and version < began - _REFRESH_SECONDS else None
        with self._changed:
            entries = dict(folder.index.entries)
        with suppress(OSError):  # without write permission the store can still be read
            folder.objects.tidy(self._store, entries, self._rest)
        return True

    def _put_aside(self, folder: Folder, doubtful: Mapping[Stored, str]) -> None:
        """Quarantine damaged objects, except those replaced after the listing, which are read again."""
        if not doubtful:
            return
        backend = self._store.connected()
        now = {x.name: x for x in backend.list_stored(f"{folder.name}/")}
        for x, why in doubtful.items():
            folder.must_list = True
            if x.name in now and now[x.name].size == x.size:
                try:
                    run, _ = head_of(backend, now[x.name], self._store.sums)
                    is_damaged = run.name != x.name or run.fingerprint != folder.fingerprint
                except FileNotFoundError:
                    is_damaged = False
                except DamagedRun:
                    is_damaged = True
                if is_damaged:
                    self._store.damaged(x.name, why)

    def _entries(
        self, folder: Folder, some: Sequence[Stored], doubtful: dict[Stored, str]
    ) -> Iterator[IndexEntry]:
        """Entries from the heads of runs that can be read; problems of the others are noted."""
        backend = self._store.connected()
        calls = [(x, self._store.readers.submit(partial(self._head, backend, x))) for x in some]
        failures = 0
        for x, call in calls:
            try:
                run, start = head_from(call.result(), backend, x, self._store.sums)
                if run.name != x.name:
                    raise DamagedRun("the head is not the one of this name")
                if run.fingerprint != folder.fingerprint:
                    raise DamagedRun(run.fingerprint.difference(folder.fingerprint))
                yield IndexEntry.of(run, start)
                failures = 0
            except FileNotFoundError:
                pass
            except OtherFormat as error:
                folder.ignored.add(x.name)
                self._store.left_out(x.name, error)
            except DamagedRun as error:
                doubtful[x] = str(error)
            except OSError as error:
                folder.must_list = True  # it may be readable later
                failures += 1
                if failures > 2 and not isinstance(error, PermissionError):
                    for _, other in calls:
                        other.cancel()
                    raise
                self._store.left_out(x.name, error)
            self._rest()

    def _head(self, backend: Backend, x: Stored) -> bytes:
        asked = time.perf_counter()
        data = bytes(backend.get_ranges(x.name, [(0, min(x.size, FIRST_READ))])[0])
        self._store.speed.note(time.perf_counter() - asked, 0)
        return data
