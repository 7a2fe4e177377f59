"""Traces of other shapes than conversations, made up from a seed."""

import random

from kvloom.simulation.trace import BLOCK_TOKENS, Request


def _request(number: int, blocks: list[int]) -> Request:
    return Request(1000.0 * number, BLOCK_TOKENS * len(blocks), 100, blocks)


def agents(count: int, seed: int = 0) -> list[Request]:
    """Tasks of many steps, twenty at once; each step adds two blocks to all that was said before."""
    rng, made, last = random.Random(seed), list[Request](), 7
    running: list[list[int]] = []
    for number in range(count):
        if len(running) < 20:
            running.append(list(range(8)))  # tools, the same for all
        task = rng.choice(running)
        task += [last + 1, last + 2]
        last += 2
        made.append(_request(number, [*task]))
        if rng.random() < 0.03:
            running.remove(task)
    return made


def few_shot(count: int, seed: int = 0) -> list[Request]:
    """One of 300 prompts of twenty blocks of examples, some far more often than others, and a question."""
    rng, made = random.Random(seed), list[Request]()
    weights = [1 / (i + 1) for i in range(300)]
    for number, prompt in enumerate(rng.choices(range(300), weights, k=count)):
        made.append(_request(number, [*range(20 * prompt, 20 * prompt + 20), 10**6 + number]))
    return made


def at_random(count: int, seed: int = 0) -> list[Request]:
    """One of 2,000 documents of five blocks, each as likely as any other."""
    rng = random.Random(seed)
    documents = [rng.randrange(2000) for _ in range(count)]
    return [_request(number, list(range(5 * x, 5 * x + 5))) for number, x in enumerate(documents)]
