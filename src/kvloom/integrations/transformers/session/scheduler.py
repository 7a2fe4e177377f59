"""transformers' schedulers, with prefixes that are computed once and requests that fail alone."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

from kvloom.errors import ArgumentError, OutOfPages
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.drafts.drafter import Drafter
from kvloom.integrations.transformers.session.requests.prompt import Prompt

_MOST_PASSED: Final = 64
"""Maximum number of requests that wait for a page or a store, and are passed over in a step."""


class SharingScheduler(Scheduler):  # type: ignore[misc]
    """Mixin for the schedulers of transformers.

    A request waits while another computes a page that both need. A request that cannot get enough pages even
    alone fails, and no other request does.
    """

    cache: BatchCache
    waiting_requests_order: deque[str]
    starved_requests: list[tuple[Any, int]]
    fail: Callable[[Exception, Any], None]
    """Function that reports the failure of a request; set after construction."""
    most_positions: int | None = None
    """Largest length of a request that does not change the RoPE of others; set after construction."""
    drafter: Drafter | None = None
    """Adds drafts to each step; set after construction; ``None`` for none."""
    most_drafted: int = sys.maxsize
    """Largest number of drafted tokens of a step, for whose states there is room; set after construction."""

    def add_waiting_request(self, state: Any) -> None:
        """Add a request; one without a limit gets as many tokens as pages and positions allow.

        Raises:
            ArgumentError: there can never be enough pages or positions, or another request has this id; the
                session fails the request that is added.
        """
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            raise ArgumentError(f"request_id must be new, got {state.request_id!r}, which has not ended")
        room, why = self.cache.most_tokens, "all pages hold"
        if self.most_positions is not None and self.most_positions < room:
            room, why = self.most_positions, "have the rotary embedding of a short text"
        asked = len(state.initial_tokens)
        if state.max_new_tokens is None and asked <= room:
            state.max_new_tokens = state._new_tokens_limit = max(room - asked, 1)
        elif asked + (state.max_new_tokens or 1) - 1 > room:
            raise ArgumentError(
                f"input_ids and max_new_tokens must be at most {room + 1} tokens together, one more than "
                f"{why}, got {asked} and {state.max_new_tokens}"
            )
        super().add_waiting_request(state)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Schedule a step without a limit of tokens that are read, since attention gathers none.

        Drafts take what room the requests of the step have left.
        """
        scheduled, is_fast, num_tokens, num_read = self._schedule(token_budget)
        if self.drafter is not None and scheduled:
            room = min(token_budget - num_tokens, self.most_drafted)
            num_tokens += self.drafter.add(scheduled, num_tokens, room)
        return scheduled, is_fast, num_tokens, num_read

    def _schedule(self, token_budget: int) -> Any:
        requests = self.cache.requests
        with requests.lock:
            requests.prefixes.refresh()
            requests.prefixes.agents.expire()
        if not self.active_requests:  # transformers would wait for a cancelled request
            self.block_new_requests = False
        asked_for = None
        while True:
            made = super().schedule_batch(token_budget, sys.maxsize)
            if made[0] is not None or len(self.active_requests) > 1:
                return made
            alone = [*self.active_requests.values(), *self._may_begin()][0]
            if alone is not asked_for and requests.pages.ask_again():
                asked_for = alone  # a request does not fail because memory was refused to another
                continue
            with requests.lock:
                if requests.prefixes.agents.give_way():
                    continue
            self.fail(OutOfPages(f"no memory for more tokens of request {alone.request_id}"), alone)
            self.finish_request(alone.request_id)
            if self.waiting_requests.pop(alone.request_id, None) is not None:
                self.waiting_requests_order.remove(alone.request_id)
            if not self.has_pending_requests():
                return [], False, 0, 0

    def _process_candidates(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as transformers does; a request without room for a piece of its prompt does not starve."""
        made = super()._process_candidates(*args, **kwargs)
        self.starved_requests = [x for x in self.starved_requests if self.cache.num_whole(*x)]
        return made

    def _schedule_request(
        self, state: Any, request_tokens: list[int], token_budget: int, removed: set[str]
    ) -> None:
        """Schedule as transformers does, but no part of a piece of a prompt."""
        if len(request_tokens) > token_budget:
            token_budget = self.cache.num_whole(state, token_budget)
        super()._schedule_request(state, request_tokens, token_budget, removed)

    def finish_request(self, request_id: str) -> None:
        """Finish a request, and let its agent's session, if any, hold the pages."""
        state = self.active_requests.get(request_id)
        if state is not None and state.error is None:
            self._keep_turn(state)
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[Any]:
        """Clear cancelled requests, and let their agents' sessions hold the pages."""
        with self._cancellation_lock:
            cancelled = [
                self.active_requests[x] for x in self._requests_to_cancel if x in self.active_requests
            ]
        for state in cancelled:
            self._keep_turn(state)
        # transformers would search the waiting requests for each cancelled one.
        order, self.waiting_requests_order = self.waiting_requests_order, deque()
        try:
            states: list[Any] = super().clear_cancelled_requests()
        finally:
            is_shorter = len(self.waiting_requests) < len(order)
            still = deque(x for x in order if x in self.waiting_requests) if is_shorter else order
            self.waiting_requests_order = still
        return states

    def _keep_turn(self, state: Any) -> None:
        if state.generated_tokens:  # all but the last one, which was not computed
            tokens = (state.initial_tokens + state.generated_tokens)[: state.current_len()]
            self.cache.requests.keep_turn(state.request_id, tokens)

    def _cleanup_waiting_queue(self, request_ids_to_remove_from_waiting: set[str]) -> None:
        """Remove requests from the waiting ones, of which most are at the front."""
        order, passed, num_left = self.waiting_requests_order, list[str](), len(self.waiting_requests)
        while order and len(order) + len(passed) > num_left:
            name = order.popleft()
            if name not in request_ids_to_remove_from_waiting:
                passed.append(name)
        order.extendleft(reversed(passed))

    def _may_begin(self) -> Iterator[Any]:
        """Requests that wait for pages, and not for a store."""
        reads = self.cache.requests.prefixes.reads
        return (x for x in self.waiting_requests.values() if reads is None or reads.is_done(x.request_id))

    def _infer_request_tokens(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        """Tokens of a request; sets ``candidate``, since ``search_prefix_match`` gets no salt."""
        self.cache.candidate = state
        tokens: list[int] = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        return tokens

    def _get_waiting_candidates(self) -> list[Any]:
        """Waiting requests that may begin in one step, without those that wait for a page or a store.

        No more than 64 of those that wait are passed over, so that a step takes as long beside any number.
        """
        requests, is_sharing = self.cache.requests, self.cache.use_prefix_sharing
        if requests.prefixes.reads is not None:
            requests.prefixes.reads.keep_only(self.waiting_requests)
        busy = _Busy(requests.prefixes.interval)
        for state in self.active_requests.values():
            if state.status == RequestStatus.PREFILLING:
                busy.add(Prompt.by(state), state.current_len())
        chosen: list[Any] = []
        budget, num_passed = self.cache.max_batch_tokens, 0
        for name in self.waiting_requests_order:
            if budget <= 0 or len(chosen) >= self.max_requests_per_batch or num_passed > _MOST_PASSED:
                break
            state, known = self.waiting_requests[name], 0
            if is_sharing:
                prompt = Prompt.by(state)
                known = requests.num_known(prompt)
                if prompt.most and busy.has(prompt, known):
                    num_passed += 1
                    continue
                is_read = requests.is_read(prompt)
                busy.add(prompt, known)
                if not is_read:
                    num_passed += 1
                    continue
            chosen.append(state)
            budget -= len(state.initial_tokens) - known
        return chosen


class _Busy:
    """Pieces that are being computed and can then be found, identified by all tokens up to their end."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._prefixes: dict[int, set[tuple[str, tuple[int, ...]]]] = {}

    def add(self, prompt: Prompt, num_stored: int) -> None:
        """Add the next piece of a request with ``num_stored`` stored tokens, if its prompt fills it."""
        end = (num_stored // self._size + 1) * self._size
        if end <= len(prompt.text):
            self._prefixes.setdefault(end, set()).add((prompt.salt, tuple(prompt.text[:end])))

    def has(self, prompt: Prompt, num_known: int) -> bool:
        """Whether a request needs one of the pieces after its ``num_known`` known tokens."""
        return any(
            num_known < end < len(prompt.text) and (prompt.salt, tuple(prompt.text[:end])) in prefixes
            for end, prefixes in self._prefixes.items()
        )


def scheduler_class(name: str) -> Any:
    """The class for a ``scheduler_type``.

    Raises:
        ArgumentError: there is no scheduler of this name.
    """
    theirs = SCHEDULER_MAPPING.get(name)
    if theirs is None:
        raise ArgumentError(f"scheduler_type must be one of {', '.join(SCHEDULER_MAPPING)}, got {name!r}")
    return type(theirs.__name__, (SharingScheduler, theirs), {})
