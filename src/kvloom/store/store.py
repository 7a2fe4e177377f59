"""Stores in a row below pools of pages: read in order, written behind."""

import logging
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

from kvloom.errors import ArgumentError
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import Run, page_bytes
from kvloom.store.index import Segment
from kvloom.store.prefixes import LastTexts, Prefixes, salt_digest, token_bytes
from kvloom.store.probe import Probe
from kvloom.store.tier import Piece, Tier

_LOG: Final = logging.getLogger("kvloom.store")
_LOWEST_PRIORITY: Final = 19


class _Write(NamedTuple):
    """A run to be written."""

    run: Run
    data: bytearray | memoryview
    tiers: Sequence[Tier]


class KVStore:
    """Keys and values that outlive the process.

    Pages that are sealed are written behind, in a thread; ``flush`` and ``close`` wait for it, and so does
    the end of the process. A prefix is looked for in the first store, and what it lacks in the next; what a
    later store gave is written to those before it. Several pools, and several processes, may share a store.

    Whatever a store does wrong is a missing prefix and one warning, never an error of those who use it.

    Args:
        urls: ``file:///absolute/path``, ``s3://``, ``gs://``, ``az://``, ``redis://`` or ``memory://name``.
        max_bytes: Bytes that each store may hold; the least recently used go first.
        max_age: Seconds after which what is not used goes.
        keep_text: Whether token ids are written. Without them a run has digests of its text alone, and is
            found and checked by these.
        read: ``"cheaper"`` reads a prefix if that takes less time than computing it, ``"always"`` always.
        timeout: Seconds after which one request to a remote store gives up.
        max_queued: Bytes that may wait to be written; what comes beyond them is not written.

    Raises:
        ArgumentError: a URL names no kind of store, or another argument is not allowed.
        ModuleNotFoundError: the library of this kind of store is not installed.
    """

    def __init__(
        self,
        *urls: str,
        max_bytes: int | None = None,
        max_age: float | None = None,
        keep_text: bool = True,
        read: Literal["cheaper", "always"] = "cheaper",
        timeout: float = 5.0,
        max_queued: int = 256 << 20,
    ) -> None:
        if not urls or not all(isinstance(url, str) for url in urls):
            raise ArgumentError(f"store must be one URL or more, got {urls!r}")
        if read not in ("cheaper", "always"):
            raise ArgumentError(f"read must be 'cheaper' or 'always', got {read!r}")
        for name, limit in (("max_bytes", max_bytes), ("max_age", max_age), ("max_queued", max_queued)):
            if limit is not None and not limit >= 0:
                raise ArgumentError(f"{name} must be at least 0, got {limit!r}")
        limits: dict[str, Any] = {"timeout": timeout, "max_bytes": max_bytes, "max_age": max_age}
        self.tiers = [Tier(url, **limits) for url in urls]
        self.counts: Counter[str] = Counter()
        self.keep_text = keep_text
        self._reads_always = read == "always"
        self._texts = LastTexts()
        self._writer = _Writer(max_queued)
        self._closing = weakref.finalize(self, self._writer.close)

    def __enter__(self) -> "KVStore":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def expect(self, fingerprint: Fingerprint, probe: Probe) -> None:
        """Use what is there of a fingerprint only where the store keeps a probe like this one.

        A store that keeps none gets this one. One that keeps another is neither read nor written for this
        fingerprint, which is logged once.

        Args:
            fingerprint: Whose keys and values.
            probe: What their model computes.
        """
        for tier in self.tiers:
            tier.expect(fingerprint, probe)

    def find(self, fingerprint: Fingerprint, salt: str, tokens: Sequence[int], start: int = 0) -> int:
        """How far the stores continue a text, by what they list; nothing is read.

        Args:
            fingerprint: Whose keys and values.
            salt: Only what was saved under it is found.
            tokens: Ids from the start of the text, signed 64-bit.
            start: Tokens that are there already.

        Returns:
            The end of the last page that is found, ``start`` if none is.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        prefixes = self.prefixes(fingerprint, salt, tokens)
        end, before = start, -1
        while before < end < len(tokens):
            before = end
            for tier in self.tiers:
                for segment in tier.find(fingerprint, prefixes, end, len(tokens)):
                    end = segment.end
        return end

    def prefixes(self, fingerprint: Fingerprint, salt: str, tokens: Sequence[int]) -> Prefixes:
        """The digests of a text; those of the last texts are kept.

        Args:
            fingerprint: Whose keys and values.
            salt: Who may find them.
            tokens: Ids from the start of the text, signed 64-bit.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        return self._texts.prefixes(fingerprint.digest, salt_digest(salt), tokens)

    def refresh(self, fingerprint: Fingerprint) -> None:
        """Learn now what other processes wrote and removed, rather than within two seconds."""
        for tier in self.tiers:
            tier.refresh(fingerprint)

    def load(
        self,
        fingerprint: Fingerprint,
        salt: str,
        tokens: Sequence[int],
        start: int = 0,
        *,
        heads: range | None = None,
        seconds_per_token: float | None = None,
    ) -> list[Piece]:
        """Pages that continue a text, checked byte by byte.

        Args:
            fingerprint: Whose keys and values.
            salt: Only what was saved under it is found.
            tokens: Ids from the start of the text, signed 64-bit.
            start: Tokens that are there already.
            heads: Which of ``fingerprint.num_heads``; ``None`` for all.
            seconds_per_token: How long computing takes; ``None`` reads whatever there is.

        Returns:
            Pieces one behind the other, the first of which has token ``start``.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        digest = salt_digest(salt)
        prefixes = self.prefixes(fingerprint, salt, tokens)
        pieces: list[Piece] = []
        at, is_waiting = start, True
        while is_waiting and at < len(tokens):
            is_waiting = False
            for i, tier in enumerate(self.tiers):
                for segment in tier.find(fingerprint, prefixes, at, len(tokens)):
                    nbytes = len(segment.pages) * page_bytes(fingerprint, segment.entry.page_size)
                    if not self._pays(tier, nbytes * fingerprint.num_heads, segment, seconds_per_token):
                        self.counts["tokens_not_worth_reading"] += segment.end - at
                        return pieces
                    piece = tier.read(fingerprint, digest, prefixes, segment, heads)
                    if piece is None:
                        break
                    pieces.append(piece)
                    at, is_waiting = segment.end, True
                    if i and heads is None:
                        self._promote(piece, self.tiers[:i])
        self.counts["tokens_read"] += at - start
        self.counts["tokens_missing"] += len(tokens) - at
        return pieces

    def _pays(self, tier: Tier, nbytes: int, segment: Segment, seconds_per_token: float | None) -> bool:
        """Whether to read; what is read first tells how long reading takes."""
        if self._reads_always or seconds_per_token is None or tier.seconds_per_byte is None:
            return True
        return tier.seconds_per_byte * nbytes < seconds_per_token * (segment.end - segment.start)

    def missing(self, fingerprint: Fingerprint, prefixes: Prefixes, ends: range) -> list[int]:
        """The pages, by their ends, that the first store does not have and will not have."""
        known = self.tiers[0].known(fingerprint, prefixes, ends)
        digests = zip(ends, prefixes.digests(ends), strict=True)
        return [end for end, digest in digests if end not in known and not self._writer.has(digest)]

    def save(
        self,
        fingerprint: Fingerprint,
        salt: str,
        tokens: Sequence[int],
        first: int,
        page_size: int,
        data: bytearray,
    ) -> bool:
        """Write pages behind.

        Args:
            fingerprint: Whose keys and values.
            salt: Who may find them.
            tokens: Ids from the start of the text to the end of the last page.
            first: Position of the first token of the pages.
            page_size: Tokens in a page.
            data: The pages of each head, heads outermost; not to be changed any more.

        Returns:
            Whether there was room in the queue.
        """
        digest = salt_digest(salt)
        ends = range(first, len(tokens) + 1, page_size)
        before, *digests = self.prefixes(fingerprint, salt, tokens).digests(ends)
        text = token_bytes(tokens[first:]) if self.keep_text else None
        run = Run(fingerprint, digest, first, page_size, before, tuple(digests), text)
        return self._put(run, data, self.tiers)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``save`` would take so many bytes now."""
        return self._writer.has_room(nbytes)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was saved is written, or could not be.

        Args:
            timeout: Seconds to wait for; ``None`` waits for ever.

        Returns:
            Whether nothing is left.
        """
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Wait until everything is written, then write no more; what is looked up is still found."""
        self._closing()

    def report(self) -> dict[str, Any]:
        """Counts of tokens, runs and bytes, of all stores and then of each by its URL."""
        tiers = {
            tier.url: dict(tier.counts) | {"seconds_per_byte": tier.seconds_per_byte} for tier in self.tiers
        }
        return dict(self.counts) | {"queued": self._writer.num_queued, "stores": tiers}

    def _promote(self, piece: Piece, tiers: Sequence[Tier]) -> None:
        """Write what a later store gave to those before it."""
        run, pages = piece.run, piece.segment.pages
        size = run.page_size * 8
        text = None if run.tokens is None else run.tokens[pages.start * size : pages.stop * size]
        digests = (run.before, *run.digests)
        part = Run(
            run.fingerprint,
            run.salt,
            run.first + pages.start * run.page_size,
            run.page_size,
            digests[pages.start],
            digests[pages.start + 1 : pages.stop + 1],
            text,
        )
        self._put(part, piece.data[piece.start :], tiers)

    def _put(self, run: Run, data: bytearray | memoryview, tiers: Sequence[Tier]) -> bool:
        # Here and not in the thread: a checksum of a page holds Python's lock, for which steps would wait.
        is_taken = self._writer.put(_Write(run.with_checksums(memoryview(data)), data, tiers))
        self.counts["runs_saved" if is_taken else "runs_dropped"] += 1
        return is_taken


def open_store(store: KVStore | str | Sequence[str]) -> KVStore:
    """A store, by itself or by its URLs.

    Raises:
        ArgumentError: as ``KVStore``.
        ModuleNotFoundError: as ``KVStore``.
    """
    if isinstance(store, KVStore):
        return store
    return KVStore(store) if isinstance(store, str) else KVStore(*store)


class _Writer:
    """A thread that writes runs in order; it starts with the first."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._queue: deque[_Write] = deque()
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._digests: Counter[bytes] = Counter()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_queued(self) -> int:
        """Runs that are not written yet."""
        return len(self._queue)

    def has(self, digest: bytes) -> bool:
        """Whether a page that ends with this digest is about to be written."""
        return digest in self._digests

    def has_room(self, nbytes: int) -> bool:
        return not self._is_closed and self._num_bytes + nbytes <= self._max_queued

    def put(self, write: _Write) -> bool:
        """Take a run to be written, if there is room."""
        with self._changed:
            if not self.has_room(len(write.data)):
                return False
            self._queue.append(write)
            self._num_bytes += len(write.data)
            self._digests.update(write.run.digests)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvloom-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def flush(self, timeout: float | None) -> bool:
        """Wait until nothing is queued."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: not self._queue, timeout))

    def close(self) -> None:
        """Write what is queued, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        _give_way()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                write = self._queue[0]
            try:
                for tier in write.tiers:
                    tier.put(write.run, write.data)
            except Exception:  # a thread that ended would let the queue grow full
                _LOG.exception("a run was not written")
            with self._changed:
                self._queue.popleft()
                self._num_bytes -= len(write.data)
                self._digests -= Counter(write.run.digests)
                self._changed.notify_all()


def _give_way() -> None:
    """Leave processors to those who compute: this thread takes what they do not use."""
    if sys.platform == "linux":  # elsewhere a priority is that of the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
