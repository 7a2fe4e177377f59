"""Surveys of a store for humans: its runs, their problems, and why a text is found or not."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import TextDigests, salt_digest, token_bytes
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.format import DamagedRun, OtherFormat, Run, ranges_of
from kvloom.store.index import Index, IndexEntry
from kvloom.store.names import ObjectKind, kind_of
from kvloom.store.sums import PLAIN, Sums
from kvloom.store.tiers.heads import head_of
from kvloom.store.tiers.limits import Eviction

_AT_ONCE: Final = 64 << 20
"""Maximum bytes of one read of several pages."""


class Surveyed(NamedTuple):
    """An object of a store.

    Attributes:
        stored: Name, size and time of the last use.
        run: Its head; ``None`` if that is damaged or of another format.
        problem: Description of its problem; empty if it has none.
    """

    stored: Stored
    run: Run | None
    problem: str


class Verdict(NamedTuple):
    """Result of a look-up of one page of a text, with the reason.

    Attributes:
        tokens: Positions of its tokens.
        is_found: Whether it would be read.
        reason: One sentence.
    """

    tokens: range
    is_found: bool
    reason: str


def look_at(backend: Backend, x: Stored, sums: Sums = PLAIN, is_thorough: bool = False) -> Surveyed:
    """Read the head of an object, or with ``is_thorough`` all of it."""
    try:
        run, start = head_of(backend, x, sums)
        if is_thorough:
            _expect_whole(backend, x, run, start)
        is_here = x.name == run.name
        return Surveyed(x, run, "" if is_here else f"its name says otherwise than its head, {run.name}")
    except OtherFormat as error:
        return Surveyed(x, None, f"of another format: {error}")
    except DamagedRun as error:
        return Surveyed(x, None, str(error))
    except FileNotFoundError:
        return Surveyed(x, None, "removed meanwhile")
    except PermissionError as error:
        return Surveyed(x, None, f"may not be read: {error}")


def runs_of(objects: Iterable[Stored]) -> list[Stored]:
    """Runs among objects, the quarantine included."""
    return [x for x in objects if kind_of(x.name) in (ObjectKind.RUN, ObjectKind.QUARANTINED)]


def _expect_whole(backend: Backend, x: Stored, run: Run, start: int) -> None:
    """Check all pages, several at a time."""
    size = run.page_bytes
    at_once = max(1, _AT_ONCE // size)
    for head in range(run.fingerprint.num_heads):
        for first in range(0, run.num_pages, at_once):
            pages, heads = range(first, min(first + at_once, run.num_pages)), range(head, head + 1)
            (data,) = backend.get_ranges(x.name, ranges_of(pages, heads, run.num_pages, size, start))
            run.expect_whole(data, pages, heads)


def verdicts_on(
    runs: Iterable[Surveyed],
    evicted: Iterable[Eviction],
    fingerprint: Fingerprint,
    salt: str,
    tokens: Sequence[int],
    page_size: int,
) -> Iterator[Verdict]:
    """Whether each full page of a text is found, and otherwise the closest reason.

    Args:
        runs: All runs of a store, the quarantine included.
        evicted: Marks of evicted runs of ``fingerprint``.
        fingerprint: Fingerprint of the reader.
        salt: Salt of the reader.
        tokens: Token ids of the text.
        page_size: Tokens in a page of the reader.
    """
    digest = salt_digest(salt)
    known = list(runs)
    mine = TextDigests(fingerprint.digest, digest, tokens)
    index = Index()
    for x in known:
        if x.run is not None and not x.problem:
            index.add(IndexEntry.of(x.run, 0))
    segments = index.find(mine, 0, len(tokens))
    at = segments[-1].end if segments else 0
    times = {digest: x.time for x in sorted(evicted) for digest in x.digests}
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        page = range(start, start + page_size)
        if page.stop <= at:
            yield Verdict(page, True, "stored")
        else:
            yield Verdict(page, False, _reason(known, times, fingerprint, digest, mine, tokens, page))


def _reason(
    known: Sequence[Surveyed],
    evicted: Mapping[bytes, float],
    fingerprint: Fingerprint,
    salt: bytes,
    mine: TextDigests,
    tokens: Sequence[int],
    page: range,
) -> str:
    (digest,) = mine.digests([page.stop])
    for found in known:
        if found.problem and digest.hex()[:40] in found.stored.name:
            return f"damaged: {found.problem}"
        if kind_of(found.stored.name) is ObjectKind.QUARANTINED and found.run and digest in found.run.digests:
            return "damaged, in the quarantine"
    runs = [x.run for x in known if x.run is not None]
    if any(digest in run.digests for run in runs):
        return "stored, after pages that are not"
    if digest in evicted:
        return f"evicted {datetime.fromtimestamp(evicted[digest], timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    reasons = []
    for run in runs:
        if run.fingerprint != fingerprint:
            theirs = TextDigests(run.fingerprint.digest, run.salt, tokens)
            if any(x in run.digests for x in theirs.digests([page.stop])):
                return f"another model: {fingerprint.difference(run.fingerprint)}"
            continue
        same = _same_tokens(run, tokens)
        if run.salt != salt and same >= page.stop:
            reasons.append((0, "another salt"))
        elif run.salt == salt and run.first <= page.start < run.end and same < page.stop:
            before = mine.digests([run.first])[0] == run.before
            if before and same >= run.first:
                reasons.append((len(tokens) - same, f"tokens differ at index {same}"))
    return min(reasons, default=(0, "never stored"))[1]


def _same_tokens(run: Run, tokens: Sequence[int]) -> int:
    """Position up to which a run's token ids equal those of a text; 0 if it keeps no token ids."""
    if run.tokens is None or run.first >= len(tokens):
        return 0
    text = token_bytes(tokens[run.first : run.end])
    for i in range(0, len(text), 8):
        if text[i : i + 8] != run.tokens[i : i + 8]:
            return run.first + i // 8
    return run.first + len(text) // 8
