"""``TextLookup`` against a search of the whole text, in all its ways to grow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvloom.integrations.transformers.session.drafts.text_lookup import (
    CANDIDATES,
    LONGEST,
    RESUMED,
    SHORTEST,
    TextLookup,
)


def searched(lookup: TextLookup, text: Sequence[int], most: int) -> list[int]:
    """What ``draft`` says, by a search of the text."""
    size = len(text)
    if size <= SHORTEST:
        return []

    def place(size: int, least: int) -> int | None:
        """The place behind the longest match of the first ``size`` tokens' last ones."""
        alike = [n for n in range(SHORTEST, size) if lookup._bucket(n - 1) == lookup._bucket(size - 1)]
        lengths = dict.fromkeys(alike[::-1][:CANDIDATES], 0)
        for end in lengths:
            while (
                lengths[end] < min(end, LONGEST)
                and text[end - 1 - lengths[end]] == text[size - 1 - lengths[end]]
            ):
                lengths[end] += 1
        ends = [n for n in lengths if lengths[n] >= least]
        return max(ends, key=lambda end: (lengths[end], end)) if ends else None

    behind = place(size, SHORTEST)
    for gap in range(1, SHORTEST + 1):
        if behind is None and size - gap >= SHORTEST:
            found = place(size - gap, RESUMED)
            if found is not None and list(text[found + 1 : found + gap]) == list(text[size - gap + 1 :]):
                behind = found + gap
    if behind is None:
        return []
    longer = list(text)
    while len(longer) < size + most:
        longer.append(longer[behind + len(longer) - size])
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
                if new and draw.random() < 0.5:
                    new[-1 - draw.randrange(min(len(new), 5))] = draw.randrange(num_ids)
            lookup.extend(new)
            text += new
            most = draw.randrange(12)
            for one in (lookup, TextLookup(text)):
                assert len(one) == len(text) and one.draft(most) == searched(one, text, most)


def test_the_longest_match_wins_over_the_newest() -> None:
    text = [9, 1, 2, 3, 7, 0, 8, 1, 2, 3, 6, 0, 9, 1, 2, 3]
    assert TextLookup(text).draft(1) == [7]
    assert TextLookup(text[1:]).draft(1) == [6] and TextLookup(text[7:]).draft(3) == [6, 0, 9]


def test_a_copy_goes_on_behind_a_token_that_it_changes() -> None:
    text = [*range(10, 30), *range(50, 53), *range(10, 20), 7]
    assert TextLookup(text).draft(3) == [21, 22, 23]
    assert TextLookup([*text, 21]).draft(3) == [22, 23, 24]
    assert TextLookup([*text, 9]).draft(3) == []  # it goes on otherwise
    assert TextLookup([*range(10, 30), *range(13, 20), 7]).draft(3) == []  # 7 tokens say too little


def test_a_repetition_goes_on() -> None:
    assert TextLookup([5, 6] * 4).draft(5) == [5, 6, 5, 6, 5]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3], [1, 1, 1], [1, 2, 3, 4], [*range(500)]], ids=len)
def test_a_text_that_repeats_nothing_has_no_draft(text: list[int]) -> None:
    assert TextLookup(text).draft(4) == []


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
        size = draw.randrange(len(text) + len(new) + 1)
        lookup.truncate(size)
        text = (text + new)[:size]
        assert len(lookup) == size and lookup.draft(9) == searched(lookup, text, 9)
