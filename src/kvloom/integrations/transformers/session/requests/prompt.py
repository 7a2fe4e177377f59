"""``Prompt``: the tokens of a request, and what it asks of a session beside them."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvloom.core.text import Text

SALT: Final = "cache_salt"
"""Key of a request's salt among the arguments of its logits processors, which outlive a preemption."""
CHOICE: Final = "choice"
"""Key of a request's ``Choice`` among these arguments."""
TURN: Final = "agent_turn"
"""Key of a request's ``AgentTurn``, and the argument of ``add_request`` that takes it."""


@dataclass(slots=True)
class AgentTurn:
    """One request of an agent's session, with what it found of the session when it began.

    Attributes:
        owner: Owner of the session, with a budget and session names of its own.
        name: Name of the session.
        num_kept: Number of tokens of the session; ``None`` before the request has begun.
        num_restored: Number of these tokens that needed no compute.
        reason: Why not all were restored; empty if all were.
    """

    owner: str
    name: str
    num_kept: int | None = None
    num_restored: int = 0
    reason: str = ""

    def __deepcopy__(self, memo: Any) -> "AgentTurn":
        """The turn itself, since a preemption copies the arguments of a request."""
        return self


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        name: Id of the request.
        text: Its tokens.
        salt: Its ``cache_salt``.
        turn: Its turn of an agent's session; ``None`` without a session.
        most: Largest number of first tokens that may be found. The last token is always computed. If the
            request is to be forked, the last two are, since the fork happens between them. It is 0 if the
            logits of all tokens are requested.
        num_generated: Number of last tokens that the request generated before it lost its pages.
    """

    name: str
    text: Text
    salt: str
    turn: AgentTurn | None
    most: int
    num_generated: int = 0

    @classmethod
    def by(cls, state: Any) -> "Prompt":
        """The prompt of transformers' ``RequestState``."""
        extra, tokens = state.logit_processor_kwargs, state.initial_tokens
        choice = extra.get(CHOICE)
        is_scoring = choice is not None and choice.is_scoring
        most = 0 if is_scoring else max(len(tokens) - (2 if state.num_children else 1), 0)
        salt, num_generated = str(extra.get(SALT, "")), len(tokens) - num_asked(state)
        return cls(state.request_id, Text(tokens), salt, extra.get(TURN), most, num_generated)

    @property
    def num_asked(self) -> int:
        """Number of tokens that the request came with."""
        return len(self.text) - self.num_generated


def num_asked(state: Any) -> int:
    """Number of tokens with which transformers' ``RequestState`` came, whatever it generated since."""
    return state._true_initial_tokens or len(state.initial_tokens)
