"""``Drafter``: which requests of a step have drafts, and of how many tokens."""

from collections import Counter
from typing import Any, Final

from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import Guesses
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.integrations.transformers.session.requests.session_requests import SessionRequests
from kvloom.integrations.transformers.session.steps.drafted import DraftedRequest

MOST: Final = 15
"""Largest number of drafted tokens of a request in a step. Attention to up to 16 new tokens of a request has
the bits of attention to one, also in bfloat16 on processors with AMX."""
_DELAY: Final = 1 / 8
"""Largest part by which drafts may lengthen a step in which a request has none, such as a prompt."""


class Drafter:
    """Adds drafts to the requests of steps that have been scheduled.

    Args:
        requests: Requests of the session.

    Attributes:
        costs: Times of steps, which whoever computes them notes.
    """

    def __init__(self, requests: SessionRequests) -> None:
        self._requests, self.costs = requests, Costs()

    def add(self, scheduled: list[Any], num_tokens: int, room: int) -> int:
        """Replace scheduled requests that have drafts by ``DraftedRequest``.

        Args:
            scheduled: ``FutureRequestState`` of each request of the step.
            num_tokens: Number of tokens of the step.
            room: Number of tokens that it still has room for.

        Returns:
            Number of drafted tokens.
        """
        drafts = dict[int, tuple[list[int], float]]()
        for i, request in enumerate(scheduled):
            state = request.state
            most = min(MOST, state._new_tokens_limit - state.generated_len() - 1)
            is_decoding = request.has_new_token and state.generated_tokens
            if room > 0 and most > 0 and is_decoding and _may_draft(state):
                draft, odds = self._guess(state, most)
                if draft:
                    drafts[i] = draft, odds
        if not drafts:
            return 0
        num_new = sum(x.has_new_token for x in scheduled)
        is_among_others, added = len(drafts) < len(scheduled), 0
        for i, count in self.counts(drafts, num_new, num_tokens, room, is_among_others).items():
            draft = drafts[i][0][:count]
            if self._has_pages(scheduled[i].state, count, len(scheduled)):
                scheduled[i] = DraftedRequest(scheduled[i], draft)
                added += count
        return added

    def counts(
        self,
        drafts: dict[int, tuple[list[int], float]],
        num_new: int,
        num_tokens: int,
        room: int,
        is_among_others: bool,
    ) -> Counter[int]:
        """Numbers of drafted tokens with which a step is expected to make most tokens a second.

        Args:
            drafts: A draft for some requests, and the probability that each token is right if those before
                it are.
            num_new: Number of tokens that the step makes without drafts.
            num_tokens: Number of tokens that it computes without them.
            room: Largest number of drafted tokens.
            is_among_others: Whether a request has no draft, and would only be delayed.
        """
        counts, token = Counter[int](), self.costs.token
        expected, seconds = float(num_new), self.costs.fixed + token * num_tokens
        if is_among_others and token > 0:
            room = min(room, int(_DELAY * seconds / token))
        gains = [(odds**n, i) for i, (draft, odds) in drafts.items() for n in range(1, len(draft) + 1)]
        for gain, i in sorted(gains, key=lambda x: -x[0])[:room]:
            if gain * seconds < expected * token:
                break
            expected, seconds = expected + gain, seconds + token
            counts[i] += 1
        return counts

    def _guess(self, state: Any, most: int) -> tuple[list[int], float]:
        """A draft for a request, and its odds: what a grammar forces, or what came before in its text."""
        held = self._requests[state.request_id]
        if held.guesses is None:
            held.guesses = Guesses(state.initial_tokens)
        guesses: Guesses = held.guesses
        return guesses.after(state.generated_tokens, most, _forced(state)), guesses.odds

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


def _may_draft(state: Any) -> bool:
    """Whether the sender of a request lets it have drafts."""
    choice = state.logit_processor_kwargs.get(CHOICE)
    return choice is None or choice.may_draft


def _forced(state: Any) -> list[int]:
    """Tokens that a processor of a request forces next; empty if there are none."""
    choice = state.logit_processor_kwargs.get(CHOICE)
    ways = () if choice is None else (getattr(x, "forced", None) for x in choice.processors)
    return next((way(choice.tokens) for way in ways if way is not None), [])
