"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence

from transformers.cache_utils import Cache

from kvloom.caches.prefixes import Prefixes
from kvloom.integrations.transformers.batching.groups import SessionGroup
from kvloom.integrations.transformers.batching.held import Held
from kvloom.integrations.transformers.batching.store_reads import StoreReads
from kvloom.integrations.transformers.origin import scope_of
from kvloom.integrations.transformers.pool_prefixes import num_shared
from kvloom.integrations.transformers.pool_states import PoolStates
from kvloom.integrations.transformers.states import restore_states
from kvloom.integrations.transformers.watch import ModelWatch
from kvloom.paging import PageRef


class SessionPrefixes(Prefixes):
    """Finds and publishes pages of a session.

    A model may change while a session is paused. Requests that begin afterwards find no pages of before, and
    those that ran meanwhile publish none, as some of their tokens were computed before and some afterwards.

    Attributes:
        state: Of the model when the present step began.
        states: As below.
        reads: What is read from a store below; ``None`` without one.

    Args:
        groups: Those of the session.
        watch: Of the model; ``None`` for one that never changes.
        states: What keeps recurrent states of its texts; ``None`` for nothing.
    """

    def __init__(
        self,
        groups: Sequence[SessionGroup],
        watch: ModelWatch | None = None,
        states: PoolStates | None = None,
    ) -> None:
        super().__init__(groups if states is None else [*groups, states.group])
        self._watch, self.states = watch, states
        self.state = ""
        self.reads: StoreReads | None = None

    def refresh(self, is_thorough: bool = False) -> None:
        """Learn the state of the model: before each step, and thoroughly before pages are found."""
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Where the trees have the pages of a salt now."""
        return scope_of(salt, state=self.state)

    def is_read(self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int) -> bool:
        """Whether a request may begin, since what stores have of its prompt is read; begins to read it.

        The arguments are those of ``find``.
        """
        reads = self.reads
        if reads is None or reads.state != self.state:
            return True
        stored = scope_of(salt)
        return reads.is_read(
            request_id, lambda: self.needed(tokens[:max_tokens], self.scope(salt), stored), stored
        )

    def find(
        self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int
    ) -> tuple[int, list[list[PageRef]]]:
        """Retain the pages of the longest prefix that is known, with those that were read for the request.

        Args:
            request_id: Of the request.
            tokens: Of the prompt.
            salt: Under which they are known.
            max_tokens: Of the prefix.

        Returns:
            Pages of the prefix, and those of each group that it needs, held by the caller.
        """
        self.refresh(is_thorough=True)
        scope = self.scope(salt)
        read = self._take(request_id, tokens, salt, max_tokens)
        num_pages = self.num_known(tokens, scope, max_tokens)
        found = [
            group.tree.match(tokens, scope, max_tokens=max_tokens, num_pages=num_pages)
            for group in self.groups
        ]
        for group, refs in zip(self.groups, read, strict=False):
            for ref in reversed(refs):
                group.pages.pool.release(ref)
        return num_pages, found

    def has_read(self, request_id: str) -> bool:
        """Whether something was read for a request."""
        return self.reads is not None and self.reads.has(request_id)

    def _take(
        self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int
    ) -> list[list[PageRef]]:
        """Let the trees have what was read for a request; the pages are held by the caller."""
        reads = self.reads
        if reads is None:
            return []
        try:
            if reads.state != self.state or not reads.has(request_id):
                return []
            return self.look_up(tokens[:max_tokens], self.scope(salt), scope_of(salt))
        finally:
            reads.drop(request_id)

    def publish(self, held: Held, tokens: Sequence[int]) -> None:
        """Let others find the full pages of a request that began in the present state."""
        self.refresh(is_thorough=True)
        if held.state != self.state:
            held.kept.clear()
            return
        scope = self.scope(held.salt)
        self.seal(held.groups, tokens, scope, held.num_shared)
        held.published = tokens
        if held.num_stored < held.num_prompt:
            self.store(held)
        for end in sorted(held.kept):
            self._publish_states(held, tokens[:end], scope)
        if held.num_shared * self.page_size <= len(tokens):
            held.num_shared = 0

    def store(self, held: Held) -> None:
        """Give the store below what a request published since it did so last."""
        tokens, reads = held.published, self.reads
        if reads is None or reads.state != held.state or len(tokens) <= held.num_stored:
            return
        self.keep(held.groups, tokens, scope_of(held.salt))
        held.num_stored = len(tokens)

    @property
    def interval(self) -> int:
        """Tokens between two ends of a prefix that can be found."""
        return self.page_size if self.states is None else self.states.interval

    def num_parted(self, tokens: Sequence[int], scope: str) -> int:
        """Pages that a text shares with a known one, which are evicted later, as ``num_shared``."""
        return num_shared(self, self.states, tokens, scope)

    def wanted(self, num_tokens: int, num_found: int, num_shared: int) -> frozenset[int]:
        """Behind how many tokens of a prompt its states are kept: at its end, and where it parts from others.

        Args:
            num_tokens: Of the prompt, whose last one is always computed by whoever finds it.
            num_found: Tokens that were found.
            num_shared: As ``num_parted`` said.
        """
        if self.states is None:
            return frozenset()
        size = self.states.interval
        ends = {(num_tokens - 1) // size * size, num_tokens // size * size, num_shared * self.page_size}
        return frozenset(end for end in ends if end > num_found)

    def read_states(self, refs: Sequence[PageRef], cache: Cache, request: int) -> None:
        """Let the cache of a request have the states in the page that ``find`` found, which is released."""
        if self.states is None:
            return
        table = self.states.group.new_table()
        table.table.adopt([*refs])
        pages = self.states.pages
        restore_states(cache.layers, pages.specs, pages.read([table]))
        self.states.note(self.groups[0].pages.pool.events, "read", request, refs)
        table.table.release()

    def _publish_states(self, held: Held, tokens: Sequence[int], scope: str) -> None:
        copy = held.kept.pop(len(tokens))
        if self.states is None:
            return
        page = self.states.write(copy, 0, tokens, scope, held.went_on)
        self.states.note(self.groups[0].pages.pool.events, "kept", held.table.request)
        held.went_on = len(tokens)
        if page is not None:
            if held.num_shared * self.page_size == len(tokens):
                self.states.pages.group.pages.pool.prefer([*page.table.pages])
            page.table.release()
