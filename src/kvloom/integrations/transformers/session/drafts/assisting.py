"""``Assisting``: for which requests of a step the assistant drafts or reads, and how many tokens."""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

from kvloom.integrations.transformers.session.drafts.account import Account
from kvloom.integrations.transformers.session.drafts.assistant import Assistant
from kvloom.integrations.transformers.session.drafts.costs import Costs
from kvloom.integrations.transformers.session.drafts.guesses import MOST

DELAY: Final = 1 / 8
"""Largest part by which drafts may lengthen a step in which a request has none, such as a prompt."""
_MOST_SPARE: Final = 2 * DELAY
"""The same for reading a text, which may also use what the step before left."""


class Candidate(NamedTuple):
    """A request for which the assistant may draft.

    Attributes:
        state: transformers' state of the request.
        most: Largest number of tokens to draft.
        odds: Probability that a token of the assistant's draft is right if all before it are.
        is_prompt: Whether the request has no new token yet, so that its text can only be read.
    """

    state: Any
    most: int
    odds: float
    is_prompt: bool


class Assisting:
    """Asks an assistant for drafts while these are expected to save time.

    Args:
        assistant: The assistant.
        costs: Times of the session's steps.
    """

    def __init__(self, assistant: Assistant, costs: Costs) -> None:
        self.assistant, self.account = assistant, Account()
        self._costs = costs
        self._taken = self._worth = 0.0  # of the last step: seconds, and those of each drafted token
        self._spare = 0.0  # seconds that texts may take to read, of steps since the last were read
        self._has_asked = self._has_drafted = False
        self._num_drafted = self._num_accepted = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of the assistant the last step verified, and how many were chosen."""
        self._num_drafted, self._num_accepted = drafted, accepted

    def drafts(
        self, candidates: Sequence[Candidate], num_new: int, num_tokens: int, room: int, is_delaying: bool
    ) -> tuple[dict[str, list[int]], float]:
        """Drafts of the assistant for a step.

        Args:
            candidates: Requests for which it may draft.
            num_new: Number of tokens that the step makes without drafts.
            num_tokens: Number of tokens that it computes without them.
            room: Largest number of drafted tokens.
            is_delaying: Whether the step has a request without a draft that is no candidate.

        Returns:
            Drafts by the id of the request, and the seconds that they took.
        """
        self._settle()
        assistant, costs = self.assistant, self._costs
        if not self.account.is_open() or not candidates or not costs.fixed:
            return {}, 0.0
        seconds, count = costs.fixed + costs.token * num_tokens, len(candidates)
        usual = costs.fixed + costs.token * count  # of a step of these requests, without prompts
        pays = self.counts(candidates, count, usual, MOST * count, None)
        if not pays and self.account.is_to_be_measured():
            assistant.forget_costs()  # so the next step drafts one token, whatever the last ones took
        wanted = [x for x in candidates if pays[x.state.request_id]]
        wanted = [x for x in wanted if _size(x.state) + MOST < assistant.most_tokens]
        unread = {x.state.request_id: assistant.num_unread(x.state) for x in wanted}
        ready = [x for x in wanted if not x.is_prompt and unread[x.state.request_id] <= MOST + 1]
        texts = [x.state for x in wanted if x not in ready]
        worth = costs.fixed / max(num_new, 1) + costs.token  # seconds that a token takes without drafts
        texts = [x for x in texts if unread[x.request_id] * assistant.pieces.token < _num_left(x) * worth]
        if len(ready) < count and (count > 1 or candidates[0].is_prompt):
            is_delaying = True
        limit, to_read = DELAY * seconds if is_delaying else None, 0
        if texts:
            self._spare = min(self._spare + DELAY * seconds, _MOST_SPARE * seconds)
            room_to_read = assistant.room(self._spare if is_delaying else None)
            to_read = min(sum(unread[x.request_id] for x in texts), room_to_read)
        if to_read:
            self._spare = 0.0
            if limit is not None:
                limit -= assistant.pieces.fixed + assistant.pieces.token * to_read
        counts = self.counts(ready, max(num_new, 1), seconds, room, limit)
        states = [x.state for x in ready if counts[x.state.request_id]]
        if not states and not to_read:
            return {}, 0.0
        began = perf_counter()
        to_read += sum(unread[x.request_id] for x in states)
        found = assistant.draft([*states, *texts], counts, to_read)
        self._taken, self._has_asked, self._has_drafted = perf_counter() - began, True, bool(found)
        self._worth = worth
        return found, self._taken

    def counts(
        self, candidates: Sequence[Candidate], num_new: int, seconds: float, room: int, limit: float | None
    ) -> Counter[str]:
        """Numbers of tokens to draft with which a step is expected to make most tokens a second.

        Each further token of all drafts takes a forward of the assistant, and a token that is verified.

        Args:
            candidates: Requests whose texts the assistant has read.
            num_new: Number of tokens that the step makes without drafts.
            seconds: What it takes without them.
            room: Largest number of drafted tokens.
            limit: Most seconds that drafts may take; ``None`` for any.
        """
        counts, expected, taken = Counter[str](), float(num_new), 0.0
        own = self.assistant.costs
        each = own.token + self._costs.token
        most = MOST if own.fixed else 1  # before the first forward nobody knows what it takes
        for count in range(1, most + 1):
            gains = [(x.state.request_id, x.odds**count) for x in candidates if x.most >= count]
            gains = [(name, gain) for name, gain in gains if gain * (seconds + taken) >= expected * each]
            cost, gain = own.fixed + each * len(gains), sum(gain for _, gain in gains)
            is_over = limit is not None and taken + cost > limit
            room -= len(gains)
            if not gains or room < 0 or is_over or gain * (seconds + taken) < expected * cost:
                break
            expected, taken = expected + gain, taken + cost
            counts.update(name for name, _ in gains)
        return counts

    def _settle(self) -> None:
        """Enter the last step into the account."""
        if self._has_asked:
            taken = self._taken + self._costs.token * self._num_drafted
            self.account.note(self._num_accepted * self._worth, taken, self._has_drafted)
        self._has_asked, self._num_drafted, self._num_accepted = False, 0, 0


def _num_left(state: Any) -> int:
    """Largest number of new tokens that are still to come."""
    return int(state._new_tokens_limit - state.generated_len())


def _size(state: Any) -> int:
    return len(state.initial_tokens) + len(state.generated_tokens)
