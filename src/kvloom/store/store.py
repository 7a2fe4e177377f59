"""Chain of stores below pools of pages: read in order, written in the background."""

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal

from kvloom.core.arguments import expect_least
from kvloom.errors import ArgumentError
from kvloom.store.digests import TextDigests, digests_of, salt_digest
from kvloom.store.fingerprint import Fingerprint, Probe
from kvloom.store.format import Run, page_bytes
from kvloom.store.index import Segment
from kvloom.store.sums import PLAIN, Sums
from kvloom.store.tiers.patience import Patience
from kvloom.store.tiers.tier import ReadPages, Tier
from kvloom.store.tiers.writer import EXIT_SECONDS, Write, Writer

_MODES: Final = (0o600, 0o640, 0o660, 0o644)
_LISTING_SECONDS: Final = 6.0
"""Seconds that the end of a process waits for a request that lists a store."""


class KVStore:
    """Persistent keys and values.

    A thread writes sealed pages in the background; ``flush``, ``close`` and the end of the process wait for
    it. A prefix is looked up in the first store, and its missing part in the next; what a later store has is
    copied to earlier ones. Several pools, threads and processes may share a store. A child of ``os.fork``
    continues with an empty queue; local folders and Redis work in it, object stores do not.

    Any failure of a store is a missing prefix and one warning, never an error for its users.

    Args:
        urls: ``file:///absolute/path``, ``s3://``, ``gs://``, ``az://``, ``redis://`` or ``memory://name``.
        max_bytes: Bytes that each store may hold; the least recently used are evicted first.
        max_age: Seconds after which an unused run is evicted.
        keep_text: Whether token ids are written. Without them a run has only digests of its text, by which it
            is found and checked.
        read: ``"cheaper"`` reads a prefix if that takes less than half of computing it, ``"always"`` always.
        timeout: Timeout of one request to a remote store, in seconds.
        max_queued: Maximum bytes that wait to be written; pages beyond it are not written.
        max_wait: Maximum seconds that a look-up waits for stores. ``None``: a fortieth of the time to compute
            the prefix, at least 20 ms, with at most a tenth of the computing time for a listing; or up to the
            computing time if reading is known to be faster. No limit with ``read="always"``, or if the
            computing time is unknown.
        mode: Permissions of files in a local folder: 0o600, 0o640, 0o660 or 0o644. Folders can be entered by
            those who may read the files.
        key: Secret of 16 to 64 bytes that users of the store share. Checksums are then BLAKE2b with this key,
            in folders of their own, and files of anyone without the key are not used.

    Raises:
        ArgumentError: a URL names no kind of store, or with limits a folder of other files; or another
            argument is invalid.
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
        max_wait: float | None = None,
        mode: int = 0o600,
        key: bytes | None = None,
    ) -> None:
        if not urls or not all(isinstance(url, str) for url in urls):
            wrong = [url for url in urls if not isinstance(url, str)]
            raise ArgumentError(f"store must be one URL or more, got {repr(wrong[0]) if wrong else 'none'}")
        if read not in ("cheaper", "always"):
            raise ArgumentError(f"read must be 'cheaper' or 'always', got {read!r}")
        given = {"max_bytes": max_bytes, "max_age": max_age, "max_queued": max_queued, "max_wait": max_wait}
        for name, limit in given.items():
            if limit is not None:
                expect_least(name, limit, 0)
        if mode not in _MODES:
            raise ArgumentError(f"mode must be one of {', '.join(map(oct, _MODES))}, got {mode!r}")
        limits: dict[str, Any] = {"timeout": timeout, "max_bytes": max_bytes, "max_age": max_age}
        sums = PLAIN if key is None else Sums(key)
        self.tiers = [Tier(url, mode=mode, sums=sums, **limits) for url in urls]
        self.counts: Counter[str] = Counter()
        self.keep_text, self.max_bytes = keep_text, max_bytes
        self._reads_always, self._max_wait, self._sums = read == "always", max_wait, sums
        self._writer = Writer(max_queued)
        self._closing = weakref.finalize(self, _end, self._writer, self.tiers)
        _STORES.add(self)

    def __enter__(self) -> "KVStore":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def expect(self, fingerprint: Fingerprint, probe: Probe) -> None:
        """Use runs of a fingerprint only in stores whose probe equals this one.

        A store without a probe gets this one. A store with another is neither read nor written for this
        fingerprint, which is logged once.

        Args:
            fingerprint: Model and format of the keys and values.
            probe: Results of the model.
        """
        for tier in self.tiers:
            tier.expect(fingerprint, probe)

    def watch(self, fingerprint: Fingerprint, wait: float = 0.0) -> None:
        """Begin to list the runs of a fingerprint, and wait for that, at most ``wait`` seconds."""
        for tier in self.tiers:
            tier.catalog.watch(fingerprint)
        deadline = time.monotonic() + wait
        for tier in self.tiers:
            tier.catalog.wait(fingerprint, deadline - time.monotonic())

    def find(self, fingerprint: Fingerprint, salt: str, tokens: Sequence[int], start: int = 0) -> int:
        """Find how far the stores continue a text, by their listings; reads nothing.

        Args:
            fingerprint: Model and format of the keys and values.
            salt: Only runs that were saved under it are found.
            tokens: Ids from the start of the text, signed 64-bit.
            start: Number of tokens that are available already.

        Returns:
            End of the last page that is found; ``start`` if none is.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        return self.reach(fingerprint, self.prefixes(fingerprint, salt, tokens), start, len(tokens))

    def reach(self, fingerprint: Fingerprint, prefixes: TextDigests, start: int, num_tokens: int) -> int:
        """``find`` of the first ``num_tokens`` tokens of a text, given its ``prefixes``."""
        end, before = start, -1
        while before < end < num_tokens:
            before = end
            for tier in self.tiers:
                for segment in tier.catalog.find(fingerprint, prefixes, end, num_tokens, None):
                    end = segment.end
        return end

    def prefixes(self, fingerprint: Fingerprint, salt: str, tokens: Sequence[int]) -> TextDigests:
        """Digests of a text, possibly of more tokens; a ``Text`` keeps them, and so its prefixes have them.

        Args:
            fingerprint: Model and format of the keys and values.
            salt: Salt of the text.
            tokens: Ids from the start of the text, signed 64-bit.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        return digests_of(fingerprint.digest, salt_digest(salt), tokens)

    def refresh(self, fingerprint: Fingerprint) -> None:
        """List what other processes wrote and removed now, not within two seconds."""
        for tier in self.tiers:
            tier.catalog.refresh(fingerprint)

    def load(
        self,
        fingerprint: Fingerprint,
        salt: str,
        tokens: Sequence[int],
        start: int = 0,
        *,
        heads: range | None = None,
        seconds_per_token: float | None = None,
    ) -> list[ReadPages]:
        """Read pages that continue a text, and check every byte.

        Args:
            fingerprint: Model and format of the keys and values.
            salt: Only runs that were saved under it are found.
            tokens: Ids from the start of the text, signed 64-bit.
            start: Number of tokens that are available already.
            heads: Heads among ``fingerprint.num_heads``; ``None`` for all.
            seconds_per_token: Time to compute a token; ``None`` to read whatever there is.

        Returns:
            Consecutive pieces, the first of which has token ``start``.

        Raises:
            ArgumentError: a token is not a signed 64-bit integer.
        """
        prefixes = self.prefixes(fingerprint, salt, tokens)
        if self._reads_always:
            seconds_per_token = None
        patience = Patience(seconds_per_token, len(tokens) - start, self._max_wait)
        pieces: list[ReadPages] = []
        at, is_waiting = start, True
        while is_waiting and at < len(tokens):
            is_waiting = False
            for i, tier in enumerate(self.tiers):
                segments = tier.catalog.find(fingerprint, prefixes, at, len(tokens), patience.glance)
                if segments:
                    read = partial(tier.read, fingerprint, salt_digest(salt), prefixes, heads=heads)
                    nbytes = [
                        len(x.pages) * page_bytes(fingerprint, x.entry.page_size) * fingerprint.num_heads
                        for x in segments
                    ]
                    for piece in self._read(tier, segments, nbytes, read, patience):
                        pieces.append(piece)
                        at, is_waiting = piece.segment.end, True
                        if i and heads is None:
                            self._promote(piece, self.tiers[:i])
        self.counts["tokens_read"] += at - start
        self.counts["tokens_missing"] += len(tokens) - at
        return pieces

    def _read(
        self,
        tier: Tier,
        segments: Sequence[Segment],
        nbytes: Sequence[int],
        read: Callable[[Segment], ReadPages | None],
        patience: Patience,
    ) -> Iterator[ReadPages]:
        """Read the pages of segments, up to the first that is not read in time."""
        num_tokens = segments[-1].end - segments[0].start
        seconds = tier.speed.seconds(sum(nbytes), -(-len(segments) // tier.readers.most))
        is_known = tier.speed.is_known(max(nbytes))
        wait = patience.wait(num_tokens, seconds, is_known)
        is_worth = patience.pays(num_tokens, seconds)
        if not is_worth or (wait is not None and seconds > wait):  # the caller does not wait longer
            self.counts["tokens_too_late" if is_worth else "tokens_not_worth_reading"] += num_tokens
            if (not is_known or tier.speed.is_due(seconds)) and not tier.readers.is_busy:
                tier.readers.submit(partial(read, segments[0]))  # to measure the time
            return
        began = time.monotonic()
        calls = [tier.readers.submit(partial(read, segment)) for segment in segments]
        used: list[str] = []
        try:
            for segment, size, call in zip(segments, nbytes, calls, strict=True):
                left = None if wait is None else max(began + wait - time.monotonic(), 0.0)
                try:
                    piece = call.result(left)
                except futures.TimeoutError:
                    self.counts["tokens_too_late"] += segments[-1].end - segment.start
                    tier.speed.note(time.monotonic() - began, size)
                    return
                if piece is None:
                    return
                tier.counts["bytes_read"] += segment.entry.head_size + len(piece.data)
                used.append(segment.entry.name)
                yield piece
        finally:
            touch = partial(_touch, tier, used)
            _ = touch() if wait is None else tier.readers.submit(touch)
            for call in calls:
                call.cancel()

    def missing(self, fingerprint: Fingerprint, prefixes: TextDigests, ends: range) -> list[int]:
        """Ends of the pages that some available store does not have, even in its queue."""
        here = [
            tier.catalog.known(fingerprint, prefixes, ends)
            for tier in self.tiers
            if not tier.is_down(fingerprint)
        ]
        known = set(ends).intersection(*here)
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
        """Write pages in the background.

        Args:
            fingerprint: Model and format of the keys and values.
            salt: Salt under which they are found.
            tokens: Token ids from the start of the text to the end of the last page.
            first: Position of the first token of the pages.
            page_size: Tokens in a page.
            data: The pages of each head, heads outermost; must not be changed afterwards.

        Returns:
            Whether there was room in the queue.
        """
        prefixes = self.prefixes(fingerprint, salt, tokens)
        return self.save_part(fingerprint, salt, prefixes, first, len(tokens), page_size, data)

    def save_part(
        self,
        fingerprint: Fingerprint,
        salt: str,
        prefixes: TextDigests,
        first: int,
        end: int,
        page_size: int,
        data: bytearray,
    ) -> bool:
        """``save`` the tokens from ``first`` to ``end`` of a text whose digests are known."""
        before, *digests = prefixes.digests(range(first, end + 1, page_size))
        text = prefixes.token_bytes(first, end) if self.keep_text else None
        own = salt_digest(salt), first, page_size, before, tuple(digests), text
        run = Run(fingerprint, *own, sums=self._sums)
        return self._put(run, data, self.tiers, self._before(fingerprint, prefixes, first))

    @property
    def num_lost(self) -> int:
        """Number of times that something was not written, or was found damaged."""
        names = "refused", "write_errors", "damaged"
        return self.counts["runs_dropped"] + sum(tier.counts[x] for tier in self.tiers for x in names)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``save`` would accept ``nbytes`` bytes now."""
        return self._writer.has_room(nbytes)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was saved is written, or has failed.

        Args:
            timeout: Maximum seconds to wait; ``None`` for no limit.

        Returns:
            Whether the queue is empty.
        """
        return self._writer.flush(timeout)

    def close(self, timeout: float | None = EXIT_SECONDS) -> bool:
        """Stop writing after the queue is written; look-ups still work.

        Args:
            timeout: Maximum seconds to wait for the queue; the rest is logged. ``None`` for no limit.

        Returns:
            Whether everything is written.
        """
        for tier in self.tiers:
            tier.pause()
        return self._writer.close(timeout)

    def report(self) -> dict[str, Any]:
        """Counts of tokens, runs and bytes, of all stores and then of each by its URL without password."""
        tiers = {
            tier.name: dict(tier.counts)
            | {"latency": tier.speed.latency, "seconds_per_byte": tier.speed.seconds_per_byte}
            for tier in self.tiers
        }
        return dict(self.counts) | {"queued": self._writer.num_queued, "stores": tiers}

    def after_fork(self) -> None:
        """Continue in a child process."""
        self._writer.after_fork()
        for tier in self.tiers:
            tier.after_fork()

    def _promote(self, piece: ReadPages, tiers: Sequence[Tier]) -> None:
        """Copy pages from a later store to the earlier ones."""
        part = piece.run.part(piece.segment.pages)
        self._put(replace(part, sums=self._sums), piece.data, tiers)

    def _before(
        self, fingerprint: Fingerprint, prefixes: TextDigests, end: int
    ) -> tuple[tuple[Tier, list[str]], ...]:
        """Names of the runs that stores with limits have of a text up to ``end``."""
        limited = [tier for tier in self.tiers if tier.is_limited and end]
        found = [tier.catalog.find(fingerprint, prefixes, 0, end, 0.0) for tier in limited]
        return tuple((tier, [x.entry.name for x in own]) for tier, own in zip(limited, found, strict=True))

    def _put(
        self,
        run: Run,
        data: bytearray | memoryview,
        tiers: Sequence[Tier],
        before: tuple[tuple[Tier, list[str]], ...] = (),
    ) -> bool:
        # Not in the thread: a page's checksum holds Python's lock, and would delay steps.
        is_taken = self._writer.put(Write(run.with_checksums(memoryview(data)), data, tiers, before))
        self.counts["runs_saved" if is_taken else "runs_dropped"] += 1
        return is_taken


def _touch(tier: Tier, names: Sequence[str]) -> None:
    """Record the use of runs of a text: of the first pages last, since without them no others are found."""
    for name in reversed(names):
        tier.touch(name)


def open_store(store: KVStore | str | Sequence[str]) -> KVStore:
    """Open a store by its URLs, or return it if it is open.

    Raises:
        ArgumentError: as ``KVStore``, or it is neither a store nor URLs.
        ModuleNotFoundError: as ``KVStore``.
    """
    if isinstance(store, KVStore):
        return store
    if isinstance(store, bytes) or not isinstance(store, Sequence):
        raise ArgumentError(f"store must be a KVStore, a URL or a list of URLs, got {store!r}")
    return KVStore(store) if isinstance(store, str) else KVStore(*store)


def _end(writer: Writer, tiers: Sequence[Tier]) -> None:
    """Write the queue when the store is collected or the process ends."""
    writer.close()
    for tier in tiers:
        tier.close(_LISTING_SECONDS)


def _after_fork() -> None:
    for store in list(_STORES):
        store.after_fork()


_STORES: Final[weakref.WeakSet[KVStore]] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
