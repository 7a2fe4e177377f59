"""Whether plans fit in a memory, in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.planning.plan import Plan


def verdict(plans: Sequence["Plan"], memory: int) -> str:
    """One sentence for a person: whether the weights fit, and with which ``kv`` all of it does.

    Args:
        plans: Plans of one model for several ``kv``.
        memory: Bytes that there are.
    """
    weights, there = plans[0].weights + plans[0].packed, _gigabytes(memory)
    if weights > memory:
        return f"does not fit: weights alone take {_gigabytes(weights)} of {there}"
    fits = [x for x in plans if x.total <= memory]
    others = [x for x in plans if x.total > memory]
    if not fits:
        least = min(plans, key=lambda x: x.total)
        return (
            f"does not fit: with {least.kv} all of it takes {_gigabytes(least.total)} of {there}, weights "
            f"{_gigabytes(weights)} of these"
        )
    if not others and len(fits) > 1:
        return f"fits with every kv: at most {_gigabytes(max(x.total for x in fits))} of {there}"
    said = "fits with " + ", ".join(f"{x.kv} ({_gigabytes(x.total)} of {there})" for x in fits)
    if others:
        said += "; not with " + ", ".join(f"{x.kv} ({_gigabytes(x.total)})" for x in others)
    return said


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
