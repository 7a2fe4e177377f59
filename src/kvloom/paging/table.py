"""Page table of one sequence, and plans of its growth. Plans copies of pages, but makes none."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from kvloom.errors import ArgumentError, StateError
from kvloom.paging.arguments import expect_page_size
from kvloom.paging.interrupts import whole
from kvloom.paging.page_states import PageRef
from kvloom.paging.pool import PagePool


class Copy(NamedTuple):
    """Copy of page ``source`` to ``target``, in all layers with scales, due before anything is written."""

    source: int
    target: int


class PageTable:
    """Pages of one sequence, in order; holds one reference to each until it drops the page or is released.

    Args:
        pool: Pool of the pages.
        page_size: Tokens in a page, as in the pool's prefix tree.

    Attributes:
        request: Request that owns it, for events: at first the one of the last look-up.
        num_sealed: Number of first pages that ``PrefixTree.seal`` sealed under the sequence's tokens.
    """

    __slots__ = ("_num_tokens", "_pages", "_pool", "num_sealed", "page_size", "request")

    def __init__(self, pool: PagePool, page_size: int) -> None:
        expect_page_size(page_size)
        self.page_size = page_size
        self._pool = pool
        self._pages: list[PageRef] | None = []
        self._num_tokens = self.num_sealed = 0
        self.request = 0 if pool.events is None else pool.events.request

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        for name, value in ({"num_sealed": 0} | state[1]).items():
            setattr(self, name, value)

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, tokens with room that are not yet written included."""
        self._held()
        return self._num_tokens

    @property
    def pages(self) -> tuple[PageRef, ...]:
        """The pages in order, only the last one partly filled; valid until the table changes."""
        return tuple(self._held())

    @property
    def num_pages(self) -> int:
        """Number of pages held."""
        return len(self._held())

    def page_of(self, token: int) -> PageRef:
        """Page of the token with this number."""
        return self._held()[token // self.page_size]

    def page(self, number: int) -> PageRef:
        """Page with this number."""
        return self._held()[number]

    def pages_from(self, first: int) -> list[PageRef]:
        """The pages from number ``first`` on; valid until the table changes."""
        return self._held()[first:]

    def has_room(self, num_tokens: int) -> bool:
        """Whether the last page is writable and has room for ``num_tokens`` more tokens."""
        used = self._num_tokens % self.page_size
        return 0 < used <= self.page_size - num_tokens and self._pool.is_writable(self._held()[-1])

    def num_missing(self, num_tokens: int) -> int:
        """Number of pages to add for ``num_tokens`` more tokens."""
        return self._pages_for(self._num_tokens + num_tokens) - len(self._held())

    def fill(self, num_tokens: int) -> None:
        """Add ``num_tokens`` tokens to the last page, which ``has_room`` for them."""
        if not self.has_room(num_tokens):
            raise StateError(
                f"num_tokens must fit in the last page, which must be writable, got {num_tokens} after "
                f"{self._num_tokens} in pages of {self.page_size}"
            )
        self._num_tokens += num_tokens

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, and release pages without any of them.

        The last page is kept whole, even if it is shared or sealed; the next ``Growth`` copies it then.

        Raises:
            ArgumentError: the sequence is shorter than that; nothing was changed.
        """
        pages = self._held()
        if not 0 <= num_tokens <= self._num_tokens:
            raise ArgumentError(f"num_tokens must be in [0, {self._num_tokens}], got {num_tokens}")
        self.claim()
        while len(pages) > self._pages_for(num_tokens):
            self._pool.release(pages.pop())
        self._num_tokens = num_tokens
        self.num_sealed = min(self.num_sealed, num_tokens // self.page_size)

    def drop_front(self, num_pages: int) -> None:
        """Release the first ``num_pages`` pages, all full; the token after them becomes token 0.

        Raises:
            ArgumentError: there are fewer full pages; nothing was changed.
        """
        pages = self._held()
        if not 0 <= num_pages <= self._num_tokens // self.page_size:
            full = self._num_tokens // self.page_size
            raise ArgumentError(f"num_pages must be in [0, {full}], got {num_pages}")
        self.claim()
        if self._pool.events is not None:
            self._pool.events.drop([ref.id for ref in pages[:num_pages]])
        for ref in pages[:num_pages]:
            self._pool.release(ref, is_passed=True)
        del pages[:num_pages]
        self._num_tokens -= num_pages * self.page_size
        self.num_sealed = max(self.num_sealed - num_pages, 0)

    def fork(self, request: int | None = None) -> "PageTable":
        """New table with the same tokens and pages. The first to grow copies a partly filled last page.

        Args:
            request: Request that owns it, for events; that of this table if ``None``.
        """
        table = PageTable(self._pool, self.page_size)
        pages = self._held()
        table.request = self.request if request is None else request
        table.claim()
        for ref in pages:
            self._pool.retain(ref)
        table._pages, table._num_tokens, table.num_sealed = pages.copy(), self._num_tokens, self.num_sealed
        return table

    def adopt(self, refs: Sequence[PageRef]) -> None:
        """Begin with full pages, such as those of ``PrefixTree.match``, and take their references.

        Raises:
            StateError: the table is not empty, or a page is stale or not held; nothing was changed.
            ArgumentError: a page comes twice; nothing was changed.
        """
        if self._held():
            raise StateError(
                f"a table must be empty before it adopts pages, got one of {self._num_tokens} tokens"
            )
        self._pages = self._checked(refs)
        self._num_tokens = len(refs) * self.page_size

    def move(self, refs: Sequence[PageRef]) -> None:
        """Release ``pages`` and take the references to others, to which their tokens were copied.

        Raises:
            StateError: as ``replace``.
        """
        old = self.pages
        self.replace(refs)
        self.num_sealed = 0
        self.claim()
        for ref in old:
            self._pool.release(ref)

    def replace(self, refs: Sequence[PageRef], first: int = 0) -> None:
        """Hold the pages that ``PrefixTree.insert`` returned, which has moved the references already.

        Args:
            refs: All pages from number ``first`` on.
            first: As above.

        Raises:
            StateError: a page is stale or not held; nothing was changed.
            ArgumentError: the number of pages differs, or one comes twice; nothing was changed.
        """
        pages = self._held()
        if len(refs) != len(pages) - first:
            raise ArgumentError(f"refs must be {len(pages) - first} pages, got {len(refs)}")
        pages[first:] = self._checked(refs)

    def release(self) -> None:
        """Release all pages. Then any other method raises ``StateError``; releasing again does nothing."""
        if self._pages is not None:
            self.claim()
            if self._pool.events is not None:
                self._pool.events.causes.end(self.request)
        while self._pages:
            self._pool.release(self._pages.pop())
        self._pages = None

    def claim(self) -> None:
        """Assign the next events to this table's request."""
        if self._pool.events is not None:
            self._pool.events.request = self.request

    def _held(self) -> list[PageRef]:
        if self._pages is None:
            raise StateError("a table must not be used after release, got a released one")
        return self._pages

    def _checked(self, refs: Sequence[PageRef]) -> list[PageRef]:
        if len(set(refs)) != len(refs):
            raise ArgumentError(f"refs must be distinct pages, got {list(refs)}")
        self._pool.are_sealed(refs)
        return list(refs)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class Growth:
    """Plan to make room for ``num_tokens[i]`` more tokens in ``tables[i]``; ``made`` executes it.

    A partly filled last page that is sealed or has other holders is replaced by a new page. Tables that leave
    the page in the same call no longer count: if only n tables share an unsealed page, n - 1 get copies and
    the last writes in place. Execute the plan before anything else changes the pool.

    Attributes:
        num_pages: Number of pages to take from the pool.

    Raises:
        ArgumentError: a length is negative, a table comes twice, or pools differ.
        StateError: a table was released.
    """

    __slots__ = ("_plan", "_pool", "num_pages")

    def __init__(self, tables: Sequence[PageTable], num_tokens: Sequence[int]) -> None:
        if len({id(table) for table in tables}) != len(tables):
            raise ArgumentError("tables must be distinct, got one of them twice")
        if len(num_tokens) != len(tables):
            raise ArgumentError(
                f"num_tokens must have a number for each of {len(tables)} tables, got {len(num_tokens)}"
            )
        self._pool = tables[0]._pool if tables else PagePool(0)
        leaving: Counter[PageRef] = Counter()
        self._plan: list[tuple[PageTable, int, bool, int]] = []
        for table, num_new in zip(tables, num_tokens, strict=True):
            pages = table._held()
            if num_new < 0:
                raise ArgumentError(f"num_tokens must be at least 0, got {num_new}")
            if table._pool is not self._pool:
                raise ArgumentError("tables must be of one pool, got tables of several")
            moves = False
            if num_new and table._num_tokens % table.page_size:
                last = pages[-1]
                moves = self._pool.is_sealed(last) or self._pool.count(last) - leaving[last] > 1
                leaving[last] += moves
            num_pages = table.num_missing(num_new) + moves
            self._plan.append((table, num_new, moves, num_pages))
        self.num_pages = sum(num_pages for *_, num_pages in self._plan)

    def _following(self) -> list[list[int]]:
        """Free pages after the last one of each table, as many as it needs; none twice."""
        claimed: set[int] = set()
        wanted = []
        for table, _, moves, num_pages in self._plan:
            pages = table._held()
            behind = self._pool.next_free(pages[-1].id, num_pages) if pages and not moves else []
            wanted.append([] if claimed.intersection(behind) else behind)
            claimed.update(behind)
        return wanted

    @contextmanager
    def made(self) -> Iterator[list[Copy]]:
        """Take the pages. When the ``with`` block ends, the tables get them, or the pool if it raises.

        Yields:
            Copies to make within the block, in any order: no page is both source and target, and none is
            target twice.

        Raises:
            OutOfPages: the pool has too few pages for all tables; nothing was changed.
        """
        wanted = self._following()
        pages = self._take(wanted)
        following, others = iter(pages), iter(pages[sum(map(len, wanted)) :])
        taken = [
            [*islice(following, len(behind)), *islice(others, num_pages - len(behind))]
            for (*_, num_pages), behind in zip(self._plan, wanted, strict=True)
        ]
        try:
            yield [
                Copy(table._held()[-1].id, new[0].id)
                for (table, _, moves, _), new in zip(self._plan, taken, strict=True)
                if moves
            ]
        except BaseException:
            for ref in reversed(pages):  # so that they are allocated again in the same order
                self._pool.release(ref)
            raise
        events = self._pool.events
        for (table, num_new, moves, _), new in zip(self._plan, taken, strict=True):
            pages = table._held()
            if moves:
                table.claim()
                if events is not None:
                    events.note("copy", [pages[-1].id, new[0].id])
                self._pool.release(pages.pop())
            pages += new
            table._num_tokens += num_new

    def _take(self, wanted: Sequence[Sequence[int]]) -> list[PageRef]:
        """Take all pages of the plan, the wanted ones first."""
        ids, events = [page for behind in wanted for page in behind], self._pool.events
        if events is None or not self._plan:
            return self._pool.take(self.num_pages, ids)
        self._plan[0][0].claim()
        behind, others = list[int](), list[int]()
        for (table, *_, num_pages), pages in zip(self._plan, wanted, strict=True):
            behind += [table.request] * len(pages)
            others += [table.request] * (num_pages - len(pages))
        events.takers = behind + others
        try:
            return self._pool.take(self.num_pages, ids)
        finally:
            events.takers = []


@whole
def release_all(tables: Iterable[PageTable]) -> None:
    """Release the pages of all tables."""
    for table in tables:
        table.release()
