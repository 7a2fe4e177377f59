"""How one request chooses its tokens, and where text is cut."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.integrations.transformers import load_model
from kvloom.integrations.transformers.session.choices.sampling import Choice
from kvloom.models import bundled_model_path
from kvloom.serving.protocol.text import TextStream

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -torch.inf])


def drawn(choice: Choice, count: int = 4000) -> Counter[int]:
    return Counter(choice.next_token(LOGITS, position) for position in range(count))


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_no_temperature_takes_the_likeliest(temperature: float) -> None:
    assert drawn(Choice(temperature), 9) == {1: 9}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_they_are_likely(temperature: float) -> None:
    counts = drawn(Choice(temperature, seed=1))
    for token, likely in enumerate((LOGITS / temperature).softmax(0).tolist()):
        assert counts[token] / 4000 == pytest.approx(likely, abs=0.04)
    assert counts[4] == 0


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    assert set(drawn(Choice(1.0, top_k=2))) == {1, 3}
    assert set(drawn(Choice(1.0, top_k=99))) == {0, 1, 2, 3}
    # 0.64, 0.24, 0.09, 0.03: those before a token must have less than top_p.
    assert set(drawn(Choice(1.0, top_p=0.6))) == {1}
    assert set(drawn(Choice(1.0, top_p=0.7))) == {1, 3}
    assert set(drawn(Choice(1.0, top_p=0.0))) == {1}
    assert set(drawn(Choice(1.0, top_p=0.99, top_k=3))) == {1, 2, 3}


def test_a_seed_is_the_whole_of_chance() -> None:
    def tokens(seed: int) -> list[int]:
        return [Choice(1.0, seed=seed).next_token(LOGITS, position) for position in range(40)]

    assert tokens(1) == tokens(1) != tokens(2)


TEXTS = st.text("ab\nä€😀", max_size=12)


@given(text=TEXTS, stops=st.lists(st.text("ab\nä", min_size=1, max_size=4), max_size=3))
def test_a_stream_is_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    whole = TOKENIZER.decode(tokens)
    found = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    cut = min(found)[1] if found else len(whole)
    for num_at_once in (1, 3, 100):
        stream, given_text = TextStream(TOKENIZER, stops), ""
        for start in range(0, len(tokens), num_at_once):
            given_text += stream.feed(tokens[start : start + num_at_once])
            assert whole.startswith(given_text)
        given_text += stream.end(tokens)
        assert given_text == whole[:cut]
        assert stream.stopped == (cut < len(whole))


TOKENIZER = load_model(bundled_model_path(), progress=False)[1]
