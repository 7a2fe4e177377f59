"""Pool of pages with reference counts. Integers only; imports no torch."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging.arguments import expect_policy
from kvloom.paging.events import Events
from kvloom.paging.page_states import (
    GONE_BY,
    LONGEST,
    PREFERRED,
    SEALED,
    TAKEN,
    PageRef,
    is_stale,
    state_of_dicts,
)
from kvloom.paging.rings import FREE, IDLE, PASSED, Rings
from kvloom.paging.worth import WorthOrder


class PagePool:
    """Pages with reference counts; each page is in exactly one of three states.

    =========  =====  ========================================================================
    state      count  content
    =========  =====  ========================================================================
    free       0      nothing
    active     > 0    tokens of its holders; read-only once it is sealed
    evictable  0      sealed tokens that the prefix tree can still find
    =========  =====  ========================================================================

    Becoming free ends the page's generation: every method raises a ``StateError`` for an older ``PageRef``,
    which would otherwise reach the data of another sequence. Not thread-safe.

    The page that was freed last is allocated first, so that a busy pool touches few pages. Pages that were
    never used come last, lowest id first.

    An extent is a contiguous range of pages, in which a sequence can grow: ``next_free`` gives the pages
    after another.

    Args:
        num_pages: Pages to begin with, in one extent; ``grow`` adds more.
        policy: Eviction policy: ``"lru"``, least recently used first, or ``"ours"``, fewest expected hits
            first, by the statistics of this pool (``WorthOrder``).

    Attributes:
        events: Recorder of events; ``None`` for none. ``PrefixTree.record`` sets it.
        num_free: Number of free pages.
        num_evictable: Number of pages without references that the tree can find; ``take`` may evict all.
        num_passed: Number of evictable pages that a window passed: they are evicted first.

    Raises:
        ArgumentError: there is no such policy.
    """

    # How pool and tree work together: an active page that is sealed under a parent holds one reference to it.
    # So a parent becomes evictable after its last child, and the order in which pages became evictable, kept
    # here, is both least recently used first and leaves before parents. The tree evicts in that order, or in
    # that of ``worth``: ``take`` calls the function that the tree passed to ``attach``, which calls
    # ``reclaim``. Pages that are no chain, as in layers with a window, become evictable one by one. Of these,
    # pages that a window passed are evicted first, unless a look-up has found them.

    __slots__ = (
        "_counts", "_evict", "_extents", "_flags", "_generations", "_parents", "_places", "_rings", "events",
        "num_evictable", "num_free", "num_passed", "worth",
    )  # fmt: skip

    def __init__(self, num_pages: int, policy: str = "lru") -> None:
        expect_policy(policy)
        self.events: Events | None = None
        self.worth = WorthOrder() if policy == "ours" else None
        self.num_free = self.num_evictable = self.num_passed = 0
        self._generations = array("q")  # of each page
        self._counts: list[int] = []
        self._flags = bytearray()
        self._parents: list[int] = []  # of each sealed page; -1 at the start of a sequence
        self._rings = Rings()  # free pages, a stack; evictable ones, the longest idle first
        self._extents: list[list[int]] = [[]]  # pages of each extent, in order
        self._places = array("q")  # index of each page in its extent, and the extent times ``LONGEST``
        self._evict: Callable[[int], object] | None = None
        self.grow(num_pages)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in (state[1] if "_rings" in state[1] else state_of_dicts(state[1])).items():
            setattr(self, name, value)

    @property
    def num_pages(self) -> int:
        """Number of all pages."""
        return len(self._counts)

    @property
    def num_active(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.num_free - self.num_evictable

    def report(self) -> dict[str, int]:
        """Numbers of pages by state, and their sum ``num_pages``."""
        own = {"free": self.num_free, "active": self.num_active, "evictable": self.num_evictable}
        return {"num_pages": self.num_pages} | own

    @property
    def num_extents(self) -> int:
        """Number of extents, at least 1."""
        return len(self._extents)

    def place(self, page: int) -> tuple[int, int]:
        """Extent of the page with this id, and its index in it."""
        return divmod(self._places[page], LONGEST)

    def next_free(self, page: int, num_pages: int) -> list[int]:
        """Up to ``num_pages`` contiguous free pages after ``page`` in its extent."""
        extent, index = self.place(page)
        return self.free_from(extent, index + 1, num_pages)

    def free_from(self, extent: int, index: int, num_pages: int) -> list[int]:
        """Up to ``num_pages`` contiguous free pages of an extent from ``index`` on."""
        return list(takewhile(self.is_free, self._extents[extent][index : index + num_pages]))

    def grow(self, num_pages: int, num_extents: int = 1) -> None:
        """Add ``num_pages`` free pages, spread over the ends of all extents; references stay valid.

        Args:
            num_pages: Pages to add.
            num_extents: Number of extents of a pool that has no pages yet; ignored otherwise.
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 0:
            raise ArgumentError(f"num_pages must be an int of at least 0, got {num_pages!r}")
        if num_extents < 1:
            raise ArgumentError(f"num_extents must be at least 1, got {num_extents}")
        ids = [*range(self.num_pages, self.num_pages + num_pages)]  # each id is one object in all lists
        extents = [x.copy() for x in self._extents] if self.num_pages else [[] for _ in range(num_extents)]
        places, end, first = self._places[:], self.num_pages + num_pages, 0
        for i, pages in enumerate(extents):
            missing = -(-(end - i) // len(extents)) - len(pages)
            new = ids[first : first + max(missing, 0)]
            places.extend(range(i * LONGEST + len(pages), i * LONGEST + len(pages) + len(new)))
            pages += new
            first += len(new)
        new_state = (
            self._generations + array("q", [0]) * num_pages, self._counts + [0] * num_pages,
            self._parents + [-1] * num_pages, self._flags + bytes(num_pages), self._rings.grown(ids),
        )  # fmt: skip
        # At once, so that Ctrl-C leaves all of the old or all of the new.
        self._generations, self._counts, self._parents, self._flags, self._rings = new_state
        self._extents, self._places, self.num_free = extents, places, self.num_free + num_pages
        if self.events is not None:
            self.events.note("grow", [], num_pages=end)

    def take(self, num_pages: int, wanted: Sequence[int] = ()) -> list[PageRef]:
        """Allocate pages with one reference each, all or none.

        If too few pages are free, evictable ones are evicted: as few as needed, in the order of the policy,
        leaves before parents.

        Args:
            num_pages: Number of pages.
            wanted: Free pages that must be among them; they come first in the result.

        Returns:
            Distinct references, each valid while it is held, and afterwards as long as the tree can find it.

        Raises:
            OutOfPages: fewer pages are free or evictable; nothing was changed, nothing evicted.
        """
        if num_pages < 0:
            raise ArgumentError(f"num_pages must be at least 0, got {num_pages}")
        if num_pages > self.num_free + self.num_evictable:
            have = f"{self.num_free} free and {self.num_evictable} evictable of {self.num_pages}"
            raise OutOfPages(f"{num_pages} pages wanted, {have}")
        if num_pages > self.num_free and self._evict is not None:
            self._evict(num_pages - self.num_free)
        self._rings.remove(wanted)
        pages = [*wanted, *self._rings.pop(FREE, num_pages - len(wanted))]
        self.num_free -= num_pages
        for page in pages:
            self._counts[page] = self._flags[page] = TAKEN
        if self.events is not None:
            self.events.take(pages)
        return self.refs(pages)

    def retain(self, ref: PageRef) -> None:
        """Add a reference to an active or evictable page; it stays valid until one more ``release``.

        Raises:
            StateError: ``ref`` is stale.
        """
        self.hold([self._page(ref)])
        if self.events is not None:
            self.events.add("share", ref.id)

    def hold(self, pages: Iterable[int]) -> None:
        """For the tree: ``retain`` active or evictable pages, without an event."""
        counts, parents, flags = self._counts, self._parents, self._flags
        before, after = self._rings.before, self._rings.after
        for page in pages:
            while page >= 0:
                counts[page] += 1
                if counts[page] > 1:
                    break
                last, then = before[page], after[page]
                after[last], before[then] = then, last
                self.num_evictable -= 1
                if flags[page] & GONE_BY:
                    flags[page] &= ~GONE_BY
                    self.num_passed -= 1
                if self.events is not None:
                    self.events.causes.wake(page)
                if self.worth is not None:
                    self.worth.wake(page)
                page = parents[page]

    def release(self, ref: PageRef, *, is_passed: bool = False) -> None:
        """Remove one reference. The last one makes a sealed page evictable, and any other free.

        Args:
            ref: An active page.
            is_passed: Whether a window has passed the page: then it is evicted before others, unless
                preferred.

        Raises:
            StateError: ``ref`` is stale, or the page has no holder; nothing was changed.
        """
        page, generation = ref
        counts, flags = self._counts, self._flags
        if not (0 <= page < len(flags) and flags[page] and self._generations[page] == generation):
            raise is_stale(ref, self._generations)
        if not counts[page]:
            raise StateError(
                f"ref must be held, got page {ref.id} of generation {ref.generation} without a reference"
            )
        events = self.events
        if events is not None:
            events.add("release", ref.id)
        while page >= 0:
            counts[page] -= 1
            if counts[page]:
                break
            if not flags[page] & SEALED:
                self._end((page,))
                if events is not None:
                    events.causes.free(page)
                break
            ring = IDLE
            if is_passed and self.worth is None and not flags[page] & PREFERRED:
                ring = PASSED
                flags[page] |= GONE_BY
                self.num_passed += 1
            before, after = self._rings.before, self._rings.after
            before[page] = last = before[ring]
            after[last] = before[ring] = page
            after[page] = ring
            self.num_evictable += 1
            if events is not None:
                events.causes.idle(page)
            if self.worth is not None:
                self.worth.rest(page)
            page = self._parents[page]

    def count(self, ref: PageRef) -> int:
        """Number of references to the page: one of each holder, and of each active page sealed under it."""
        return self._counts[self._page(ref)]

    def ref(self, page: int) -> PageRef:
        """Reference to the page with this id, valid unless it is free."""
        return PageRef(page, self._generations[page])

    def refs(self, pages: Sequence[int]) -> list[PageRef]:
        """``ref`` of each of some pages."""
        generations, new = (
            self._generations,
            tuple.__new__,
        )  # which takes half of the time of ``PageRef(...)``
        return [new(PageRef, (page, generations[page])) for page in pages]

    def is_free(self, page: int) -> bool:
        """Whether the page with this id is free."""
        return not self._flags[page]

    def is_sealed(self, ref: PageRef) -> bool:
        """Whether the page is in the tree, and therefore read-only until its generation ends."""
        return bool(self._flags[self._page(ref)] & SEALED)

    def are_sealed(self, refs: Sequence[PageRef]) -> list[bool]:
        """``is_sealed`` of each page.

        Raises:
            StateError: a page is stale or not held.
        """
        counts, flags, found = self._counts, self._flags, list[bool]()
        for ref in refs:
            page = self._page(ref)
            if not counts[page]:
                raise StateError(
                    f"refs must be held, got page {page} of generation {ref.generation} without a reference"
                )
            found.append(flags[page] & SEALED > 0)
        return found

    def is_writable(self, ref: PageRef) -> bool:
        """Whether its holder may write the page: it is the only one, and the page is not sealed."""
        return self._counts[self._page(ref)] == 1 and not self._flags[ref.id] & SEALED

    def attach(self, evict: Callable[[int], object]) -> None:
        """For the tree: let ``take`` call ``evict(n)`` to reclaim n pages, when at least n are evictable.

        Raises:
            StateError: the pool has a tree already.
        """
        if self._evict is not None:
            raise StateError("pool must have no prefix tree yet, got one with a tree")
        self._evict = evict

    def prefer(self, refs: Iterable[PageRef]) -> None:
        """Mark useful sealed pages, which are then not evicted first after a window passes them."""
        for page in map(self._page, refs):
            if self._flags[page] & GONE_BY:
                self._leave([page])
                self._rings.add(IDLE, [page])
                self.num_evictable += 1
            self._flags[page] |= PREFERRED

    def seal(self, refs: Sequence[PageRef], parent: PageRef | None, *, is_chain: bool = True) -> None:
        """For the tree: make active pages read-only, each under the one before, the first under ``parent``.

        Args:
            refs: The pages.
            parent: A sealed page.
            is_chain: Whether an active page holds a reference to the one before it. Otherwise no page has a
                parent.

        Raises:
            StateError: a page is stale, sealed already or given twice, ``parent`` is not sealed, or no tree
                is attached; nothing was changed.
        """
        if self._evict is None:
            raise StateError("a pool must have a prefix tree before pages are sealed, got one without")
        pages = [self._page(ref) for ref in refs]
        for page in pages:
            if self._flags[page] & SEALED:
                raise StateError(
                    f"refs must not be sealed yet, got page {page} of generation {self._generations[page]}, "
                    "which is sealed"
                )
        if len(set(pages)) < len(pages):
            raise StateError(f"refs must be distinct pages, got {[*refs]}")
        if parent is not None and not self.is_sealed(parent):
            raise StateError(f"parent must be sealed, got page {parent.id} of generation {parent.generation}")
        if parent is not None and pages:
            self.hold([parent.id])
        above = -1 if parent is None else parent.id
        for page in pages:
            self._parents[page] = above
            self._flags[page] |= SEALED
            above = page if is_chain else -1
        for page in pages[:-1] if is_chain else ():
            self._counts[page] += 1  # the reference that its child holds

    def reclaim(self, num_pages: int) -> list[int]:
        """For the tree: free the pages to evict next, or all if there are fewer, and end their generation."""
        if self.worth is None:
            pages = [*islice(chain(self._rings.each(PASSED), self._rings.each(IDLE)), num_pages)]
        else:
            pages = self.worth.evict(num_pages)
        self._leave(pages)
        for page in pages:
            self._parents[page] = -1
        self._end(pages)
        if self.events is not None:
            for page in pages:
                self.events.evict(page)
        return pages

    def evictable(self) -> Iterator[PageRef]:
        """Evictable pages, children before parents, else LRU first. Valid until the pool changes."""
        return (self.ref(page) for page in chain(self._rings.each(PASSED), self._rings.each(IDLE)))

    def _leave(self, pages: Sequence[int]) -> None:
        """Take pages from the evictable ones."""
        self._rings.remove(pages)
        self.num_evictable -= len(pages)
        if self.num_passed:
            for page in pages:
                if self._flags[page] & GONE_BY:
                    self._flags[page] &= ~GONE_BY
                    self.num_passed -= 1

    def _end(self, pages: Sequence[int]) -> None:
        """End the generation of pages that are in no list: they are free."""
        generations, flags = self._generations, self._flags
        for page in pages:
            generations[page] += 1
            flags[page] = 0
        self._rings.add(FREE, pages)
        self.num_free += len(pages)

    def _page(self, ref: PageRef) -> int:
        """Id of the page of a reference; raises StateError if it is stale."""
        page, generation = ref
        if 0 <= page < len(self._flags) and self._flags[page] and self._generations[page] == generation:
            return page
        raise is_stale(ref, self._generations)
