"""Store below one pool of pages: sealed pages are written to it, and prefixes of texts read from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from kvloom.caches import PrefixCache
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
from kvloom.errors import ArgumentError
from kvloom.paging import Miss, PageRef, PrefixTree, interruptible
from kvloom.store import survey
from kvloom.store.backends import connect
from kvloom.store.digests import TextDigests
from kvloom.store.fingerprint import Fingerprint, Probe
from kvloom.store.format import page_bytes
from kvloom.store.store import KVStore, open_store
from kvloom.store.survey import Verdict, look_at
from kvloom.store.tiers.limits import evictions
from kvloom.store.tiers.tier import ReadPages
from kvloom.store.transfer import entries_of, pack_pages, rotation_of, smoothing_digest, unpack_pages

_TIMEOUT: Final = 30.0
_OPENING_SECONDS: Final = 1.0
"""Seconds that a new pool waits for the list of its store."""
RUN_BYTES: Final = 8 << 20
"""Maximum bytes of a run of several pages."""
_RUNS_IN_LIMIT: Final = 4
"""Number of runs for which a store with a limit has room: what is evicted is a part of a long text."""


class StoreBelow:
    """The store of one pool.

    Args:
        store: Store for the pages.
        pages: Pages of the pool.
        tree: Prefix tree of these pages.
        fingerprint: Model and format of the pool's keys and values.
        storages: Empty tensors of each layer in the pool's format, to read into before the first update.
        seconds_per_token: Time to compute a token; ``None`` to read whatever there is.
        probe: Probe of the model; ``None`` to trust the fingerprint.
    """

    def __init__(
        self,
        store: KVStore,
        pages: Pages,
        tree: PrefixTree,
        fingerprint: Fingerprint,
        storages: dict[int, Storage],
        seconds_per_token: float | None,
        probe: Probe | None = None,
    ) -> None:
        self.store = store
        self._pages, self._tree = pages, tree
        self.become(fingerprint, storages, seconds_per_token, probe)
        store.watch(fingerprint, _OPENING_SECONDS)

    def become(
        self,
        fingerprint: Fingerprint,
        storages: dict[int, Storage],
        seconds_per_token: float | None,
        probe: Probe | None,
    ) -> None:
        """Switch to another model, or to the present state of the model; arguments as of the class."""
        self.fingerprint, self._storages = fingerprint, storages
        self._seconds_per_token = seconds_per_token
        if probe is not None:
            self.store.expect(fingerprint, probe)
        self.store.watch(fingerprint)

    def known(self, tokens: Sequence[int], salt: str) -> list[bool]:
        """Whether the store is known to have each full page of a text; sends no request."""
        size = self._pages.format.page_size
        ends = range(size, len(tokens) // size * size + 1, size)
        if not ends:
            return []
        prefixes = self.store.prefixes(self.fingerprint, salt, tokens)
        known = set[int]().union(
            *(x.catalog.known(self.fingerprint, prefixes, ends) for x in self.store.tiers)
        )
        found = [end in known for end in ends]
        for i in range(len(found)):  # if a store has pages of another size, also pages next to a known one
            if not found[i] and any(found[max(i - 1, 0) : i + 2]):
                end = (i + 1) * size
                found[i] = self.store.reach(self.fingerprint, prefixes, i * size, end) >= end
        return found

    def fetch(
        self,
        tokens: Sequence[int],
        found: list[PageRef],
        salt: str,
        scope: str | None = None,
        first: int = 0,
    ) -> list[PageRef]:
        """Read the pages after those that the pool has.

        Args:
            tokens: Token ids from the start of the text, all of which may be read.
            found: Pages of the first tokens, held by the caller.
            salt: Salt of the text in the store.
            scope: Salt in the tree, if it differs.
            first: Number of the first page, if a window needs none before it.

        Returns:
            ``found`` and the pages after them, held by the caller.
        """
        size, pool = self._pages.format.page_size, self._pages.pool
        start = (first + len(found)) * size
        wanted = tokens[: len(tokens) // size * size]
        room = pool.num_free + pool.num_evictable
        wanted = wanted[: start + room * size]
        if len(wanted) == start:
            return found
        num_damaged = self._num_damaged()
        with interruptible():
            pieces = self.load(wanted, start, salt)
        if pool.events is not None and self._num_damaged() > num_damaged:
            page = (pieces[-1].segment.end if pieces else start) // size
            what = next(reversed([x for tier in self.store.tiers for x in tier.damages]), "")
            pool.events.note("damage", [], reason=what)
            pool.events.note("miss", [], cause="damaged", first=page, num_pages=1, what=what)
        end = pieces[-1].segment.end // size * size if pieces else start
        if end <= start or not self.has_storages():
            return found
        refs = pool.take((end - start) // size)
        try:
            for piece in pieces:
                self._write(piece, [ref.id for ref in refs], start, end)
            self._pages.num_writes += 1
            if pool.events is not None:
                pool.events.note("read", [ref.id for ref in refs], first=first + len(found))
            return self._tree.insert(wanted[:end], found + refs, salt if scope is None else scope, first)
        except BaseException:
            for ref in refs:
                pool.release(ref)
            raise

    def load(self, tokens: Sequence[int], start: int, salt: str) -> list[ReadPages]:
        """Pages after the first ``start`` tokens of a text, without the pool; callable from any thread."""
        return self.store.load(
            self.fingerprint, salt, tokens, start, seconds_per_token=self._seconds_per_token
        )

    def keep(self, tokens: Sequence[int], held: Row, salt: str) -> None:
        """Save the full pages of a text that the store does not have.

        Takes time for the pages since the last call alone, unless something was not written since then.

        Args:
            tokens: Token ids from the start of the text; those after the pages are not read.
            held: Table with sealed pages of the text.
            salt: Salt of the text in the store.
        """
        size, first, store, whose = self._pages.format.page_size, held.first, self.store, self.fingerprint
        num_pages = min(len(tokens) // size, first + held.table.num_pages)
        kept: _Kept | None = held.kept
        if kept is None or (kept.whose, kept.salt, kept.num_lost) != (whose, salt, store.num_lost):
            kept = _Kept(whose, salt, store.num_lost, first)
        start = max(first, kept.num_pages)
        if num_pages <= start or not self._keeps_alike():
            return
        if kept.prefixes is None:
            text = tokens[: num_pages * size]
            kept.prefixes = store.prefixes(whose, salt, text).copy(len(text))
        prefixes = kept.prefixes
        prefixes.extend(tokens[prefixes.num_tokens : num_pages * size])
        nbytes = whose.num_heads * page_bytes(whose, size)
        missing = store.missing(whose, prefixes, range((start + 1) * size, num_pages * size + 1, size))
        runs = runs_of([end // size - 1 for end in missing], longest_run(store, nbytes))
        ends = accumulate(nbytes * len(run) for run in runs)
        fitting = [run for run, end in zip(runs, ends, strict=True) if store.has_room(end)]
        if len(fitting) < len(runs):
            store.counts["runs_dropped"] += len(runs) - len(fitting)
        for run in reversed(fitting):  # the first pages are written last, and evicted last
            ids = [held.table.page(i - first).id for i in run]
            data = pack_pages(self._pages, ids, whose)
            store.save_part(whose, salt, prefixes, run.start * size, run.stop * size, size, data)
        if not any(tier.is_down(whose) for tier in store.tiers):
            held.kept, kept.num_pages = kept, num_pages

    def keep_part(self, tokens: Sequence[int], ref: PageRef, salt: str) -> None:
        """Save the last, partly filled page of a text as pages of one token.

        Args:
            tokens: Token ids from the start of the text.
            ref: The page.
            salt: Salt of the text in the store.
        """
        end = len(tokens)
        count = end % self._pages.format.page_size
        prefixes = self.store.prefixes(self.fingerprint, salt, tokens)
        nbytes = self.fingerprint.num_heads * count * page_bytes(self.fingerprint, 1)
        if not self._keeps_alike() or not self.store.missing(self.fingerprint, prefixes, range(end, end + 1)):
            return
        if not self.store.has_room(nbytes):
            self.store.counts["runs_dropped"] += 1
            return
        data = pack_pages(self._pages, [ref.id], self.fingerprint, count)
        self.store.save(self.fingerprint, salt, tokens, end - count, 1, data)

    def write_part(self, pieces: Sequence[ReadPages], ref: PageRef, start: int, end: int) -> None:
        """Write tokens that were read to a page, which they fill partly.

        Args:
            pieces: Pieces with the tokens.
            ref: The page, which has no other holder.
            start: Position of its first token.
            end: Position after its last token.
        """
        for piece in pieces:
            self._write(piece, [ref.id], start, end)
        self._pages.num_writes += 1

    def _num_damaged(self) -> int:
        return sum(tier.counts["damaged"] for tier in self.store.tiers)

    def misses(self, misses: Sequence[Miss], tokens: Sequence[int], salt: str) -> list[Miss]:
        """Misses of a text in the pool and in the store, with causes.

        Reads the heads of all runs of the first store.

        Args:
            misses: Misses in the pool.
            tokens: Token ids of the text.
            salt: Salt of the text in the store.
        """
        verdicts = self._why(tokens, salt)
        told: list[Miss] = []
        for miss in misses:
            for place in range(miss.first, miss.first + miss.num_pages):
                verdict = verdicts[place]
                kind, _, what = verdict.reason.partition(": ")
                if verdict.is_found:
                    continue
                if kind == "another model":
                    told.append(Miss("other format", place, what=what))
                elif verdict.reason.startswith("damaged"):
                    told.append(Miss("damaged", place, what=verdict.reason))
                elif told and miss.cause == "below" and told[-1].cause == "below":
                    told[-1] = told[-1]._replace(num_pages=told[-1].num_pages + 1)
                else:
                    told.append(miss._replace(first=place, num_pages=1))
        return told

    def report(self) -> dict[str, Any]:
        """Report of the store, and the time to compute a token."""
        return self.store.report() | {"seconds_per_token": self._seconds_per_token}

    def _why(self, tokens: Sequence[int], salt: str) -> list[Verdict]:
        """Verdict of the first store on each full page of a text."""
        tier = self.store.tiers[0]
        backend = connect(tier.url, _TIMEOUT)
        objects = sorted(backend.list_stored())
        found = [look_at(backend, x, tier.sums) for x in survey.runs_of(objects)]
        evicted = evictions(backend, objects, tier.sums.folder(self.fingerprint.digest))
        size = self._pages.format.page_size
        return list(survey.verdicts_on(found, evicted, self.fingerprint, salt, tokens, size))

    def has_storages(self) -> bool:
        """Whether the pool has the format of the store; allocates its tensors if there are none."""
        storages = self._pages.storages
        if not storages:
            for i, x in self._storages.items():
                storages[i] = x.like(self._pages.format.page_size)
                self._pages.fit(storages[i])
        return self._keeps_alike()

    def _keeps_alike(self) -> bool:
        storages, wanted = self._pages.storages, self.fingerprint
        kept = entries_of(storages), rotation_of(storages), smoothing_digest(storages)
        return kept == (wanted.layers, wanted.rotation, wanted.smoothing)

    def _write(self, piece: ReadPages, ids: Sequence[int], start: int, end: int) -> None:
        segment, run = piece.segment, piece.run
        at = run.first + segment.pages.start * run.page_size  # position of the first token that was read
        first = max(segment.start, start)
        tokens = range(first - at, min(segment.end, end) - at)
        if len(tokens):
            unpack_pages(piece, tokens, self._pages, ids, first - start)


def put_below(
    cache: PrefixCache,
    store: KVStore | str | Sequence[str],
    fingerprint: Fingerprint | Sequence[Fingerprint],
    seconds_per_token: float | None = None,
) -> StoreBelow:
    """Put a store below a cache: ``begin`` reads missing pages, ``commit`` writes in the background.

    Args:
        cache: Cache without sequences.
        store: A ``KVStore``, or its URLs.
        fingerprint: Model and format; its layers are ``entries_of(cache.pages.storages)``, its rotation is
            ``rotation_of`` them and its smoothing ``smoothing_digest``. A cache with windows needs one for
            each of ``cache.prefixes.groups``.
        seconds_per_token: Time to compute a token; ``None`` to read whatever there is.

        Returns: The store below the first group. ``store.flush()`` waits until everything is written,
            ``report()`` has counts.

    Raises:
        ArgumentError: ``fingerprint`` has another format of layers, or there is not one for each group; or
            ``store`` is no URL of a store.
        UnsupportedError: as ``rotation_of``.
        ModuleNotFoundError: a library that the store needs is not installed.
    """
    groups = cache.prefixes.groups
    given = [fingerprint] if isinstance(fingerprint, Fingerprint) else list(fingerprint)
    if len(given) != len(groups):
        raise ArgumentError(f"fingerprint must be one for each of {len(groups)} groups, got {len(given)}")
    for own, group in zip(given, groups, strict=True):
        layers = entries_of(group.storages)
        if own.layers != layers:
            raise ArgumentError(f"fingerprint must have layers {layers}, got {own.layers}")
        rotation = rotation_of(group.storages)
        if own.rotation != rotation:
            raise ArgumentError(f"fingerprint must have rotation {rotation!r}, got {own.rotation!r}")
        smoothing = smoothing_digest(group.storages)
        if own.smoothing != smoothing:
            raise ArgumentError(f"fingerprint must have smoothing {smoothing!r}, got {own.smoothing!r}")
    store = open_store(store)
    below = [
        StoreBelow(store, x.pages, x.tree, own, {}, seconds_per_token)
        for own, x in zip(given, groups, strict=True)
    ]
    for group, own_below in zip(groups, below, strict=True):
        group.below = own_below
    return below[0]


@dataclass
class _Kept:
    """What a store knows of a text: ``Row.kept``.

    Attributes:
        whose: Model and format of the keys and values.
        salt: Salt of the text in the store.
        num_lost: ``KVStore.num_lost`` when the first pages were passed.
        num_pages: Number of first pages that were passed or need not be.
        prefixes: Digests of the text so far, not shared with others; ``None`` for none.
    """

    whose: Fingerprint
    salt: str
    num_lost: int
    num_pages: int
    prefixes: TextDigests | None = None


def longest_run(store: KVStore, nbytes: int) -> int:
    """Largest number of pages of ``nbytes`` bytes in a run for a store."""
    most = RUN_BYTES if store.max_bytes is None else min(RUN_BYTES, store.max_bytes // _RUNS_IN_LIMIT)
    return max(1, most // nbytes)


def runs_of(numbers: Sequence[int], longest: int) -> list[range]:
    """Group ascending numbers into contiguous ranges of at most ``longest``."""
    runs: list[range] = []
    for i in numbers:
        if runs and runs[-1].stop == i and len(runs[-1]) < longest:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs
