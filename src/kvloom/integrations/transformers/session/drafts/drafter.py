"""``Drafter``: which requests of a step have drafts, and of how many tokens."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kvloom.integrations.transformers.session.drafts.assistant import Assistant
from kvloom.integrations.transformers.session.drafts.assisting import DELAY, Assisting, Candidate
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import MOST, Guesses
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.integrations.transformers.session.requests.session_requests import SessionRequests
from kvloom.integrations.transformers.session.steps.drafted import DraftedRequest

_LOG: Final = logging.getLogger("kvloom")


class Drafter:
    """Adds drafts to the requests of steps that have been scheduled.

    A draft is what a grammar forces, else what lookup finds, else what an assistant writes. The assistant is
    also asked where lookup finds something, if it is more often right. If it fails, the log has a warning,
    and the session goes on without it.

    Args:
        requests: Requests of the session.
        assistant: The assistant; ``None`` for lookup alone.

    Attributes:
        costs: Times of steps, which whoever computes them notes.
        assisting: What asks the assistant; ``None`` without one.
    """

    def __init__(self, requests: SessionRequests, assistant: Assistant | None = None) -> None:
        self._requests, self.costs = requests, Costs()
        self.assisting = None if assistant is None else Assisting(assistant, self.costs)

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
            most = _most_of(request.state)
            if room > 0 and most > 0 and _is_drafted(request):
                draft, odds = self._guess(request.state, most)
                if draft:
                    drafts[i] = draft, odds
        num_new = sum(x.has_new_token for x in scheduled)
        assisted, taken = self._ask(scheduled, drafts, num_new, num_tokens, room)
        drafts |= assisted
        if not drafts:
            return 0
        is_among_others, added = len(drafts) < len(scheduled), 0
        for i, count in self.counts(drafts, num_new, num_tokens, room, is_among_others, taken).items():
            draft = drafts[i][0][:count]
            if self._has_pages(scheduled[i].state, count, len(scheduled)):
                is_forced = self._guesses_of(scheduled[i].state).is_forced
                by = "assistant" if i in assisted else "grammar" if is_forced else "lookup"
                scheduled[i] = DraftedRequest(scheduled[i], draft, by)
                added += count
        return added

    def note(self, drafted: Sequence[DraftedRequest]) -> None:
        """Note what became of the drafts of a step."""
        if self.assisting is not None:
            own = [x for x in drafted if x.by == "assistant"]
            self.assisting.note(sum(len(x.draft) for x in own), sum(x.num_accepted for x in own))

    def counts(
        self,
        drafts: dict[int, tuple[list[int], float]],
        num_new: int,
        num_tokens: int,
        room: int,
        is_among_others: bool,
        taken: float = 0.0,
    ) -> Counter[int]:
        """Numbers of drafted tokens with which a step is expected to make most tokens a second.

        Args:
            drafts: A draft for some requests, and the probability that each token is right if those before
                it are.
            num_new: Number of tokens that the step makes without drafts.
            num_tokens: Number of tokens that it computes without them.
            room: Largest number of drafted tokens.
            is_among_others: Whether a request has no draft, and would only be delayed.
            taken: Seconds that an assistant has taken for the drafts.
        """
        counts, token = Counter[int](), self.costs.token
        expected, seconds = float(num_new), self.costs.fixed + token * num_tokens
        if is_among_others and token > 0:
            room = max(min(room, int((DELAY * seconds - taken) / token)), 0)
        gains = [(odds**n, i) for i, (draft, odds) in drafts.items() for n in range(1, len(draft) + 1)]
        for gain, i in sorted(gains, key=lambda x: -x[0])[:room]:
            if gain * seconds < expected * token:
                break
            expected, seconds = expected + gain, seconds + token
            counts[i] += 1
        return counts

    def _guess(self, state: Any, most: int) -> tuple[list[int], float]:
        """A draft for a request, and its odds: what a grammar forces, or what came before in its text."""
        guesses = self._guesses_of(state)
        return guesses.after(state.generated_tokens, most, _forced(state)), guesses.odds

    def _guesses_of(self, state: Any) -> Guesses:
        held = self._requests[state.request_id]
        if held.guesses is None:
            held.guesses = Guesses(state.initial_tokens)
        guesses: Guesses = held.guesses
        return guesses

    def _ask(
        self,
        scheduled: list[Any],
        drafts: dict[int, tuple[list[int], float]],
        num_new: int,
        num_tokens: int,
        room: int,
    ) -> tuple[dict[int, tuple[list[int], float]], float]:
        """Drafts of the assistant, and seconds that they took, for requests without a better one."""
        if self.assisting is None:
            return {}, 0.0
        candidates = dict[int, Candidate]()
        for i, request in enumerate(scheduled):
            state, guesses = request.state, self._guesses_of(request.state)
            odds, is_prompt = guesses.odds_of_assistant, not _is_drafted(request)
            if _most_of(state) > 0 and (i not in drafts or (not guesses.is_forced and odds > drafts[i][1])):
                candidates[i] = Candidate(state, _most_of(state), odds, is_prompt)
        is_delaying = len(drafts.keys() | candidates.keys()) < len(scheduled)
        try:
            found, taken = self.assisting.drafts(
                [*candidates.values()], num_new, num_tokens, room, is_delaying
            )
        except Exception:  # of a model that the answers do not need
            _LOG.warning("the assistant failed, and drafts no more in this session", exc_info=True)
            self.assisting.assistant.release_all(is_evicted=True)
            self.assisting = None
            return {}, 0.0
        own = dict[int, tuple[list[int], float]]()
        for i, candidate in candidates.items():
            if candidate.state.request_id in found:
                own[i] = found[candidate.state.request_id], candidate.odds
                self._guesses_of(candidate.state).assist(own[i][0])
        return own, taken

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


def _most_of(state: Any) -> int:
    """Largest number of tokens that a draft of a request may have."""
    return int(min(MOST, state._new_tokens_limit - state.generated_len() - 1))


def _is_drafted(request: Any) -> bool:
    """Whether a scheduled request has a newest token to draft behind, and its sender lets it have drafts."""
    state = request.state
    choice = state.logit_processor_kwargs.get(CHOICE)
    may_draft = choice is None or choice.may_draft
    return bool(may_draft and request.has_new_token and state.generated_tokens)


def _forced(state: Any) -> list[int]:
    """Tokens that a processor of a request forces next; empty if there are none."""
    choice = state.logit_processor_kwargs.get(CHOICE)
    ways = () if choice is None else (getattr(x, "forced", None) for x in choice.processors)
    return next((way(choice.tokens) for way in ways if way is not None), [])
