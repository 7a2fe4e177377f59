"""``Text``: parts of a text are those of its tokens, and its prefixes know what it knows."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvloom.core.text import Text


@pytest.mark.parametrize("num_tokens", range(6))
def test_a_text_is_its_parts(num_tokens: int) -> None:
    both = [10, 11, 12, 20, 21]
    text, want = Text(both[:3], [*both[3:], 99], num_tokens), both[:num_tokens]
    assert len(text) == num_tokens and [*text] == want == text == Text(want)
    assert text != [*want, 1] and text != "no tokens" and deepcopy(text) == want
    for start in range(6):
        for stop in range(7):
            assert text[start:stop] == want[start:stop]
            assert text[start:stop:2] == want[start:stop:2]
    assert text[:-1] == want[:-1] and text[-1:] == want[-1:]
    with pytest.raises(IndexError):
        text[num_tokens]


def test_prefixes_alone_know_what_the_text_knows() -> None:
    text = Text([1, 2, 3], [4])
    text[:2].known["digest"] = 5
    assert text[:3].known == text.known == Text.of(text).known == {"digest": 5}
    assert not Text(text[:3]).known and isinstance(text[1:3], list)
    assert not deepcopy(text).known


def test_tokens_may_be_added_behind_a_text() -> None:
    more = [3]
    text = Text([1, 2], more)
    more.append(4)
    assert text == [1, 2, 3] and text[:3] == [1, 2, 3] and Text([1, 2], more) == [1, 2, 3, 4]
