"""Sessions of continuous batching, step by step, and what ``generate`` gives for each request alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from kvloom.integrations.transformers import continuous_batching

GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def random_requests(count: int, seed: int, vocab: int = 99, longest: int = 90) -> list[list[int]]:
    """Prompts of which many begin alike, some are prefixes of others, and some are the same."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, vocab) for _ in range(draw.randrange(1, longest))] for _ in range(3)]
    requests = []
    for _ in range(count):
        stem = draw.choice([*stems, []])
        tail = [draw.randrange(3, vocab) for _ in range(draw.randrange(0, 20))]
        cut = draw.randrange(len(stem) + 1) if draw.random() < 0.3 else len(stem)
        requests.append(stem[:cut] + tail or [3])
    return requests


def add_between_steps(
    running: Any, requests: Sequence[list[int]], draw: random.Random
) -> dict[str, list[int]]:
    """Let requests come while others run, and run to the end; the requests by their names."""
    names: dict[str, list[int]] = {}
    for request in requests:
        names[running.manager.add_request(request)] = request
        for _ in range(draw.randrange(6)):
            running.step()
    running.run()
    return names


def alone(model: Any, request: Sequence[int], new_tokens: int, cache: Any = None) -> list[int]:
    """Greedy tokens of one request by ``generate``."""
    ids, options = torch.tensor([list(request)]), {**GREEDY, "eos_token_id": None}
    out = model.generate(ids, max_new_tokens=new_tokens, past_key_values=cache, **options)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def batching_config(**options: Any) -> Any:
    """Few pages, few tokens a step."""
    return transformers.ContinuousBatchingConfig(
        **{"page_size": 16, "num_blocks": 512, "max_batch_tokens": 512, **options}
    )


def batched(
    model: Any, requests: Sequence[Sequence[int]], new_tokens: int, kv: str = "auto", **options: Any
) -> list[list[int]]:
    """Greedy tokens of requests by ``generate_batch``; ``options`` are of the ContinuousBatchingConfig."""
    continuous_batching(model, kv)
    out = model.generate_batch(
        [list(request) for request in requests],
        generation_config=GenerationConfig(max_new_tokens=new_tokens, **GREEDY),
        continuous_batching_config=batching_config(**options),
    )
    assert [x.error for x in out.values()] == [None] * len(requests)
    return [x.generated_tokens for x in out.values()]


class Session:
    """A session without a thread: what happens between two steps is the caller's to say.

    Args:
        model: That generates.
        generation: Of its ``GenerationConfig``.
        agents: Sessions of agents.
        begin: Is called with the manager before it begins.
        options: Of its ``ContinuousBatchingConfig``.

    Attributes:
        manager: The ``BatchingManager``.
        outputs: Newest output of each request that has one.
    """

    def __init__(
        self,
        model: Any,
        generation: dict[str, Any] | None = None,
        agents: Any = None,
        begin: Any = None,
        **options: Any,
    ) -> None:
        config = GenerationConfig(**{"max_new_tokens": 8, **GREEDY, **(generation or {})})
        self.manager = model.init_continuous_batching(config, batching_config(**options))
        self.manager.agents = agents or self.manager.agents
        if begin is not None:
            begin(self.manager)
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.outputs: dict[str, Any] = {}

    @property
    def cache(self) -> Any:
        """The ``BatchCache``."""
        return self.processor.cache

    def step(self) -> bool:
        """One forward, if there is something to do; the pages are checked before and behind it."""
        is_busy = self.processor.prepare_next_batch()
        self.cache.requests.check()
        if is_busy:
            self.manager._generation_step()
            self.processor.update_batch()
            self.cache.requests.check()
        self._collect()
        return bool(is_busy)

    def run(self, limit: int = 2000) -> dict[str, Any]:
        """Steps until all requests have ended; their outputs."""
        while self.step() or self.processor.has_pending_requests():
            limit -= 1
            assert limit, "the session does not end"
        return self.outputs

    def _collect(self) -> None:
        while not self.manager.output_router.output_queue.empty():
            output = self.manager.output_router.output_queue.get()
            self.outputs[output.request_id] = output


@contextmanager
def session(model: Any, generation: dict[str, Any] | None = None, **options: Any) -> Iterator[Session]:
    """A ``Session``, after which the model has its attention and its layers again."""
    before = model.config._attn_implementation
    made = None
    try:
        with torch.no_grad():
            made = Session(model, generation, **options)
            yield made
    finally:
        model.set_attn_implementation(before)
        if made is not None:
            made.manager.release()
