"""Replay of requests through a cache, which counts hits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvloom import paging
from kvloom.errors import ArgumentError
from kvloom.paging import PagePool, PrefixTree
from kvloom.simulation.policies import GENERAL, Policy, optimum
from kvloom.simulation.trace import BLOCK_TOKENS, Request, paged

POLICIES: Final = (*paging.POLICIES, *GENERAL, "opt")
"""Names of policies: ``"lru"`` and ``"ours"`` are those of ``PagePool``; others see independent blocks."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits of a replay. A block, or page, counts as found if all before it are found.

    Attributes:
        blocks: Number of blocks found, or of pages if these have another size.
        tokens: Number of tokens found.
        blocks_asked: Number of blocks, or pages, of all prompts.
        tokens_asked: Number of tokens of all prompts.
        blocks_below: Number of blocks found only in the store below.
        tokens_below: Number of tokens of these.
        states_kept: Number of texts with recurrent states at the end; 0 for models without.
        states_evicted: Number of texts whose states were evicted.
    """

    blocks: int
    tokens: int
    blocks_asked: int
    tokens_asked: int
    blocks_below: int = 0
    tokens_below: int = 0
    states_kept: int = 0
    states_evicted: int = 0

    @property
    def block_rate(self) -> float:
        """Share of the blocks asked for that were found, below or not."""
        return (self.blocks + self.blocks_below) / max(self.blocks_asked, 1)

    @property
    def token_rate(self) -> float:
        """Share of the tokens asked for that were found, below or not."""
        return (self.tokens + self.tokens_below) / max(self.tokens_asked, 1)


def replay(
    requests: Sequence[Request],
    capacity: int,
    policy: str = "lru",
    *,
    page_size: int = BLOCK_TOKENS,
    below: int = 0,
) -> Hits:
    """Replay requests one after the other: each finds, computes and caches its blocks, one in a page.

    Each request ends before the next begins, and uses its first blocks last. If a prompt has more blocks than
    there are pages, the pool keeps the first ones.

    Args:
        requests: Requests in order; their times are ignored.
        capacity: Number of tokens, rounded up to whole pages.
        policy: One of ``POLICIES``.
        page_size: Tokens in a page; see ``paged``.
        below: Capacity, in tokens, of a store below that gets the blocks of every request and evicts by LRU.
            It finds the blocks of a prompt that follow those in the cache.

    Raises:
        ArgumentError: there is no such policy, no room for a page, or no such ``page_size``.
    """
    for name, tokens in (("capacity", capacity), ("below", below)):
        if tokens < page_size and (tokens or name == "capacity"):
            raise ArgumentError(f"{name} must be at least {page_size} tokens, got {tokens}")
    if policy not in POLICIES:
        raise ArgumentError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    requests = paged(requests, page_size)
    found = _found_by_request(requests, -(-capacity // page_size), policy)
    ends = found
    if below:
        ends = [*map(max, found, _found_by_request(requests, below // page_size, "lru"))]
    lengths = [request.input_length for request in requests]
    tokens, tokens_in_all = (
        sum(min(page_size * count, length) for count, length in zip(counts, lengths, strict=True))
        for counts in (found, ends)
    )
    return Hits(
        sum(found),
        tokens,
        sum(len(request.hash_ids) for request in requests),
        sum(lengths),
        sum(ends) - sum(found),
        tokens_in_all - tokens,
    )


def _found_by_request(requests: Sequence[Request], num_pages: int, policy: str) -> list[int]:
    """Number of blocks that each request finds."""
    if policy in paging.POLICIES:
        return _found_in_pool(requests, num_pages, policy)
    return _found_with_policy(
        requests, optimum(num_pages, requests) if policy == "opt" else GENERAL[policy](num_pages)
    )


def _found_in_pool(requests: Sequence[Request], num_pages: int, policy: str) -> list[int]:
    pool = PagePool(min(num_pages, sum(len(x.hash_ids) for x in requests)), policy)  # no other is used
    tree = PrefixTree(pool, page_size=1)  # block ids are used as tokens
    counts = []
    for request in requests:
        blocks = request.hash_ids[:num_pages]
        refs = tree.match(blocks)
        counts.append(len(refs))
        for ref in tree.insert(blocks, refs + pool.take(len(blocks) - len(refs))):
            pool.release(ref)
    return counts


def _found_with_policy(requests: Sequence[Request], cache: Policy) -> list[int]:
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
