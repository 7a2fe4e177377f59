"""The benchmark of recurrent states runs, and its figures stand in their section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom.integrations.transformers.models.layer_specs import StatefulLayer


@pytest.mark.skipif(
    StatefulLayer is type(None), reason="this transformers has no recurrent states in its caches"
)
def test_what_prefixes_cost_is_measured(quick: Callable[..., Any]) -> None:
    import states_sections

    result = quick("states")
    times, chats = result["times"], result["chats"]
    assert times["tokens"] == 512 and times["found_over_computing"] > 0 and times["pieces_over_whole"] > 0
    assert chats["states_kept"] == chats["states_of_every_piece"] // 8
    assert 0 < chats["tokens_found"] <= chats["tokens_that_could_be_found"] < chats["tokens_asked"]
    times |= {"found_over_computing": 0.0012, "pieces_over_whole": 1.034, "state_nbytes": 561152}
    chats |= {"states_of_every_piece": 600, "states_kept": 75}
    chats |= {"tokens_that_could_be_found": 200_000, "tokens_found": 196_000}
    text = states_sections.states_section(result)
    assert "| finding 512 tokens, over computing them | 0.0012 |" in text
    assert "| states kept, of 600 of every piece | 75 |" in text and "| 98.0% |" in text
