"""What transformers' ``generate`` gives for each request alone, and sessions to compare with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvloom.integrations.transformers import continuous_batching

GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def random_requests(count: int, seed: int, vocab: int = 199, longest: int = 90) -> list[list[int]]:
    """Prompts of which many begin alike, some are prefixes of others, and some are the same."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, vocab) for _ in range(draw.randrange(1, longest))] for _ in range(3)]
    requests = []
    for _ in range(count):
        stem = draw.choice([*stems, []])
        tail = [draw.randrange(3, vocab) for _ in range(draw.randrange(0, 20))]
        requests.append(
            (stem[: draw.randrange(len(stem) + 1)] if draw.random() < 0.3 else stem) + tail or [3]
        )
    return requests


def alone(model: Any, request: Sequence[int], new_tokens: int, cache: Any = None) -> list[int]:
    """Greedy tokens of one request by ``generate``."""
    ids = torch.tensor([list(request)])
    out = model.generate(
        ids,
        max_new_tokens=new_tokens,
        past_key_values=cache,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def batched(
    model: Any, requests: Sequence[Sequence[int]], new_tokens: int, kv: str = "auto", **options: Any
) -> list[list[int]]:
    """Greedy tokens of requests together; ``options`` are of the ContinuousBatchingConfig."""
    config = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 512, **options})
    continuous_batching(model, kv)
    out = model.generate_batch(
        [list(request) for request in requests],
        generation_config=GenerationConfig(max_new_tokens=new_tokens, **GREEDY),
        continuous_batching_config=config,
    )
    assert [x.error for x in out.values()] == [None] * len(requests)
    return [x.generated_tokens for x in out.values()]
