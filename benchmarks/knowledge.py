"""Share of blocks of a trace that a cache can find, by its knowledge of each use of a block.

Each use has a kind, and each kind the odds that its blocks are used again at each age. Room has a price, and
a block is kept for as long as it is expected to earn most. At the price at which the capacity is full on
average, no policy with the same knowledge and odds finds more. Odds are counted in other texts of the same
trace, later ones too, which no server has; or in what came before.

``KVLOOM_TRACE`` names a file in Mooncake's format; without it one is made up. Predicted: knowing more finds
more where odds are from other texts, and knowing which blocks are never used again finds nearly all. Prints
one JSON line.
"""

import argparse
import json
import math
import os
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import traces

from kvloom.paging.odds import LIMITS
from kvloom.simulation.trace import BLOCK_TOKENS, Request, read_trace

CAPACITIES = (1_000_000, 3_000_000, 10_000_000)
PARTS = {"other texts": 5, "before": 8}
"""Number of parts: of the texts, each judged by odds of the others, or of the trace, by odds of before."""
OURS = ("uses", "is_last")
KNOWN: dict[str, tuple[str, ...]] = {
    "age": (),
    "ours: uses, last or not": OURS,
    "ours and depth": (*OURS, "depth"),
    "ours and blocks behind": (*OURS, "behind"),
    "ours and new blocks": (*OURS, "new"),
    "ours and gap before": (*OURS, "gap_before"),
    "ours and length of the answer": (*OURS, "answer"),
    "ours and new blocks, answer": (*OURS, "new", "answer"),
    "ours and 1/5 of those without next use": (*OURS, "is_end_1_5"),
    "ours and 2/5 of those without next use": (*OURS, "is_end_2_5"),
    "ours and all those without next use": (*OURS, "is_end"),
    "when the next use is": ("next",),
}


class Use(NamedTuple):
    """Blocks of a request of which the same is known.

    Attributes:
        number: Number of the request.
        text: Number of the text with which it begins.
        gap: Requests until the next use, or infinity.
        facts: Known facts, in the order of ``KNOWN``.
    """

    number: int
    text: int
    gap: float
    facts: tuple[int, ...]


class Ages:
    """Counts of some blocks by age: those that reached it, those used in it, and the time of all in it."""

    def __init__(self, num_ages: int) -> None:
        self.ends, self.part = [0] * num_ages, [0.0] * num_ages
        self.used = [0] * num_ages

    def add(self, end: float, is_used: bool, count: int) -> None:
        """Count blocks that were used after ``end`` requests, or not seen since."""
        age = max(bisect_left(LIMITS, end) - 1, 0)
        self.ends[age] += count
        self.part[age] += count * (end - LIMITS[age])
        self.used[age] += count * is_used

    def entered(self) -> list[float]:
        """Number of blocks that reached each age, without those whose time ended in it unused."""
        made, later = [], 0
        for ends, used in zip(reversed(self.ends), reversed(self.used), strict=True):
            made.append(float(later + used))
            later += ends
        return made[::-1]

    def found(self) -> list[tuple[float, float]]:
        """Hits and block-requests of room if all are kept to each age."""
        made, left, hits, room = [(0.0, 0.0)], sum(self.ends), 0, 0.0
        for age, (ends, part, used) in enumerate(zip(self.ends, self.part, self.used, strict=True)):
            left -= ends
            hits += used
            room += part + left * (LIMITS[age + 1] - LIMITS[age])
            made.append((hits, room))
        return made


def uses_of(requests: Sequence[Request], facts: Sequence[str]) -> Counter[Use]:
    """Facts of each use, with lengths by octaves."""
    rng, later = random.Random(0), defaultdict[int, list[int]](list)
    for number, request in enumerate(requests):
        for block in request.hash_ids:
            later[block].append(number)
    for numbers in later.values():
        numbers.reverse()
    uses, last, made = Counter[int](), dict[int, int](), Counter[Use]()
    for number, request in enumerate(requests):
        blocks, chance = request.hash_ids, rng.random()
        known = next((i for i, block in enumerate(blocks) if block not in last), len(blocks))
        before = number - last[blocks[known - 1]] if known > 1 else 0
        for depth, block in enumerate(blocks):
            later[block].pop()
            gap = later[block][-1] - number if later[block] else math.inf
            of_all = {
                "uses": min(uses[block], 3), "is_last": depth == len(blocks) - 1, "depth": depth.bit_length(),
                "behind": min(len(blocks) - depth, 6), "new": (len(blocks) - known).bit_length(),
                "gap_before": before.bit_length(), "answer": request.output_length.bit_length(),
                "is_end_1_5": gap == math.inf and chance < 0.2,
                "is_end_2_5": gap == math.inf and chance < 0.4, "is_end": gap == math.inf,
                "next": bisect_left(LIMITS, gap),
            }  # fmt: skip
            text = blocks[min(1, len(blocks) - 1)]  # the first block may be that of all
            made[Use(number, text, gap, tuple(int(of_all[fact]) for fact in facts))] += 1
            uses[block] += 1
            last[block] = number
    return made


def counted(uses: Iterable[tuple[Use, int]], end: int, num_ages: int) -> dict[tuple[int, ...], Ages]:
    """Ages by what is known, and by the first of it, of what was seen before request ``end``."""
    made = defaultdict[tuple[int, ...], Ages](lambda: Ages(num_ages))
    for use, count in uses:
        seen = min(use.gap, max(end - 1 - use.number, 0))
        for i in range(len(use.facts) + 1):
            made[use.facts[:i]].add(seen, use.gap == seen, count)
    return made


def odds(ages: dict[tuple[int, ...], Ages], facts: tuple[int, ...], num_ages: int) -> list[float]:
    """Probability that a block is used in each age; of rare facts, by fewer of them."""
    made = [0.05] * num_ages
    for i in range(len(facts) + 1):
        pages = 300 if i else 20
        if (at := ages.get(facts[:i])) is not None:
            counts = zip(at.used, at.entered(), made, strict=True)
            made = [min((used + pages * x) / (entered + pages), 0.999) for used, entered, x in counts]
    return made


def found(
    requests: Sequence[Request], facts: Sequence[str], where: str, capacities: Sequence[int]
) -> list[float]:
    """Part of the blocks that is found with each capacity, with odds from one of ``PARTS``."""
    num_ages, num_requests = bisect_left(LIMITS, len(requests)), len(requests)
    parts = defaultdict[int, list[tuple[Use, int]]](list)
    for use, count in uses_of(requests, facts).items():
        by_text = hash((use.text,)) % PARTS[where]
        parts[by_text if where == "other texts" else use.number * PARTS[where] // num_requests].append(
            (use, count)
        )
    kinds = []  # hits and time to expect until each age, hits and room that there are
    for part, uses in parts.items():
        if where == "before":
            known = [x for other in range(part) for x in parts[other]]
            end = -(-num_requests * part // PARTS[where])
        else:
            known = [x for other in parts if other != part for x in parts[other]]
            end = num_requests
        learned = counted(known, end, num_ages)
        for kind, ages in counted(uses, num_requests, num_ages).items():
            if len(kind) == len(facts):
                time, hits, left, points = 0.0, 0.0, 1.0, [(0.0, 0.0)]
                for age, here in enumerate(odds(learned, kind, num_ages)):
                    time += left * (LIMITS[age + 1] - LIMITS[age]) * (1 - here / 2)
                    hits += left * here
                    left *= 1 - here
                    points.append((time, hits))
                kinds.append((points, ages.found()))
    num_asked = sum(len(request.hash_ids) for request in requests)

    def at(price: float) -> tuple[float, float]:
        """Blocks found and kept."""
        hits = room = 0.0
        for points, real in kinds:
            best = max(range(len(points)), key=lambda i: points[i][1] - price * points[i][0])
            hits, room = hits + real[best][0], room + real[best][1]
        return hits / num_asked, room / num_requests

    rates = []
    for capacity in capacities:
        low, high = 1e-8, 10.0
        for _ in range(30):
            price = math.sqrt(low * high)
            low, high = (price, high) if at(price)[1] > capacity / BLOCK_TOKENS else (low, price)
        (more, room), (less, enough) = at(low), at(high)
        over = (capacity / BLOCK_TOKENS - enough) / max(room - enough, 1e-9)
        rates.append(less + (more - less) * min(over, 1))
    return rates


def main() -> None:
    """Judge and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    given = os.environ.get("KVLOOM_TRACE")
    requests = list(read_trace(Path(given))) if given and not quick else traces.few_shot(300)
    capacities = (50_000, 1_000_000) if quick else CAPACITIES
    rows = []
    for name, facts in KNOWN.items():
        for where in PARTS:
            for capacity, rate in zip(capacities, found(requests, facts, where, capacities), strict=True):
                rows.append({"known": name, "odds": where, "capacity": capacity, "block_rate": rate})
    name = Path(given).stem if given and not quick else "few examples"
    print(json.dumps({"figure": "knowledge", "trace": name, "rows": rows}))


if __name__ == "__main__":
    main()
