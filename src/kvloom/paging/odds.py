"""How likely a page is used again: counted, by what is known of it and by how long it is idle."""

from typing import Final

NUM_USES: Final = 4
"""Numbers of uses that are told apart; the last one stands for more."""
NUM_KINDS: Final = 2 * NUM_USES
"""What is known of a page: its uses, and whether it has children."""
LIMITS: Final = [0, 1, *(round(2 ** (i / 2)) for i in range(2, 100)), 1 << 62]
"""Where ages begin, which grow by half an octave, counted in pages that became idle since."""
_PRIOR, _PRIOR_PAGES, _KIND_PAGES = 0.05, 20, 100
"""Of pages that reach an age the part that is used in it, as if so many had been seen; and so many of each
kind as of all. That alone is least recently used, for an age lasts the longer the later it is."""


class Odds:
    """Counts of idle pages by age and kind, and of those that were used again.

    Attributes:
        entered: Of each kind, how many pages were idle up to each age, fading.
        used: And how many of these were used in it.
        worth: By age and kind, ``NUM_KINDS`` times the age and the kind: hits to expect for each page that
            becomes idle meanwhile, if the page is kept for as long as is best.
    """

    __slots__ = ("entered", "used", "worth")

    def __init__(self) -> None:
        num_ages = len(LIMITS) - 1
        self.entered = [[0.0] * num_ages for _ in range(NUM_KINDS)]
        self.used = [[0.0] * num_ages for _ in range(NUM_KINDS)]
        self.worth = [0.0] * (NUM_KINDS * num_ages)

    def learn(self, kept: float) -> None:
        """Judge by what was seen, and let it fade to the part ``kept``."""
        num_ages = 1 + max(
            (age for entered in self.entered for age, count in enumerate(entered) if count), default=0
        )
        num_ages = min(num_ages + 2, len(LIMITS) - 1)
        odds = []
        for age in range(num_ages):
            entered, used = sum(x[age] for x in self.entered), sum(x[age] for x in self.used)
            odds.append((used + _PRIOR_PAGES * _PRIOR) / (entered + _PRIOR_PAGES))
        for kind in range(NUM_KINDS):
            self._judge(kind, odds)
            self.entered[kind] = [kept * x for x in self.entered[kind]]
            self.used[kind] = [kept * x for x in self.used[kind]]

    def _judge(self, kind: int, odds: list[float]) -> None:
        """For each age the most hits by time, until any later one: slopes of a hull, from the end."""
        entered, used = self.entered[kind], self.used[kind]
        time, hits, left = 0.0, 0.0, 1.0  # left: of pages that became idle
        points = [(time, hits)]
        for age, of_all in enumerate(odds):
            here = min((used[age] + _KIND_PAGES * of_all) / (entered[age] + _KIND_PAGES), 0.999)
            time += left * (LIMITS[age + 1] - LIMITS[age]) * (1 - here / 2)
            hits += left * here
            left *= 1 - here
            points.append((time, hits))
        hull = [points.pop()]
        for age in range(len(points) - 1, -1, -1):
            time, hits = points[age]
            while len(hull) > 1 and (hull[-1][1] - hits) * (hull[-2][0] - hull[-1][0]) <= (
                hull[-2][1] - hull[-1][1]
            ) * (hull[-1][0] - time):
                hull.pop()
            self.worth[NUM_KINDS * age + kind] = (hull[-1][1] - hits) / (hull[-1][0] - time)
            hull.append((time, hits))
