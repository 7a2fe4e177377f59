"""What a store below a replayed pool keeps of pages and states."""

from __future__ import annotations

import random

from kvloom.simulation.below import Item, SimulatedStore


def test_what_was_not_used_for_longest_goes_first() -> None:
    """Room for six tokens: pages of one, states of four."""
    below = SimulatedStore(6, 1, 4)
    below.write([(1, False), (2, False), (2, True)])
    below.read([(1, False)])
    below.write([(3, False)])
    assert [below.has(x) for x in ((1, False), (2, False), (2, True), (3, False))] == [
        True,
        False,
        True,
        True,
    ]
    below.write([(3, True)])
    assert [below.has(x) for x in ((1, False), (2, True), (3, False), (3, True))] == [True, False, True, True]
    below.write([(4, True), (5, True)])
    assert [below.has(x) for x in ((1, False), (3, False), (4, True), (5, True))] == [
        False,
        False,
        False,
        True,
    ]


def test_random_uses_leave_what_a_list_of_them_leaves() -> None:
    """The longest end of the list of uses, each item at its last, that fits."""
    for seed in range(200):
        draw = random.Random(seed)
        capacity, sizes = draw.randrange(8, 40), (draw.randrange(1, 4), draw.randrange(1, 9))
        below, uses = SimulatedStore(capacity, *sizes), list[Item]()
        for _ in range(60):
            items = [(draw.randrange(9), draw.random() < 0.3) for _ in range(draw.randrange(1, 5))]
            items = list(dict.fromkeys(items))
            if draw.random() < 0.5:
                items = [x for x in items if below.has(x)]
                below.read(items)
            else:
                below.write(items)
                items = [x for x in items if x not in uses]
            uses = [x for x in uses if x not in items] + items
            while sum(sizes[is_state] for _, is_state in uses) > capacity:
                uses.pop(0)
            every = [(i, is_state) for i in range(9) for is_state in (False, True)]
            assert {x for x in every if below.has(x)} == {*uses}
