"""All-pairs testing: a few cases in which any two values of any two parameters meet.

``KVLOOM_PRODUCTS=1`` has all cases instead, as `make test-isa` and `make slow` do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The cases of ``itertools.product(*parameters)`` that are needed for every pair of values, in its order.

    Chosen greedily, always the first that has most new pairs: the same ones each time.
    """
    if os.environ.get("KVLOOM_PRODUCTS", "0") != "0":
        return list(itertools.product(*parameters))
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(every, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [tuple(values[i] for values, i in zip(parameters, case, strict=True)) for case in sorted(chosen)]
