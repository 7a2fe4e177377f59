"""``Guesses``: what may follow in the text of one request, and how often such guesses were right."""

from collections.abc import Sequence
from typing import Final

from kvloom.integrations.transformers.session.drafts.lookup import Lookup

_FADING: Final = 0.9
"""Weight of what was guessed before the last step, relative to the step before it."""


class Guesses:
    """The guesses for one request.

    A guess is compared with the tokens that come, whether a step verified it or not. So how often guesses are
    right is known without a cost.

    Args:
        prompt: Tokens of the prompt.

    Attributes:
        newest: The newest guess.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._lookup, self._num_prompt = Lookup(prompt), len(prompt)
        self._right, self._judged = 0.0, 0.0
        self.newest: list[int] = []

    @property
    def odds(self) -> float:
        """Probability that a guessed token is right if all before it are; a half before any was judged."""
        return (self._right + 1) / (self._judged + 2)

    def after(self, generated: Sequence[int], most: int) -> list[int]:
        """Guess what follows the present text.

        Args:
            generated: All new tokens of the request.
            most: Largest number of tokens to guess.
        """
        new = generated[len(self._lookup) - self._num_prompt :]
        self._lookup.extend(new)
        if self.newest and new:
            compared = min(len(new), len(self.newest))
            right = next((i for i in range(compared) if new[i] != self.newest[i]), compared)
            self._right = self._right * _FADING + right
            self._judged = self._judged * _FADING + min(right + 1, compared)
        self.newest = self._lookup.draft(most)
        return self.newest
