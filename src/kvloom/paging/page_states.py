"""References to pages, flags of pages, and how earlier releases pickled a pool. Imports no torch."""

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvloom.errors import StateError
from kvloom.paging.rings import FREE, IDLE, PASSED, Rings

LONGEST: Final = 1 << 32
"""Number of pages that no extent has."""

TAKEN: Final = 1
SEALED: Final = 2
GONE_BY: Final = 4
PREFERRED: Final = 8
"""Flags of a page that is not free: ``TAKEN`` always, ``GONE_BY`` if it is in the list ``PASSED``,
``PREFERRED`` if ``release`` does not put it there."""


class PageRef(NamedTuple):
    """A page and its generation: the reference is valid until the page is free again.

    Attributes:
        id: Index of the page in the pool; it has the ``page_size`` slots from ``id * page_size``.
        generation: Number of times that the page became free before.
    """

    id: int
    generation: int


def is_stale(ref: PageRef, generations: Sequence[int]) -> StateError:
    """Error for a reference to none of the present pages, given the generations of all."""
    page = ref.id
    if not 0 <= page < len(generations):
        return StateError(f"a reference must be to a page in [0, {len(generations)}), got page {page}")
    newest = generations[page]
    if ref.generation < newest:
        return StateError(
            f"a reference must be valid, got page {page} of generation {ref.generation}, which was freed: "
            f"the page is at generation {newest}"
        )
    return StateError(
        f"a reference must be valid, got page {page} of generation {ref.generation}, which was never "
        "allocated"
    )


def state_of_dicts(old: dict[str, Any]) -> dict[str, Any]:
    """State of a pool that an earlier release pickled: dicts and lists, from before ``Rings``."""
    if "_refs" in old:
        old["_generations"] = array("q", [generation for _, generation in old.pop("_refs")])
        old["_places"] = array("q", [extent * LONGEST + index for extent, index in old["_places"]])
    kept = ("_counts", "_evict", "_extents", "_generations", "_places", "events", "worth")
    own = {name: old[name] for name in kept}
    num_pages, sealed = len(old["_counts"]), old["_parents"]
    flags, rings = bytearray([TAKEN]) * num_pages, Rings(num_pages)
    for ring, pages in ((FREE, old["_free"]), (IDLE, old["_evictable"]), (PASSED, old["_passed"])):
        rings.add(ring, pages)
    for flag, pages in ((SEALED, sealed), (GONE_BY, old["_passed"]), (PREFERRED, old["_preferred"])):
        for page in pages:
            flags[page] |= flag
    for page in old["_free"]:
        flags[page] = 0
    parents = [-1] * num_pages
    for page, parent in sealed.items():
        parents[page] = -1 if parent is None else parent
    return own | {"_flags": flags, "_rings": rings, "_parents": parents} | {
        "num_free": len(old["_free"]), "num_passed": len(old["_passed"]),
        "num_evictable": len(old["_evictable"]) + len(old["_passed"]),
    }  # fmt: skip
