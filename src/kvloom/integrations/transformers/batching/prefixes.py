"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence

from kvloom.caches import Pages
from kvloom.caches.residual import Residuals
from kvloom.errors import OutOfPages
from kvloom.integrations.transformers.batching.held import Held
from kvloom.integrations.transformers.batching.newest import Newest, Span
from kvloom.integrations.transformers.origin import scope_of
from kvloom.integrations.transformers.watch import ModelWatch
from kvloom.paging import PageRef, PageTable, PrefixTree


class SessionPrefixes:
    """Finds and publishes pages of a session.

    A model may change while a session is paused. Requests that begin afterwards find no pages of before, and
    those that ran meanwhile publish none, as some of their tokens were computed before and some afterwards.

    Attributes:
        state: Of the model when the present step began.

    Args:
        pages: Of all requests.
        tree: Of these pages.
        newest: Where requests have their newest tokens unquantized, if they have.
        watch: Of the model; ``None`` for one that never changes.
    """

    def __init__(
        self, pages: Pages, tree: PrefixTree, newest: Newest | None = None, watch: ModelWatch | None = None
    ) -> None:
        self._pages, self._tree, self._newest, self._watch = pages, tree, newest, watch
        self._residuals = Residuals(pages)
        self.state = ""

    def refresh(self, is_thorough: bool = False) -> None:
        """Learn the state of the model: before each step, and thoroughly before pages are found."""
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Where the tree has the pages of a salt now."""
        return scope_of(salt, state=self.state)

    def num_known(self, tokens: Sequence[int], salt: str, max_tokens: int) -> int:
        """Pages that would be found of some tokens."""
        return self._tree.num_known(tokens, self.scope(salt), max_tokens=max_tokens)

    def match(self, tokens: Sequence[int], salt: str, max_tokens: int) -> list[PageRef]:
        """Those pages, held by the caller."""
        self.refresh(is_thorough=True)
        return self._tree.match(tokens, self.scope(salt), max_tokens=max_tokens)

    def span_behind(self, table: PageTable) -> Span:
        """Where a request that begins with found pages has the unquantized tokens in front of their end."""
        tokens = self._residuals.find(table.pages[-1]) if table.num_pages else None
        if self._newest is not None and tokens is not None:
            try:
                return self._newest.restored(tokens, table.num_tokens)
            except OutOfPages:
                pass  # it reads them as codes
        return Span(known=table.num_tokens)

    def keep_residual(self, held: Held) -> None:
        """Let who finds the last full page of a request read what is in front of its end unquantized.

        Without memory for it nothing is kept.
        """
        pages = held.table.pages
        num_sealed = sum(map(self._pages.pool.is_sealed, pages))
        if self._newest is None or not num_sealed:
            return
        try:
            tokens = self._newest.residual(held.span, num_sealed * held.table.page_size)
        except (MemoryError, RuntimeError):
            return
        if tokens is not None:
            self._residuals.keep(pages[num_sealed - 1], tokens)

    @property
    def residual_bytes(self) -> int:
        """Bytes of what is kept so."""
        return self._residuals.nbytes

    def publish(self, held: Held, tokens: Sequence[int]) -> None:
        """Let others find the full pages of a request that began in the present state."""
        self.refresh(is_thorough=True)
        if held.state != self.state:
            return
        held.table.claim()
        refs = self._tree.insert(tokens, held.table.pages, self.scope(held.salt))
        if refs != [*held.table.pages]:
            held.span.is_exact = False  # the pages of another, which may have read codes
            held.table.replace(refs)
            held.first_slots = None
