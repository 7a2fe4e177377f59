"""Requests replayed through a cache: how much of what they ask for is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvloom import paging
from kvloom.errors import ArgumentError
from kvloom.paging import PagePool, PrefixTree
from kvloom.simulation.policies import GENERAL, Policy, optimum
from kvloom.simulation.trace import BLOCK_TOKENS, Request

POLICIES: Final = (*paging.POLICIES, *GENERAL, "opt")
"""``"lru"`` and ``"ours"`` are what serves; the others know blocks, and nothing of what is between them."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What a replay found. A block counts as found where all blocks before it are found.

    Attributes:
        blocks: Blocks found.
        tokens: Tokens found.
        blocks_asked: Blocks of all prompts.
        tokens_asked: Tokens of all prompts.
    """

    blocks: int
    tokens: int
    blocks_asked: int
    tokens_asked: int

    @property
    def block_rate(self) -> float:
        """Blocks found of those asked for."""
        return self.blocks / max(self.blocks_asked, 1)

    @property
    def token_rate(self) -> float:
        """Tokens found of those asked for."""
        return self.tokens / max(self.tokens_asked, 1)


def replay(requests: Sequence[Request], capacity: int, policy: str = "lru") -> Hits:
    """Let one request after the other find, compute and leave its blocks, each in one page.

    Requests come in order, one ends before the next begins, and of each its first blocks are used last. Of a
    prompt of more blocks than there are pages, the pool keeps the first ones.

    Args:
        requests: In order; their times do not matter.
        capacity: Tokens.
        policy: One of ``POLICIES``.

    Raises:
        ArgumentError: there is no such policy, or no room for a block.
    """
    num_pages = capacity // BLOCK_TOKENS
    if num_pages < 1:
        raise ArgumentError(f"capacity must be at least {BLOCK_TOKENS} tokens, got {capacity}")
    if policy in paging.POLICIES:
        found = _through_the_pool(requests, num_pages, policy)
    elif policy == "opt":
        found = _through(requests, optimum(num_pages, requests))
    elif policy in GENERAL:
        found = _through(requests, GENERAL[policy](num_pages))
    else:
        raise ArgumentError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return Hits(
        sum(found),
        sum(
            min(BLOCK_TOKENS * count, request.input_length)
            for count, request in zip(found, requests, strict=True)
        ),
        sum(len(request.hash_ids) for request in requests),
        sum(request.input_length for request in requests),
    )


def _through_the_pool(requests: Sequence[Request], num_pages: int, policy: str) -> list[int]:
    pool = PagePool(num_pages, policy)
    tree = PrefixTree(pool, page_size=1)  # the id of a block stands for its tokens
    counts = []
    for request in requests:
        blocks = request.hash_ids[:num_pages]
        refs = tree.match(blocks)
        counts.append(len(refs))
        for ref in tree.insert(blocks, refs + pool.take(len(blocks) - len(refs))):
            pool.release(ref)
    return counts


def _through(requests: Sequence[Request], cache: Policy) -> list[int]:
    counts = []
    for request in requests:
        count = 0
        for block in request.hash_ids:
            if block not in cache:
                break
            count += 1
        counts.append(count)
        cache.use(reversed(request.hash_ids))
    return counts
