"""All-pairs testing: a few cases in which any two values of any two parameters meet, or each value of one.

``pytest --campaign`` has all cases instead, as `make test-isa` and `make slow` do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from campaign import is_whole


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The cases of ``itertools.product(*parameters)`` that are needed for every pair of values, in its order.

    Chosen greedily, always one that has most new pairs, of these one whose pairs were met least: the same
    ones each time.
    """
    if is_whole():
        return list(itertools.product(*parameters))
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    bits: dict[Any, int] = {}  # of a pair
    pairs = [[bits.setdefault(x, len(bits)) for x in itertools.combinations(enumerate(y), 2)] for y in every]
    sets = [sum(1 << bit for bit in each) for each in pairs]
    missing, met = (1 << len(bits)) - 1, [0] * len(bits)
    chosen = []
    while missing:
        found = [(each & missing).bit_count() for each in sets]
        most = max(found)
        best = min(
            (i for i, count in enumerate(found) if count == most), key=lambda i: sum(met[x] for x in pairs[i])
        )
        chosen.append(every[best])
        missing &= ~sets[best]
        for x in pairs[best]:
            met[x] += 1
    return [tuple(values[i] for values, i in zip(parameters, case, strict=True)) for case in sorted(chosen)]


def in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value once, with the cases of the product of ``others`` in turn."""
    if is_whole():
        return list(itertools.product(values, *others))
    return [(value, *rest) for value, rest in zip(values, itertools.cycle(itertools.product(*others)))]


def pairs_in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each value once, with cases of ``others`` in turn in which any two of their values meet."""
    return [(value, *rest) for value, rest in in_turn(values, pairwise(*others))]


def a_few_each(values: Sequence[Any], others: Sequence[Any], count: int) -> list[tuple[Any, Any]]:
    """Each value with so many of the others, from all parts of their list; all others in turn."""
    if is_whole():
        return list(itertools.product(values, others))
    step = len(others) / count
    return [
        (value, others[(i + int(j * step)) % len(others)])
        for i, value in enumerate(values)
        for j in range(count)
    ]
