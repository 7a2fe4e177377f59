"""What a store gives up when it is full, and what it remembers of that."""

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from kvloom.store.backends import Backend, Stored
from kvloom.store.format import DamagedRun
from kvloom.store.heads import head_of
from kvloom.store.prefixes import DIGEST_BYTES
from kvloom.store.probe import is_probe

_QUARANTINE: Final = "quarantine"
"""The folder of damaged objects."""
_EVICTED: Final = "evicted"
"""The folder of marks: one for each run that was evicted, with the digests of its pages."""


class Eviction(NamedTuple):
    """What is known of a run that was evicted.

    Attributes:
        time: Seconds since 1970.
        digests: Of all tokens up to the end of each page.
    """

    time: float
    digests: tuple[bytes, ...]


def is_quarantined(name: str) -> bool:
    """Whether an object is kept though it is damaged."""
    return name.startswith(f"{_QUARANTINE}/")


def is_mark(name: str) -> bool:
    """Whether an object is what is left of a run."""
    return name.startswith(f"{_EVICTED}/")


def too_many(
    objects: Collection[Stored], now: float, max_bytes: int | None, max_age: float | None
) -> list[Stored]:
    """What must go so that limits hold.

    Args:
        objects: All of a store.
        now: Seconds since 1970.
        max_bytes: Of all; what is unused for longest goes first.
        max_age: Seconds that one may be unused.
    """
    if max_bytes is None and max_age is None:
        return []
    victims, total = [], sum(x.size for x in objects)
    for x in sorted(objects, key=_worth):
        is_old = max_age is not None and now - x.used > max_age and not is_probe(x.name)
        if is_old or (max_bytes is not None and total > max_bytes):
            total -= x.size
            victims.append(x)
    return victims


def evict(backend: Backend, x: Stored, now: float) -> Stored | None:
    """Remove an object.

    Returns:
        The mark that a run leaves. It is an object as others, and goes as they do.
    """
    run = None
    if not is_quarantined(x.name) and not is_mark(x.name) and not is_probe(x.name):
        with suppress(DamagedRun, FileNotFoundError):
            run, _ = head_of(backend, x)
    backend.delete(x.name)
    if run is None:
        return None
    name = f"{_EVICTED}/{_flat(run.name.removesuffix('.safetensors'))}"
    backend.delete(name)  # of an earlier eviction
    backend.put_if_absent(name, [*run.digests])
    return Stored(name, len(run.digests) * DIGEST_BYTES, now)


def quarantine(backend: Backend, x: Stored) -> None:
    """Move an object to where nobody finds it, for whoever wants to know."""
    with suppress(FileNotFoundError):  # another process moved it
        data = backend.get_ranges(x.name, [(0, x.size)])
        backend.put_if_absent(f"{_QUARANTINE}/{_flat(x.name)}", [data])
        backend.delete(x.name)


def evictions(backend: Backend, objects: Iterable[Stored], folder: str) -> list[Eviction]:
    """What is remembered of the runs of one fingerprint.

    Args:
        backend: Of the store.
        objects: All of the store.
        folder: Of the fingerprint.
    """
    found = []
    for x in objects:
        if x.name.startswith(f"{_EVICTED}/{folder}-"):
            with suppress(FileNotFoundError):
                data = bytes(backend.get_ranges(x.name, [(0, x.size)]))
                digests = (data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))
                found.append(Eviction(x.used, tuple(digests)))
    return found


def _worth(x: Stored) -> tuple[bool, bool, float, int]:
    """What goes first: the quarantine, then what is unused for longest, then what stands last in a text.

    Probes, by which the runs of a model are known, go after all runs.
    """
    position = x.name.rsplit("-", 2)[-2:-1]
    first = int(position[0]) if position and position[0].isdigit() else 0
    return is_probe(x.name), not is_quarantined(x.name), x.used, -first


def _flat(name: str) -> str:
    return name.replace("/", "-")
