"""``Drafter``: which requests of a step have drafts, and of how many tokens."""

from typing import Any, Final

from kvloom.integrations.transformers.session.drafts.lookup import Lookup
from kvloom.integrations.transformers.session.requests.session_requests import SessionRequests
from kvloom.integrations.transformers.session.steps.drafted import DraftedRequest

MOST: Final = 15
"""Largest number of drafted tokens of a request in a step. Attention to up to 16 new tokens of a request has
the bits of attention to one, also in bfloat16 on processors with AMX."""


class Drafter:
    """Adds drafts to the requests of steps that have been scheduled.

    Args:
        requests: Requests of the session.
    """

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests

    def add(self, scheduled: list[Any], room: int) -> int:
        """Replace scheduled requests that have drafts by ``DraftedRequest``.

        Args:
            scheduled: ``FutureRequestState`` of each request of the step.
            room: Number of tokens that the step still has room for.

        Returns:
            Number of drafted tokens.
        """
        added = 0
        for i, request in enumerate(scheduled):
            most = min(
                MOST, room - added, request.state._new_tokens_limit - request.state.generated_len() - 1
            )
            if most > 0 and request.has_new_token and request.state.generated_tokens:
                draft = self._draft(request.state, most)
                if draft and self._has_pages(request.state, len(draft), len(scheduled)):
                    scheduled[i] = DraftedRequest(request, draft)
                    added += len(draft)
        return added

    def _draft(self, state: Any, most: int) -> list[int]:
        """A draft of a request, of at most ``most`` tokens."""
        held = self._requests[state.request_id]
        if held.lookup is None:
            held.lookup = Lookup(state.initial_tokens)
        held.lookup.extend(state.generated_tokens[len(held.lookup) - len(state.initial_tokens) :])
        found: list[int] = held.lookup.draft(most)
        return found

    def _has_pages(self, state: Any, count: int, num_requests: int) -> bool:
        """Take pages for a draft, but none that an answer of this step may need for its next token."""
        requests, name, past = self._requests, state.request_id, state.current_len()
        with requests.lock:
            missing = requests.num_missing(name, past + 1 + count)
            if missing > requests.pages.num_room - num_requests * bool(missing):
                return False
            if requests.extend(name, past, past + 1 + count):
                return True
            requests.take_back(name, past + 1)
            return False
