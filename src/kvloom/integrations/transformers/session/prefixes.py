"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import Cache

from kvloom.caches.prefixes.found import Found
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.search import Needed, Prefixes
from kvloom.integrations.transformers.fingerprint.scopes import scope_of
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.pool.prefixes import num_shared
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.integrations.transformers.session.agent_sessions import AgentSessions, AgentTurn, num_common
from kvloom.integrations.transformers.session.held import Held, RequestStates
from kvloom.integrations.transformers.session.recurrent import StateRows
from kvloom.integrations.transformers.session.store_reads import StoreReads
from kvloom.integrations.transformers.states.specs import restore_states
from kvloom.paging import PageRef


class SessionPrefixes(Prefixes):
    """Prefixes of a session, with methods that find and publish its pages.

    A model may change while a session is paused. Requests that begin after the change find no earlier pages.
    Requests that began before it publish none, since their tokens were computed in two states.

    Attributes:
        state: State of the model when the present step began.
        states: As below.
        reads: Reads from a store below; ``None`` without one.

    Args:
        groups: Groups of the session.
        watch: Watch of the model; ``None`` for one that never changes.
        states: Pages of recurrent states; ``None`` for none.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        agents: Sessions of agents, which hold pages of ``groups``.
    """

    def __init__(
        self,
        groups: Sequence[PrefixGroup],
        watch: ModelWatch | None = None,
        states: PoolStates | None = None,
        stateful: Sequence[Any] | None = None,
        agents: AgentSessions | None = None,
    ) -> None:
        super().__init__(groups if states is None else [*groups, states.group])
        self._layers, self._watch, self.states, self._stateful = groups, watch, states, stateful
        self.agents = AgentSessions() if agents is None else agents
        self.state = ""
        self.reads: StoreReads | None = None

    def refresh(self, is_thorough: bool = False) -> None:
        """Update the state of the model: before each step, and thoroughly before pages are found."""
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Present scope of a salt's pages in the trees."""
        return scope_of(salt, state=self.state)

    def is_read(
        self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int, turn: AgentTurn | None
    ) -> bool:
        """Whether a request may begin, since stores have been read for it; starts reading them.

        Arguments are those of ``begin_request``.
        """
        reads = self.reads
        if reads is None or reads.state != self.state:
            return True
        text, stored = tokens[:max_tokens], scope_of(salt)
        # The partial last page of a session's text is read only if no session here has it.
        rest = self.page_size - 1 if turn and not self.agents.usable(turn, tokens, salt, self.state) else 0

        def needed() -> list[tuple[Needed, Sequence[int]]]:
            every = self.needed(self.find(text, self.scope(salt)), stored)
            return [(own, text[len(own.tokens) :][:rest]) for own in every]

        return reads.is_read(request_id, needed, stored)

    def begin_request(
        self,
        request_id: str,
        tokens: Sequence[int],
        num_prompt: int,
        salt: str,
        max_tokens: int,
        turn: AgentTurn | None,
    ) -> Held:
        """``Held`` of a request that begins, with the pages that are known of its prompt.

        Args:
            request_id: Id of the request.
            tokens: Tokens that are to be computed.
            num_prompt: Number of all tokens of the prompt.
            salt: Salt of the request.
            max_tokens: Largest number of tokens that may be found.
            turn: Turn of an agent's session; ``None`` without a session.
        """
        try:
            num_pages, found, known = self.begin_with(request_id, tokens, salt, max_tokens)
            if (events := self.main.pages.pool.events) is not None:
                events.name(request_id)
            num_known = num_pages * self.page_size
            num_found, part = self.find_part(turn, tokens, salt, max_tokens, num_pages)
            for group, ref in zip(self._layers, part, strict=False):
                group.pages.pool.retain(ref)
            is_end = False
            if not part and turn is not None and self.reads is not None:
                num_found, part, is_end = self.reads.take_part(num_known, max_tokens)
        finally:
            if self.reads is not None:
                self.reads.drop(request_id)
        groups = [group.new_table() for group in self._layers]
        for i, (own, refs) in enumerate(zip(groups, found, strict=False)):
            own.first = num_pages - len(refs)
            own.table.adopt([*refs, *part[i : i + 1]])
            own.truncate(num_found)
        if turn is not None:
            self.agents.note(turn, tokens, salt, self.state, num_found, is_end)
        shared = num_shared(self, self.states, known)
        held = Held(groups, salt, num_prompt, num_found, self.state, shared, num_stored=num_known)
        if self._stateful is not None and self.states is not None:
            held.wanted, held.went_on = self.wanted(len(tokens), num_found, shared), num_found
            if num_found:
                held.states = RequestStates(StateRows(self._stateful), 0, num_found)
                self.read_states(found[-1], held.states.cache, held.table.request)
        return held

    def find_part(
        self, turn: AgentTurn | None, tokens: Sequence[int], salt: str, max_tokens: int, num_pages: int
    ) -> tuple[int, list[PageRef]]:
        """The partial page after the full ones in an agent's session; arguments as in ``begin_request``.

        Args:
            num_pages: Number of full pages that are known of the prompt.

        Returns:
            Number of tokens that are known with it, and the page of each group, not retained for the caller;
            no pages if it adds no tokens.
        """
        num_known = num_pages * self.page_size
        session = self.agents.usable(turn, tokens, salt, self.state)
        if (
            session is None
            or self._stateful is not None
            or len(session.tokens) // self.page_size != num_pages
        ):
            return num_known, []
        end = min(num_common(session.tokens, tokens), max_tokens)
        return (end, [own.table.pages[-1] for own in session.groups]) if end > num_known else (num_known, [])

    def begin_with(
        self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int
    ) -> tuple[int, list[list[PageRef]], Found]:
        """Retain the pages of the longest known prefix, including pages that were read for the request.

        Args:
            request_id: Id of the request.
            tokens: Tokens of the prompt.
            salt: Salt of the request.
            max_tokens: Largest number of tokens of the prefix.

        Returns:
            Number of pages of the prefix; the pages of each group that it needs, held by the caller; and what
            is found of the whole text.
        """
        self.refresh(is_thorough=True)
        read = self._take(request_id, tokens, salt, max_tokens)
        found = self.find(tokens, self.scope(salt))
        num_pages = self.num_whole(found, max_tokens)
        held = self.retain(found, num_pages, max_tokens)
        for group, refs in zip(self.groups, read, strict=False):
            for ref in reversed(refs):
                group.pages.pool.release(ref)
        return num_pages, held, found

    def has_read(self, request_id: str) -> bool:
        """Whether stores had pages for a request that is waiting."""
        return self.reads is not None and self.reads.has(request_id)

    def _take(
        self, request_id: str, tokens: Sequence[int], salt: str, max_tokens: int
    ) -> list[list[PageRef]]:
        """Add the pages that were read for a request to the trees; the caller holds them."""
        reads = self.reads
        if reads is None or reads.state != self.state or not reads.has(request_id):
            return []
        reads.begin(request_id)
        return self.look_up(self.find(tokens[:max_tokens], self.scope(salt)), scope_of(salt))[1]

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

    def keep_turn(self, turn: AgentTurn, held: Held, tokens: Sequence[int]) -> None:
        """Let the session of an agent hold the pages of a request that ends, unless the model has changed.

        Args:
            turn: Turn of the request.
            held: ``Held`` of the request.
            tokens: Computed tokens of the request, whose full pages are published.
        """
        if held.state != self.state:
            return
        groups, limits = [], []
        for group, own in zip(self._layers, held.groups, strict=True):
            groups.append(own.fork(0))
            groups[-1].truncate(len(tokens))
            limits.append(group.pages.format.max_pages or 0)
        if self.states is not None:
            states, scope = self.states.group, self.scope(held.salt)
            num_pages = self.num_known(tokens, scope)
            refs = states.tree.pages_from(tokens[: num_pages * self.page_size], scope, max(num_pages - 1, 0))
            groups.append(states.new_table())
            for ref in refs:
                states.pages.pool.retain(ref)
            groups[-1].table.adopt(refs)
            limits.append(self.states.max_bytes // self.states.pages.nbytes)
        if self.reads is not None and self.reads.state == self.state and len(tokens) % self.page_size:
            self.reads.keep_part(tokens, [own.table.pages[-1] for own in groups], scope_of(held.salt))
        self.agents.keep(turn, tokens, held.salt, held.state, groups, limits)

    def store(self, held: Held) -> None:
        """Pass the pages that a request published since the last call to the store below."""
        tokens, reads = held.published, self.reads
        if reads is None or reads.state != held.state or len(tokens) <= held.num_stored:
            return
        self.keep(held.groups, tokens, scope_of(held.salt))
        held.num_stored = len(tokens)

    @property
    def interval(self) -> int:
        """Tokens between two ends of a prefix that can be found."""
        return self.page_size if self.states is None else self.states.interval

    def wanted(self, num_tokens: int, num_found: int, num_shared: int) -> frozenset[int]:
        """Numbers of tokens after which a prompt's states are kept: at its end, and where others differ.

        Args:
            num_tokens: Number of tokens of the prompt. A request that finds it computes the last one itself.
            num_found: Number of tokens that were found.
            num_shared: Number of pages that the prompt shares with a known text.
        """
        if self.states is None:
            return frozenset()
        size = self.states.interval
        ends = {(num_tokens - 1) // size * size, num_tokens // size * size, num_shared * self.page_size}
        return frozenset(end for end in ends if end > num_found)

    def read_states(self, refs: Sequence[PageRef], cache: Cache, request: int) -> None:
        """Restore the states of the page that ``find`` found into a request's cache; releases the page."""
        if self.states is None:
            return
        table = self.states.group.new_table()
        table.table.adopt([*refs])
        pages = self.states.pages
        try:
            restore_states(cache.layers, pages.specs, pages.read([table]))
            self.states.note(self.groups[0].pages.pool.events, "read", request, refs)
        finally:
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
