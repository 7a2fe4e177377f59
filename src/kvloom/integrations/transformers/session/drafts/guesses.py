"""``Guesses``: what may follow in the text of one request, and how often such guesses were right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvloom.integrations.transformers.session.drafts.text_lookup import TextLookup

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
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._lookup, self._num_prompt = TextLookup(prompt), len(prompt)
        self._of_lookup, self._of_forced = _Judged(), _Judged()
        self._newest: list[int] = []
        self._kind = self._of_lookup

    @property
    def odds(self) -> float:
        """Probability that a token of the newest guess is right if all before it are."""
        return self._kind.odds

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
        if self._newest and new:
            compared = min(len(new), len(self._newest))
            right = next((i for i in range(compared) if new[i] != self._newest[i]), compared)
            self._kind.note(right, min(right + 1, compared))
        self._kind = self._of_forced if forced else self._of_lookup
        self._newest = [*forced[:most]] or self._lookup.draft(most)
        return self._newest
