"""Requests in a session get the tokens that ``generate`` gives each of them alone."""

from __future__ import annotations

import pytest
from oracles.batching import alone, batched, random_requests
from oracles.language_models import make_model

pytest.importorskip("transformers", minversion="5.19")


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 64}, {"num_blocks": 14, "max_batch_tokens": 64}]
)
def test_a_full_model(options: dict[str, int]) -> None:
    model, requests = make_model(), random_requests(12, seed=1)
    assert batched(model, requests, 12, **options) == [alone(model, x, 12) for x in requests]
