"""``Guesses``: what may follow in the text of one request, and how often such guesses were right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.integrations.transformers.session.drafts.text_lookup import TextLookup

MOST: Final = 15
"""Largest number of drafted tokens of a request in a step. Attention to up to 16 new tokens of a request has
the bits of attention to one, also in bfloat16 on processors with AMX."""
_FADING: Final = 0.9
"""Weight of what was guessed before the last step, relative to the step before it."""


@dataclass(slots=True)
class _Judged:
    """How many tokens of one kind of guess were right, of those whose earlier ones were.

    It begins as if half of two tokens had been right.
    """

    right: float = 1.0
    count: float = 2.0

    @property
    def odds(self) -> float:
        return self.right / self.count

    def note(self, right: int, count: int) -> None:
        self.right = 1 + (self.right - 1) * _FADING + right
        self.count = 2 + (self.count - 2) * _FADING + count


class Guesses:
    """The guesses for one request.

    A guess is compared with the tokens that come, whether a step verified it or not. So how often guesses are
    right is known without a cost.

    Args:
        prompt: Tokens of the prompt.

    Attributes:
        is_forced: Whether the newest guess is what a grammar forces.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._lookup, self._num_prompt = TextLookup(prompt), len(prompt)
        self._of_lookup, self._of_resumed = _Judged(), _Judged()
        self._of_forced, self._of_assistant = _Judged(), _Judged()
        self._newest = list[tuple[_Judged, list[int]]]()
        self._kind, self.is_forced = self._of_lookup, False

    @property
    def odds(self) -> float:
        """Probability that a token of the newest guess of ``after`` is right if all before it are."""
        return self._kind.odds

    @property
    def odds_of_assistant(self) -> float:
        """The same for a guess of the assistant."""
        return self._of_assistant.odds

    def take_back(self, num_generated: int) -> None:
        """Forget new tokens after the first ``num_generated``, and the newest guess, which followed them."""
        size = self._num_prompt + num_generated
        if size < len(self._lookup):
            self._lookup.truncate(size)
            self._newest = []

    def after(self, generated: Sequence[int], most: int, forced: Sequence[int] = ()) -> list[int]:
        """Guess what follows the present text.

        Args:
            generated: All new tokens of the request.
            most: Largest number of tokens to guess.
            forced: Tokens that are likely to follow since other text may not; looked up if empty.
        """
        new = generated[len(self._lookup) - self._num_prompt :]
        self._lookup.extend(new)
        for judged, guess in self._newest if new else ():
            compared = min(len(new), len(guess))
            right = next((i for i in range(compared) if new[i] != guess[i]), compared)
            if compared:
                judged.note(right, min(right + 1, compared))
        self.is_forced, guess, self._kind = bool(forced), [*forced[:most]], self._of_forced
        if not forced:
            guess = self._lookup.draft(most)
            self._kind = self._of_resumed if self._lookup.is_resumed else self._of_lookup
        self._newest = [(self._kind, guess)]
        return guess

    def assist(self, draft: list[int]) -> None:
        """Let a draft of the assistant be judged beside the newest guess."""
        self._newest.append((self._of_assistant, draft))
