"""``Cuts``: where texts are cut for mixers, so that no bit depends on what else a step has."""

from itertools import pairwise
from typing import NamedTuple


class Cuts(NamedTuple):
    """Rule by which a text is cut into pieces, each computed by a call of a mixer for one request.

    The pieces of a prompt end at multiples of ``interval``, and at its end. Each later token is a piece.

    Attributes:
        interval: Largest number of tokens of a piece.
        num_last: Number of last tokens of a prompt that are pieces of their own, since requests fork there.
    """

    interval: int
    num_last: int

    @classmethod
    def of(cls, state_interval: int, max_batch_tokens: int, forks: bool) -> "Cuts":
        """The rule of a session.

        Args:
            state_interval: Tokens between two places where states are found, each the end of a piece.
            max_batch_tokens: Largest number of tokens in a step, of which a piece takes at most half.
            forks: Whether requests fork before the last token of their prompt.
        """
        most = min(max(max_batch_tokens // 2, 1), state_interval)
        return cls(next(x for x in range(most, 0, -1) if state_interval % x == 0), int(forks))

    def num_whole_pieces(self, num_asked: int) -> int:
        """Number of first tokens of a prompt that are pieces of any longer prompt, too."""
        return (num_asked - self.num_last) // self.interval * self.interval

    def num_whole(self, num_asked: int, past: int, count: int) -> int:
        """Largest number of next tokens, at most ``count``, that end where a piece ends.

        Args:
            num_asked: Number of tokens of the prompt.
            past: Number of tokens before them, where a piece ends.
            count: Number of tokens.
        """
        end = past + count
        if end < num_asked - self.num_last:
            end -= end % self.interval
        return max(end - past, 0)

    def pieces(self, num_asked: int, past: int, count: int) -> list[int]:
        """Lengths of the pieces of the next ``count`` tokens, for the arguments of ``num_whole``."""
        end, behind = past + count, max(num_asked - self.num_last, past)
        first = past + self.interval - past % self.interval
        ends = {*range(first, min(behind, end), self.interval), *range(behind, end), end}
        return [b - a for a, b in pairwise([past, *sorted(ends - {past})])]
