"""``TextLookup`` against a search of the whole text, in all its ways to grow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvloom.integrations.transformers.session.drafts.text_lookup import (
    CANDIDATES,
    LONGEST,
    SHORTEST,
    TextLookup,
)


def searched(lookup: TextLookup, text: Sequence[int], most: int) -> list[int]:
    """What ``draft`` says, by a search of the text."""
    size = len(text)
    tail = list(text[size - SHORTEST :])
    alike = [n for n in range(SHORTEST, size) if lookup._bucket(n - 1) == lookup._bucket(size - 1)]
    ends = [n for n in alike[::-1][:CANDIDATES] if list(text[n - SHORTEST : n]) == tail]

    def length(end: int) -> int:
        count = 0
        while count < min(end, LONGEST) and text[end - 1 - count] == text[size - 1 - count]:
            count += 1
        return count

    if not ends or size <= SHORTEST:
        return []
    best = max(ends, key=lambda end: (length(end), end))
    longer = list(text)
    while len(longer) < size + most:
        longer.append(longer[best + len(longer) - size])
    return longer[size : size + most]


@pytest.mark.parametrize("num_ids", [1, 2, 3, 30])
def test_a_draft_is_what_a_search_finds(num_ids: int) -> None:
    draw = random.Random(num_ids)
    for _ in range(40):
        text: list[int] = []
        lookup = TextLookup()
        while len(text) < 200:
            new = [draw.randrange(num_ids) for _ in range(draw.choice([0, 1, 1, 1, 2, 90]))]
            if text and draw.random() < 0.3:
                start = draw.randrange(len(text))
                new = text[start : start + draw.randrange(100)]
            lookup.extend(new)
            text += new
            most = draw.randrange(12)
            for one in (lookup, TextLookup(text)):
                draft = one.draft(most)
                assert len(one) == len(text)
                assert ([] if one.is_resumed else draft) == searched(one, text, most)


def test_the_longest_match_wins_over_the_newest() -> None:
    text = [9, 1, 2, 3, 7, 0, 8, 1, 2, 3, 6, 0, 9, 1, 2, 3]
    assert TextLookup(text).draft(1) == [7]
    assert TextLookup(text[1:]).draft(1) == [6] and TextLookup(text[7:]).draft(3) == [6, 0, 9]


def test_a_repetition_goes_on() -> None:
    assert TextLookup([5, 6] * 4).draft(5) == [5, 6, 5, 6, 5]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 1, 1], [1, 2, 3, 4], [*range(500)]], ids=len)
def test_a_text_that_repeats_nothing_has_no_draft(text: list[int]) -> None:
    assert TextLookup(text).draft(4) == []


COPIED = [*range(100, 160)]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([[103, 1]], [[105, 106]]),  # one token for another
        ([[103, 1], [2], [3]], [[105, 106], [106, 107], [107, 108]]),  # three for three
        ([[103, 1], [2], [3], [4]], [[105, 106], [106, 107], [107, 108], []]),  # it is lost
        ([[103, 1], [104]], [[105, 106], [105, 106]]),  # one more
        ([[103, 1], [2], [104]], [[105, 106], [106, 107], [105, 106]]),  # two more
        ([[103, 106]], [[105, 106]]),  # two less, which nothing tells at once
        ([[103, 106], [107]], [[105, 106], [108, 109]]),
        ([[103, 1, 105, 106, 107]], [[108, 109]]),  # found again
    ],
)
def test_a_copy_goes_on_behind_an_edit(new: list[list[int]], expected: list[list[int]]) -> None:
    lookup = TextLookup([*COPIED, 100, 101, 102])
    assert lookup.draft(2) == [103, 104] and not lookup.is_resumed
    for tokens, draft in zip(new, expected, strict=True):
        lookup.extend(tokens)
        assert lookup.draft(2) == draft
        assert lookup.is_resumed is (len(tokens) < 5)


def test_large_ids_are_told_apart() -> None:
    top = 2**31 - 1
    text = [top, top - 1, top - 2, 7, 5, *range(200), top, top - 1, top - 2]
    assert TextLookup(text).draft(2) == [7, 5]


def test_memory_is_in_proportion_to_the_text() -> None:
    draw = random.Random(0)
    text = [draw.randrange(50_000) for _ in range(100_000)]
    one_by_one = TextLookup(text[:60_000])
    for token in text[60_000:]:
        one_by_one.extend([token])
    assert one_by_one.nbytes <= 40 * len(text) and TextLookup(text).nbytes <= 40 * len(text)


def test_tokens_that_are_taken_back_leave_nothing() -> None:
    draw, text, lookup = random.Random(1), list[int](), TextLookup()
    for _ in range(80):
        new = [draw.randrange(3) for _ in range(draw.randrange(60))]
        lookup.extend(new)
        if draw.random() < 0.5:
            lookup.draft(9)
        size = draw.randrange(len(text) + len(new) + 1)
        lookup.truncate(size)
        text = (text + new)[:size]
        draft = lookup.draft(9)
        assert len(lookup) == size and ([] if lookup.is_resumed else draft) == searched(lookup, text, 9)
