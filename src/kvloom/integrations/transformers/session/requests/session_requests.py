"""The requests of a session that hold pages: they begin, get more, let others find them, and end."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.core.text import Text
from kvloom.integrations.transformers.session.report import PageMap
from kvloom.integrations.transformers.session.requests.growing import GrowingPages
from kvloom.integrations.transformers.session.requests.held import Held, page_map_of
from kvloom.integrations.transformers.session.requests.prefixes import SessionPrefixes
from kvloom.integrations.transformers.session.requests.prompt import Prompt
from kvloom.integrations.transformers.session.requests.state_rows import RequestStates, expect_apart
from kvloom.paging import PageTable, check


class SessionRequests:
    """The pages of all requests of a session, by the ids of the requests. For any thread.

    Pages are allocated when they are needed, up to the most of each group. When all are in use, pages that
    no request holds are evicted.

    Args:
        groups: Groups of layers.
        prefixes: What finds and publishes their pages.
        share: Whether requests find pages of others.

    Attributes:
        groups, prefixes, share: As above.
        pages: Pages of the first group.
        lock: Lock of all pages.
        num_asked: Number of prompt tokens that were looked up.
        num_found: Number of these that were found.
        num_preempted: Number of times that a request lost its pages to others.
        num_finished: Number of requests that ended.
    """

    def __init__(self, groups: Sequence[PrefixGroup], prefixes: SessionPrefixes, share: bool) -> None:
        self.groups, self.prefixes, self.share = groups, prefixes, share
        self.pages = cast(GrowingPages, groups[0].pages)
        self.lock = prefixes.agents.lock
        self.num_asked = self.num_found = self.num_preempted = self.num_finished = 0
        self._held: dict[str, Held] = {}

    @property
    def held(self) -> list[Held]:
        """What each request holds."""
        return [*self._held.values()]

    @property
    def states(self) -> list[RequestStates]:
        """Recurrent states of the requests that have any."""
        return [x.states for x in self.held if x.states is not None]

    def __getitem__(self, name: str) -> Held:
        return self._held[name]

    def num_known(self, prompt: Prompt) -> int:
        """Number of first tokens of a prompt whose pages would be found."""
        prefixes = self.prefixes
        with self.lock:
            scope = prefixes.scope(prompt.salt)
            return prefixes.num_known(prompt.text, scope, prefixes.most(prompt)) * prefixes.page_size

    def is_read(self, prompt: Prompt) -> bool:
        """Whether a waiting request may begin, since stores have been read for it; starts reading them."""
        with self.lock:
            return self.prefixes.is_read(prompt)

    def begin_if_known(self, prompt: Prompt) -> int:
        """Let a request begin if pages of its prompt are known; returns the number of found tokens."""
        reads = self.prefixes.reads
        with self.lock:
            is_known = (reads is not None and reads.has(prompt.name)) or self.num_known(prompt)
            if not is_known and not self.prefixes.find_part(prompt, 0)[1]:
                return 0  # counted when it gets pages, since each step until then may look it up
            self._held[prompt.name] = held = self.prefixes.begin_request(prompt)
            self.num_asked += len(held.prompt.text)
            self.num_found += held.num_found
            return held.num_found

    def begin(self, prompt: Prompt, past: int, end: int) -> bool:
        """Let a request begin with what is known of its prompt, and ``extend`` it; false if it cannot."""
        with self.lock:
            missing = self.num_missing(prompt.name, end)
            self.pages.make_room(missing)
            if missing > self.pages.num_room:
                return False
            self._held[prompt.name] = held = self.prefixes.begin_request(prompt)
            if not self.extend(prompt.name, past, end):
                _release(self._held.pop(prompt.name))
                return False
            self.num_asked += len(held.prompt.text)
            return True

    def extend(self, name: str, past: int, end: int) -> bool | None:
        """Take pages for the tokens of a request from ``past`` to ``end``, in every group.

        Returns:
            Whether there were enough; ``None`` if the request holds no pages.
        """
        with self.lock:
            held = self._held.get(name)
            if held is None:
                return None
            try:
                for group, own in zip(self.groups, held.groups, strict=True):
                    group.release_passed(own, past)
                    new = end - own.num_tokens
                    if new > 0 and not own.fill(new):
                        group.append(own, new)
            except (MemoryError, torch.OutOfMemoryError):  # OutOfPages among them; nothing was taken
                return False
            return True

    def take_back(self, name: str, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of a request's text, and release pages without any of them.

        Its recurrent states are then those behind these tokens.
        """
        with self.lock:
            held = self._held.get(name)
            if held is not None:
                for own in held.groups:
                    own.truncate(num_tokens)
                held.states = held.passed.get(num_tokens, held.states)
                held.passed = {}

    def num_missing(self, name: str, end: int) -> int:
        """Number of pages that a request needs for its tokens before ``end``, copies included."""
        with self.lock:
            held = self._held.get(name)
            if held is None:
                return -(-end // self.prefixes.page_size)
            return self.groups[0].num_missing(held.groups[0], end)

    def publish(self, name: str, prompt: Sequence[int], new: Sequence[int], end: int) -> None:
        """Let others find the full pages of a request.

        Args:
            name: Id of the request.
            prompt: Tokens of its prompt.
            new: Tokens that it generated.
            end: Number of its tokens that are computed.
        """
        with self.lock:
            held = self._held.get(name)
            if held is not None:
                own = held.prompt.text
                self.prefixes.publish(held, own[:end] if end <= len(own) else Text(prompt, new, end))

    def keep_turn(self, name: str, tokens: list[int]) -> None:
        """Let the agent's session of a request that ends, if it has one, hold the pages of ``tokens``."""
        with self.lock:
            held = self._held.get(name)
            if held is not None and held.prompt.turn is not None and self.share:
                self.prefixes.keep_turn(held, tokens)

    def fork(self, name: str, num_tokens: int, others: Sequence[str]) -> None:
        """Let new requests share the pages of another; shared pages are copied before a write.

        Args:
            name: Id of the other request.
            num_tokens: Number of its tokens that are computed.
            others: Ids of the new requests.
        """
        with self.lock:
            parent, events = self._held[name], self.pages.pool.events
            for own in parent.groups:  # drops the slot of the next token, which each request writes itself
                own.truncate(num_tokens)
            for other in others:
                if events is not None:
                    events.begin(parent.prompt.salt, num_tokens)
                    events.name(other)
                number = None if events is None else events.request
                groups = [own.fork(number) for own in parent.groups]
                child = replace(parent, groups=groups, wanted=frozenset(), kept={}, passed={}, guesses=None)
                child.states = None if parent.states is None else parent.states.copied()
                self._held[other] = child

    def release(self, name: str, is_preempted: bool = False) -> None:
        """Release the pages of a request, if it holds any; pages that can be found again are evicted last."""
        with self.lock:
            held = self._held.pop(name, None)
            if held is not None:
                self.prefixes.store(held)
                _release(held)
                self.num_preempted += is_preempted
                self.num_finished += not is_preempted

    def release_all(self, is_evicted: bool) -> None:
        """Release the pages of all requests, and possibly evict all findable pages."""
        with self.lock:
            for name in [*self._held]:
                self.release(name)
            if is_evicted:
                self.prefixes.agents.give_up_all("the server gave up all pages")
                if self.pages.pool.events is not None:
                    self.pages.pool.events.request = 0
                for group in self.groups:
                    group.tree.evict(group.pages.pool.num_evictable)

    def tokens_found(self, name: str) -> int:
        """Number of tokens of a request's prompt whose pages were found; 0 if it holds no pages."""
        return self._held[name].num_found if name in self._held else 0

    def page_map(self) -> PageMap:
        """Map of the pages and their holders."""
        with self.lock:
            return page_map_of(self.pages.pool, self._held, self.prefixes.agents.tables(0))

    def tables(self, group: int = 0) -> list[PageTable]:
        """Page tables of all requests in a group."""
        return [held.groups[group].table for held in self.held]

    def check(self) -> None:
        """Check every invariant of the pages; raises ``StateError`` at the first that fails."""
        with self.lock:
            for i, group in enumerate(self.groups):
                check(group.pages.pool, group.tree, self.tables(i) + self.prefixes.agents.tables(i))
            expect_apart(self.states)


def _release(held: Held) -> None:
    for own in held.groups:
        own.table.release()
