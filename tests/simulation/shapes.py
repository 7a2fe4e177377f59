"""Small traces of many shapes, made up from a seed: lists of the blocks of each request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

Trace = list[list[int]]


class _Blocks:
    def __init__(self) -> None:
        self._numbers = count()

    def new(self, num_blocks: int) -> list[int]:
        return [next(self._numbers) for _ in range(num_blocks)]


def chats(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """200 people, each of whom goes on after a while; the last block of a request is never used again."""
    system = blocks.new(3)
    waiting = [(rng.random() * 200, person, list(system)) for person in range(200)]
    heapify(waiting)
    while True:
        time, person, text = heappop(waiting)
        text = text + blocks.new(1 + int(rng.expovariate(0.3)))
        yield text + blocks.new(1)
        if rng.random() < 0.3:
            text = list(system)
        heappush(waiting, (time + rng.lognormvariate(0, 1) * 200, person, text))


def agents(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """Twelve tasks at once, which grow by a block or two."""
    tools = blocks.new(8)
    running = [list(tools) for _ in range(12)]
    while True:
        i = rng.randrange(12)
        running[i] += blocks.new(rng.randint(1, 2))
        yield list(running[i])
        if rng.random() < 0.06:
            running[i] = list(tools)


def few_shot(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """Some prompts far more often than others, and a question."""
    prompts = [blocks.new(rng.randint(5, 15)) for _ in range(100)]
    weights = [1 / (i + 1) for i in range(100)]
    while True:
        yield rng.choices(prompts, weights)[0] + blocks.new(2)


def at_random(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """Documents, each as likely as any other."""
    documents = [blocks.new(5) for _ in range(150)]
    while True:
        yield rng.choice(documents)


def in_turn(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """Documents, one after the other, again and again."""
    documents = [blocks.new(rng.randint(2, 12)) for _ in range(60)]
    while True:
        yield from documents


def lately(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """The later a document was used, the likelier it is used."""
    documents = [blocks.new(rng.randint(2, 12))]
    while True:
        if rng.random() < 0.7:
            document = documents.pop(-min(int(rng.paretovariate(0.8)), len(documents)))
        else:
            document = blocks.new(rng.randint(2, 12))
        documents.append(document)
        yield document


def drifting(rng: random.Random, blocks: _Blocks) -> Iterator[list[int]]:
    """Documents that are in use for a while and then no more."""
    documents: dict[int, list[int]] = {}
    for i in count():
        number = i // 3 + int(rng.expovariate(0.05))
        yield documents.setdefault(number, blocks.new(6) if number not in documents else [])


SHAPES: dict[str, Callable[[random.Random, _Blocks], Iterator[list[int]]]] = {
    f.__name__: f for f in (chats, agents, few_shot, at_random, in_turn, lately, drifting)
}


def trace(name: str, num_blocks: int, seed: int = 0) -> Trace:
    """Requests of a shape, or of several at once, ``"chats+in_turn"``, of so many blocks or a few more."""
    rng, blocks = random.Random(seed), _Blocks()
    streams = [SHAPES[part](rng, blocks) for part in name.split("+")]
    made: Trace = []
    while num_blocks > 0:
        made.append(list(next(rng.choice(streams))))
        num_blocks -= len(made[-1])
    return made
