"""All-pairs testing: a few cases in which any two values of any two parameters meet, or each value of one.

``KVLOOM_PRODUCTS=1`` has all cases instead, as `make test-isa` and `make slow` do.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The cases of ``itertools.product(*parameters)`` that are needed for every pair of values, in its order.

    Chosen greedily, always one that has most new pairs, of these one whose pairs were met least: the same
    ones each time.
    """
    if os.environ.get("KVLOOM_PRODUCTS", "0") != "0":
        return list(itertools.product(*parameters))
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    missing: set[Any] = set().union(*pairs.values())
    met: Counter[Any] = Counter()
    chosen = []
    while missing:
        most = max(len(pairs[case] & missing) for case in every)
        best = min(
            (case for case in every if len(pairs[case] & missing) == most),
            key=lambda case: sum(met[pair] for pair in pairs[case]),
        )
        chosen.append(best)
        missing -= pairs[best]
        met.update(pairs[best])
    return [tuple(values[i] for values, i in zip(parameters, case, strict=True)) for case in sorted(chosen)]


def in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value once, with the cases of the product of ``others`` in turn."""
    if os.environ.get("KVLOOM_PRODUCTS", "0") != "0":
        return list(itertools.product(values, *others))
    return [(value, *rest) for value, rest in zip(values, itertools.cycle(itertools.product(*others)))]


def pairs_in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value once, with cases of ``others`` in turn in which any two of their values meet."""
    return [(value, *rest) for value, rest in in_turn(values, pairwise(*others))]
