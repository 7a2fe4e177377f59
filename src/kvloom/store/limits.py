"""Eviction from a full store, and marks of evicted runs."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from kvloom.store.backends import Backend, Stored
from kvloom.store.digests import DIGEST_BYTES
from kvloom.store.format import DamagedRun
from kvloom.store.heads import head_of
from kvloom.store.names import ObjectKind, kind_of, mark_name, position_of, quarantine_name
from kvloom.store.sums import PLAIN, Sums

_LAST: Final = {ObjectKind.PROBE: 2, ObjectKind.INDEX: 1, ObjectKind.QUARANTINED: -1}
"""Order of eviction of kinds, where runs and marks have 0."""


class Eviction(NamedTuple):
    """Mark of an evicted run.

    Attributes:
        time: Time of the eviction, in seconds since 1970.
        digests: Digests of all tokens up to the end of each page.
    """

    time: float
    digests: tuple[bytes, ...]


def too_many(
    objects: Collection[Stored], now: float, max_bytes: int | None, max_age: float | None
) -> list[Stored]:
    """Objects to remove so that limits hold; only objects with names by kvloom count.

    Args:
        objects: All objects of a store.
        now: Seconds since 1970.
        max_bytes: Maximum bytes of all; the least recently used are evicted first.
        max_age: Maximum seconds since the last use.
    """
    kinds = {x: kind for x in objects if (kind := kind_of(x.name)) is not None}
    total = sum(x.size for x in kinds)
    is_full = max_bytes is not None and total > max_bytes
    if not is_full and (max_age is None or all(now - x.used <= max_age for x in kinds)):
        return []
    victims = []
    for x in sorted(kinds, key=lambda x: _worth(x, kinds[x])):
        is_old = max_age is not None and now - x.used > max_age and kinds[x] is not ObjectKind.PROBE
        if is_old or (max_bytes is not None and total > max_bytes):
            total -= x.size
            victims.append(x)
    return victims


def evict(backend: Backend, x: Stored, now: float, sums: Sums = PLAIN) -> tuple[bool, Stored | None]:
    """Remove an object, unless it has the name of a run but cannot be read as one.

    Returns:
        Whether it was removed, and the mark of a run, which is itself an object that can be evicted.
    """
    run = None
    if kind_of(x.name) is ObjectKind.RUN:
        try:
            run, _ = head_of(backend, x, sums)
        except FileNotFoundError:
            return True, None
        except (DamagedRun, PermissionError):  # of another format, or of another user
            return False, None
    try:
        backend.delete(x.name)
    except PermissionError:
        return False, None
    if run is None:
        return True, None
    name = mark_name(x.name)
    try:
        backend.delete(name)  # the mark of an earlier eviction
        backend.put_if_absent(name, [*run.digests])
    except PermissionError:  # marks of another user
        return True, None
    return True, Stored(name, len(run.digests) * DIGEST_BYTES, now)


def quarantine(backend: Backend, name: str) -> None:
    """Move a damaged object to the quarantine, where it is not found but can be examined."""
    with suppress(FileNotFoundError):  # another process moved it
        backend.rename(name, quarantine_name(name))


def evictions(backend: Backend, objects: Iterable[Stored], folder: str) -> list[Eviction]:
    """Marks of the evicted runs of one fingerprint.

    Args:
        backend: Backend of the store.
        objects: All objects of the store.
        folder: Folder of the fingerprint.
    """
    found = []
    for x in objects:
        if kind_of(x.name) is ObjectKind.MARK and x.name.startswith(mark_name(f"{folder}/")):
            with suppress(FileNotFoundError, PermissionError):
                data = bytes(backend.get_ranges(x.name, [(0, x.size)]))
                digests = (data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))
                found.append(Eviction(x.used, tuple(digests)))
    return found


def _worth(x: Stored, kind: ObjectKind) -> tuple[int, float, int]:
    """Sort key of eviction: quarantined objects, then the least recently used, later pages of a text first.

    Indexes, which only save time, are evicted after all runs and marks; probes, which identify models, last.
    """
    first = position_of(x.name) if kind in (ObjectKind.RUN, ObjectKind.MARK) else 0
    return _LAST.get(kind, 0), x.used, -first
