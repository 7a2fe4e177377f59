"""Pool of pages with reference counts. Integers only; imports no torch."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, Final, NamedTuple

from kvloom.errors import ArgumentError, OutOfPages, StateError
from kvloom.paging.arguments import expect_policy
from kvloom.paging.events import Events
from kvloom.paging.worth import WorthOrder

_LONGEST: Final = 1 << 32
"""Number of pages that no extent has."""


class PageRef(NamedTuple):
    """A page and its generation: the reference is valid until the page is free again.

    Attributes:
        id: Index of the page in the pool; it has the ``page_size`` slots from ``id * page_size``.
        generation: Number of times that the page became free before.
    """

    id: int
    generation: int


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
        "_counts", "_evict", "_evictable", "_extents", "_free", "_generations", "_parents", "_passed",
        "_places", "_preferred", "events", "worth",
    )  # fmt: skip

    def __init__(self, num_pages: int, policy: str = "lru") -> None:
        expect_policy(policy)
        self.events: Events | None = None
        self.worth = WorthOrder() if policy == "ours" else None
        self._generations = array("q")  # of each page
        self._counts: list[int] = []
        self._free: dict[int, None] = {}  # a stack from which any page can be taken
        self._extents: list[list[int]] = [[]]  # pages of each extent, in order
        self._places = array("q")  # index of each page in its extent, and the extent times ``_LONGEST``
        self._parents: dict[int, int | None] = {}  # of each sealed page; None at the start of a sequence
        self._evictable: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._passed: dict[int, None] = {}  # evictable pages, too, that a window passed and no look-up found
        self._preferred: set[int] = set()  # pages that ``release`` does not add to ``_passed``
        self._evict: Callable[[int], object] | None = None
        self.grow(num_pages)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        own = state[1]
        if "_refs" in own:  # by an earlier release
            own["_generations"] = array("q", [generation for _, generation in own.pop("_refs")])
            own["_places"] = array("q", [extent * _LONGEST + index for extent, index in own["_places"]])
        for name, value in own.items():
            setattr(self, name, value)

    @property
    def num_pages(self) -> int:
        """Number of all pages."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_active(self) -> int:
        """Number of pages with references."""
        return self.num_pages - self.num_free - self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Number of pages without references that the tree can find; ``take`` may evict all of them."""
        return len(self._evictable) + len(self._passed)

    @property
    def num_passed(self) -> int:
        """Number of evictable pages that a window passed: they are evicted first."""
        return len(self._passed)

    def report(self) -> dict[str, int]:
        """Numbers of pages by state, and their sum ``num_pages``."""
        return {
            "num_pages": self.num_pages,
            "free": self.num_free,
            "active": self.num_active,
            "evictable": self.num_evictable,
        }

    @property
    def num_extents(self) -> int:
        """Number of extents, at least 1."""
        return len(self._extents)

    def place(self, page: int) -> tuple[int, int]:
        """Extent of the page with this id, and its index in it."""
        return divmod(self._places[page], _LONGEST)

    def next_free(self, page: int, num_pages: int) -> list[int]:
        """Up to ``num_pages`` contiguous free pages after ``page`` in its extent."""
        extent, index = self.place(page)
        return self.free_from(extent, index + 1, num_pages)

    def free_from(self, extent: int, index: int, num_pages: int) -> list[int]:
        """Up to ``num_pages`` contiguous free pages of an extent from ``index`` on."""
        return list(takewhile(self._free.__contains__, self._extents[extent][index : index + num_pages]))

    def grow(self, num_pages: int, num_extents: int = 1) -> None:
        """Add ``num_pages`` free pages, spread over the ends of all extents; references stay valid.

        Args:
            num_pages: Pages to add.
            num_extents: Number of extents of a pool that has no pages yet; ignored otherwise.
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 0:
            raise ArgumentError(f"num_pages must be at least 0, got {num_pages!r}")
        if num_extents < 1:
            raise ArgumentError(f"num_extents must be at least 1, got {num_extents}")
        first, end = self.num_pages, self.num_pages + num_pages
        extents = [[] for _ in range(num_extents)] if first == 0 else [[*pages] for pages in self._extents]
        places, page, count = array("q", self._places), first, len(extents)
        for i, pages in enumerate(extents):
            while page < end and len(pages) < -(-(end - i) // count):
                places.append(i * _LONGEST + len(pages))
                pages.append(page)
                page += 1
        generations, counts = self._generations + array("q", [0]) * num_pages, self._counts + [0] * num_pages
        free = dict.fromkeys(range(end - 1, first - 1, -1)) | self._free
        # At once, so that Ctrl-C leaves all of the old or all of the new.
        new = generations, counts, free, extents, places
        self._generations, self._counts, self._free, self._extents, self._places = new
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
            raise OutOfPages(
                f"{num_pages} pages wanted, {self.num_free} free and {self.num_evictable} evictable"
                f" of {self.num_pages}"
            )
        if num_pages > self.num_free and self._evict is not None:
            self._evict(num_pages - self.num_free)
        for page in wanted:
            del self._free[page]
        others = [self._free.popitem()[0] for _ in range(num_pages - len(wanted))]
        refs = [self.ref(page) for page in (*wanted, *others)]
        for ref in refs:
            self._counts[ref.id] = 1
        if self.events is not None:
            self.events.take([ref.id for ref in refs])
        return refs

    def retain(self, ref: PageRef) -> None:
        """Add a reference to an active or evictable page; it stays valid until one more ``release``.

        Raises:
            StateError: ``ref`` is stale.
        """
        self.hold(self._page(ref))
        if self.events is not None:
            self.events.add("share", ref.id)

    def hold(self, page: int | None) -> None:
        """For the tree: ``retain`` an active or evictable page, without an event."""
        while page is not None:
            self._counts[page] += 1
            if self._counts[page] > 1:
                break
            if page in self._passed:
                del self._passed[page]
            else:
                del self._evictable[page]
            if self.events is not None:
                self.events.causes.wake(page)
            if self.worth is not None:
                self.worth.wake(page)
            page = self._parents[page]

    def release(self, ref: PageRef, *, is_passed: bool = False) -> None:
        """Remove one reference. The last one makes a sealed page evictable, and any other free.

        Args:
            ref: An active page.
            is_passed: Whether a window has passed the page: then it is evicted before others, unless
                preferred.

        Raises:
            StateError: ``ref`` is stale, or the page has no holder; nothing was changed.
        """
        page: int | None = self._page(ref)
        if not self._counts[ref.id]:
            raise StateError(f"page {ref.id} of generation {ref.generation} has no reference to release")
        events = self.events
        if events is not None:
            events.add("release", ref.id)
        while page is not None:
            self._counts[page] -= 1
            if self._counts[page]:
                break
            if page not in self._parents:
                self._end(page)
                if events is not None:
                    events.causes.free(page)
                break
            if is_passed and page not in self._preferred and self.worth is None:
                self._passed[page] = None
            else:
                self._evictable[page] = None
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

    def is_free(self, page: int) -> bool:
        """Whether the page with this id is free."""
        return not self._counts[page] and page not in self._parents

    def is_sealed(self, ref: PageRef) -> bool:
        """Whether the page is in the tree, and therefore read-only until its generation ends."""
        return self._page(ref) in self._parents

    def is_writable(self, ref: PageRef) -> bool:
        """Whether its holder may write the page: it is the only one, and the page is not sealed."""
        return self._counts[self._page(ref)] == 1 and ref.id not in self._parents

    def attach(self, evict: Callable[[int], object]) -> None:
        """For the tree: let ``take`` call ``evict(n)`` to reclaim n pages, when at least n are evictable.

        Raises:
            StateError: the pool has a tree already.
        """
        if self._evict is not None:
            raise StateError("a pool has one prefix tree, and this one has it already")
        self._evict = evict

    def prefer(self, refs: Iterable[PageRef]) -> None:
        """Mark useful sealed pages, which are then not evicted first after a window passes them."""
        for page in map(self._page, refs):
            self._preferred.add(page)
            if page in self._passed:
                del self._passed[page]
                self._evictable[page] = None

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
            raise StateError("a page can be sealed in a pool with a prefix tree only")
        pages = [self._page(ref) for ref in refs]
        for page in pages:
            if page in self._parents:
                raise StateError(f"page {page} of generation {self._generations[page]} is sealed already")
        if len(set(pages)) < len(pages):
            raise StateError(f"pages must be sealed once, got {pages}")
        if parent is not None and not self.is_sealed(parent):
            raise StateError(f"page {parent.id} of generation {parent.generation} is not sealed")
        if parent is not None and pages:
            self.hold(parent.id)
        above = None if parent is None else parent.id
        for page in pages:
            self._parents[page] = above
            above = page if is_chain else None
        for page in pages[:-1] if is_chain else ():
            self._counts[page] += 1  # the reference that its child holds

    def victims(self, num_pages: int) -> list[PageRef]:
        """For the tree, which must ``reclaim`` them: pages to evict next, or all if there are fewer."""
        if self.worth is None:
            return list(islice(self.evictable(), num_pages))
        return [self.ref(page) for page in self.worth.evict(num_pages)]

    def reclaim(self, refs: Sequence[PageRef]) -> None:
        """For the tree: free evictable pages that have no children, and end their generation.

        Raises:
            StateError: a page is stale or held; nothing was changed.
        """
        pages = [self._page(ref) for ref in refs]
        for page in pages:
            if self._counts[page]:
                raise StateError(f"page {page} must be evictable, got {self._counts[page]} references to it")
        for page in pages:
            del self._parents[page]
            if self._passed.pop(page, self) is self:
                del self._evictable[page]
            self._preferred.discard(page)
            self._end(page)
            if self.events is not None:
                self.events.evict(page)

    def evictable(self) -> Iterator[PageRef]:
        """Evictable pages, children before parents, else LRU first. Valid until the pool changes."""
        return (self.ref(page) for page in chain(self._passed, self._evictable))

    def _end(self, page: int) -> None:
        self._generations[page] += 1
        self._free[page] = None

    def _page(self, ref: PageRef) -> int:
        """Id of the page of a reference; raises StateError if it is stale."""
        page, generations = ref.id, self._generations
        if 0 <= page < len(generations) and generations[page] == ref.generation:
            if self._counts[page] or page in self._parents:
                return page
        raise self._stale(ref)

    def _stale(self, ref: PageRef) -> StateError:
        page = ref.id
        if not 0 <= page < self.num_pages:
            return StateError(f"page {page} does not exist, the pool has {self.num_pages}")
        newest = self._generations[page]
        if ref.generation < newest:
            return StateError(
                f"page {page} of generation {ref.generation} is gone, the page is at generation {newest}"
            )
        return StateError(f"page {page} of generation {ref.generation} was never handed out")
