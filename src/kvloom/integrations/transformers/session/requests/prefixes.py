"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import Cache

from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.search import Needed
from kvloom.core.text import Text
from kvloom.integrations.transformers.fingerprint.scopes import scope_of
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.pool.prefixes import PoolPrefixes
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentSessions, num_common
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.requests.held import Held
from kvloom.integrations.transformers.session.requests.prompt import Prompt
from kvloom.integrations.transformers.session.requests.state_rows import RequestStates, StateRows
from kvloom.integrations.transformers.session.requests.store_reads import StoreReads
from kvloom.integrations.transformers.states.specs import restore_states
from kvloom.paging import PageRef


class SessionPrefixes(PoolPrefixes):
    """Prefixes of a session, with methods that find and publish its pages.

    A model may change while a session is paused. Requests that begin after the change find no earlier pages.
    Requests that began before it publish none, since their tokens were computed in two states.

    Attributes:
        state: State of the model when the present step began.
        reads: Reads from a store below; ``None`` without one.

    Args:
        groups: Groups of the session.
        watch: Watch of the model; ``None`` for one that never changes.
        states: Pages of recurrent states; ``None`` for none.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        agents: Sessions of agents, which hold pages of ``groups``.
        cuts: Where texts are cut for mixers; ``None`` if bits may depend on what else is in a step. Pages and
            states are then those of whole pieces of prompts. Others, as of an answer, have other bits than
            those of a longer prompt with the same tokens.
    """

    def __init__(
        self,
        groups: Sequence[PrefixGroup],
        watch: ModelWatch | None = None,
        states: PoolStates | None = None,
        stateful: Sequence[Any] | None = None,
        agents: AgentSessions | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        super().__init__(groups, states)
        self._layers, self._watch, self._stateful, self._cuts = groups, watch, stateful, cuts
        self.agents = AgentSessions() if agents is None else agents
        self.state, self._has_published = "", False
        self.reads: StoreReads | None = None

    def refresh(self, is_thorough: bool = False) -> None:
        """Update the state of the model: before each step, and thoroughly before pages are found."""
        self._has_published = False
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Present scope of a salt's pages in the trees."""
        return scope_of(salt, state=self.state)

    def is_read(self, prompt: Prompt) -> bool:
        """Whether a request may begin, since stores have been read for it; starts reading them."""
        reads = self.reads
        if reads is None or reads.state != self.state:
            return True
        text, stored = prompt.text[: prompt.most], scope_of(prompt.salt)
        # The partial last page of a session's text is read only if no session here has it.
        rest = self.page_size - 1 if prompt.turn and not self.agents.usable(prompt, self.state) else 0

        def needed() -> list[tuple[Needed, Text]]:
            every = self.needed(self.find(text, self.scope(prompt.salt)), stored)
            return [(own, text[: len(own.tokens) + rest]) for own in every]

        return reads.is_read(prompt, needed, stored)

    def most(self, prompt: Prompt) -> int:
        """Largest number of first tokens of a prompt that may be found."""
        return prompt.most if self._cuts is None else min(prompt.most, prompt.num_asked)

    def begin_request(self, prompt: Prompt) -> Held:
        """``Held`` of a request that begins, with the pages that are known of its prompt."""
        self.refresh(is_thorough=True)
        scope, size, read, reads = self.scope(prompt.salt), self.page_size, None, self.reads
        try:
            if reads is not None and reads.state == self.state and reads.has(prompt.name):
                prompt = prompt._replace(text=reads.begin(prompt))
                _, read = self.look_up(self.find(prompt.text[: prompt.most], scope), scope_of(prompt.salt))
            found = self.find(prompt.text, scope)
            most = self.most(prompt)
            num_pages = self.num_whole(found, most)
            pages = self.retain(found, num_pages, most)
            if read is not None:
                self.release(read)
            if (events := self.main.pages.pool.events) is not None:
                events.name(prompt.name)
            num_found, part = self.find_part(prompt, num_pages)
            for group, ref in zip(self._layers, part, strict=False):
                group.pages.pool.retain(ref)
            is_end = False
            if not part and prompt.turn is not None and reads is not None:
                num_found, part, is_end = reads.take_part(num_pages * size, prompt.most)
        finally:
            if reads is not None:
                reads.drop(prompt.name)
        rows = [group.new_table() for group in self._layers]
        for i, (own, refs) in enumerate(zip(rows, pages, strict=False)):
            own.first = num_pages - len(refs)
            own.table.adopt([*refs, *part[i : i + 1]])
            own.truncate(num_found)
        self.agents.note(prompt, self.state, num_found, is_end)
        shared = self.num_shared(found)
        held = Held(prompt, rows, num_found, self.state, shared, num_stored=num_pages * size)
        if self._stateful is not None and self.states is not None:
            num_tokens = len(prompt.text) if self._cuts is None else prompt.num_asked
            held.wanted, held.went_on = self._wanted(num_tokens, num_found, shared), num_found
            if num_found:
                held.states = RequestStates(StateRows(self._stateful), 0, num_found)
                self._read_states(self.states, pages[-1], held.states.cache, held.table.request)
        return held

    def find_part(self, prompt: Prompt, num_pages: int) -> tuple[int, list[PageRef]]:
        """The partial page after the full ones in an agent's session.

        Args:
            prompt: Prompt of the request.
            num_pages: Number of full pages that are known of the prompt.

        Returns:
            Number of tokens that are known with it, and the page of each group, not retained for the caller;
            no pages if it adds no tokens.
        """
        num_known, session = num_pages * self.page_size, self.agents.usable(prompt, self.state)
        if (
            session is not None
            and self._stateful is None
            and len(session.tokens) - num_known in range(self.page_size)
        ):
            end = min(num_common(session.tokens, prompt.text), prompt.most)
            if end > num_known:
                return end, [own.table.pages[-1] for own in session.groups]
        return num_known, []

    def publish(self, held: Held, text: Text) -> None:
        """Let others find the full pages of a request that began in the present state."""
        if self._cuts is not None:
            text = text[: self._cuts.num_whole_pieces(held.prompt.num_asked)]
        if not self._has_published:  # one look at the model for all requests of a step
            self.refresh(is_thorough=True)
            self._has_published = True
        if held.state != self.state:
            held.kept.clear()
            return
        scope = self.scope(held.prompt.salt)
        self.seal(held.groups, text, scope, held.num_shared)
        held.published = text
        if held.num_stored < len(held.prompt.text):
            self.store(held)
        for end in sorted(held.kept):
            self._publish_states(held, text[:end], scope)
        if held.num_shared * self.page_size <= len(text):
            held.num_shared = 0

    def keep_turn(self, held: Held, tokens: list[int]) -> None:
        """Let the session of an agent hold the pages of a request that ends, unless the model has changed.

        Args:
            held: ``Held`` of the request, with a turn.
            tokens: Computed tokens of the request, whose full pages are published.
        """
        if held.state != self.state:
            return
        rows = [own.fork(0) for own in held.groups]
        limits = [group.pages.format.max_pages or 0 for group in self._layers]
        for row in rows:
            row.truncate(len(tokens))
        if self.states is not None:
            group, scope = self.states.group, self.scope(held.prompt.salt)
            num_pages = self.num_known(tokens, scope)
            refs = group.tree.pages_from(tokens[: num_pages * self.page_size], scope, max(num_pages - 1, 0))
            rows.append(group.new_table())
            for ref in refs:
                group.pages.pool.retain(ref)
            rows[-1].table.adopt(refs)
            limits.append(self.states.max_bytes // self.states.pages.nbytes)
        if self.reads is not None and self.reads.state == self.state and len(tokens) % self.page_size:
            refs = [own.table.pages[-1] for own in rows]
            self.reads.keep_part(tokens, refs, scope_of(held.prompt.salt))
        self.agents.keep(held, tokens, rows, limits)

    def store(self, held: Held) -> None:
        """Pass the pages that a request published since the last call to the store below."""
        text, reads = held.published, self.reads
        if reads is None or reads.state != held.state or len(text) <= held.num_stored:
            return
        self.keep(held.groups, text, scope_of(held.prompt.salt))
        held.num_stored = len(text)

    @property
    def interval(self) -> int:
        """Tokens between two ends of a prefix that can be found."""
        return self.page_size if self.states is None else self.states.interval

    def _wanted(self, num_tokens: int, num_found: int, num_shared: int) -> frozenset[int]:
        """Numbers of tokens after which a prompt's states are kept: at its end, and where others differ.

        Args:
            num_tokens: Number of tokens of the prompt. A request that finds it computes the last one itself.
            num_found: Number of tokens that were found.
            num_shared: Number of pages that the prompt shares with a known text.
        """
        size = self.interval
        ends = {(num_tokens - 1) // size * size, num_tokens // size * size, num_shared * self.page_size}
        return frozenset(end for end in ends if num_found < end <= num_tokens)

    def _read_states(self, states: PoolStates, refs: Sequence[PageRef], cache: Cache, request: int) -> None:
        """Restore the states of the page that was found into a request's cache; releases the page."""
        row, pages = states.group.new_table(), states.pages
        row.table.adopt([*refs])
        try:
            restore_states(cache.layers, pages.specs, pages.read([row]))
            states.note(self.main.pages.pool.events, "read", request, refs)
        finally:
            row.table.release()

    def _publish_states(self, held: Held, text: Text, scope: str) -> None:
        copy, states = held.kept.pop(len(text)), self.states
        if states is None:
            return
        page = states.write(copy, 0, text, scope, held.went_on)
        states.note(self.main.pages.pool.events, "kept", held.table.request)
        held.went_on = len(text)
        if page is not None:
            if held.num_shared * self.page_size == len(text):
                states.group.pages.pool.prefer([*page.table.pages])
            page.table.release()
