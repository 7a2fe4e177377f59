"""Estimate of how likely an idle page is used again, counted by its kind and its idle time."""

from typing import Any, Final

NUM_USES: Final = 4
"""Number of use counts that are distinguished; the last stands for all higher ones."""
NUM_KINDS: Final = 2 * NUM_USES
"""Number of kinds of pages: use count, and whether the page has children."""
LIMITS: Final = [0, 1, *(round(2 ** (i / 2)) for i in range(2, 100)), 1 << 62]
"""Lower limits of ages, in pages that became idle since; each is sqrt(2) times the last."""
_PRIOR, _PRIOR_PAGES, _KIND_PAGES = 0.05, 20, 100
"""Prior probability of use within an age, its weight in pages, and the weight of all kinds in one kind. The
prior alone gives LRU order, since later ages last longer."""


class Odds:
    """Counts of idle pages by age and kind, and of those that were used again.

    Attributes:
        entered: Number of pages of each kind that reached each age, with decay.
        used: Number of these that were used within the age.
        worth: Expected hits for each page that becomes idle meanwhile, if the page is kept for the best time;
            at index ``age * NUM_KINDS + kind``.
    """

    __slots__ = ("_learning", "_odds", "_worth", "entered", "used", "worth")

    def __init__(self) -> None:
        num_ages = len(LIMITS) - 1
        self.entered = [[0.0] * num_ages for _ in range(NUM_KINDS)]
        self.used = [[0.0] * num_ages for _ in range(NUM_KINDS)]
        self.worth = self._worth = [0.0] * (NUM_KINDS * num_ages)
        self._learning: list[tuple[int, list[float], list[float]]] = []  # kinds to judge, and their counts
        self._odds: list[float] = []  # of all kinds, by age

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, value in state[1].items():
            setattr(self, name, value)

    def learn(self, kept: float) -> None:
        """Begin to make ``worth`` anew from the present counts, and scale these by ``kept``."""
        end = len(LIMITS) - 1
        while end > 1 and not any(entered[end - 1] for entered in self.entered):
            end -= 1
        end = min(end + 2, len(LIMITS) - 1)
        counts = [[x[:end] for x in of_kinds] for of_kinds in (self.entered, self.used)]
        self._odds = [
            (sum(used) + _PRIOR_PAGES * _PRIOR) / (sum(entered) + _PRIOR_PAGES)
            for entered, used in zip(*(zip(*x, strict=True) for x in counts), strict=True)
        ]
        self._learning, self._worth = [*zip(range(NUM_KINDS), *counts, strict=True)], self.worth.copy()
        for of_kind in (*self.entered, *self.used):
            of_kind[:end] = [kept * x for x in of_kind[:end]]

    def go_on(self) -> None:
        """Compute the worth of one more kind after ``learn``; ``worth`` changes when all are computed."""
        if self._learning:
            self._judge(*self._learning.pop())
            if not self._learning:
                self.worth = self._worth

    def _judge(self, kind: int, entered: list[float], used: list[float]) -> None:
        """Best rate of hits from each age until any later one: slopes of a convex hull, from the end."""
        time, hits, left = 0.0, 0.0, 1.0  # left: share of idle pages not used so far
        points = [(time, hits)]
        for age, of_all in enumerate(self._odds):
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
            self._worth[NUM_KINDS * age + kind] = (hull[-1][1] - hits) / (hull[-1][0] - time)
            hull.append((time, hits))
