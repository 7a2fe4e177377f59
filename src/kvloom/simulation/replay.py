"""Requests replayed through a cache: how much of what they ask for is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvloom import paging
from kvloom.errors import ArgumentError
from kvloom.paging import PagePool, PrefixTree
from kvloom.simulation.policies import GENERAL, Policy, optimum
from kvloom.simulation.trace import BLOCK_TOKENS, Request, paged

POLICIES: Final = (*paging.POLICIES, *GENERAL, "opt")
"""``"lru"`` and ``"ours"`` are what serves; the others know blocks, and nothing of what is between them."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits of a replay. A block, or page, counts as found where all before it are found.

    Attributes:
        blocks: Blocks found, or pages, where these have another size.
        tokens: Tokens found.
        blocks_asked: Blocks, or pages, of all prompts.
        tokens_asked: Tokens of all prompts.
        blocks_below: Blocks that were not found, but below.
        tokens_below: Tokens of these.
        states_kept: Texts behind which recurrent states are there at the end; 0 of other models.
        states_evicted: Texts whose states were evicted.
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
        """Blocks found, below or not, of those asked for."""
        return (self.blocks + self.blocks_below) / max(self.blocks_asked, 1)

    @property
    def token_rate(self) -> float:
        """Tokens found, below or not, of those asked for."""
        return (self.tokens + self.tokens_below) / max(self.tokens_asked, 1)


def replay(
    requests: Sequence[Request],
    capacity: int,
    policy: str = "lru",
    *,
    page_size: int = BLOCK_TOKENS,
    below: int = 0,
) -> Hits:
    """Let one request after the other find, compute and leave its blocks, each in one page.

    Requests come in order, one ends before the next begins, and of each its first blocks are used last. Of a
    prompt of more blocks than there are pages, the pool keeps the first ones.

    Args:
        requests: In order; their times do not matter.
        capacity: Tokens.
        policy: One of ``POLICIES``.
        page_size: Tokens in a page; see ``paged``.
        below: Tokens of a store below, which has what every request left and evicts what is unused for
            longest. What it has of a prompt after what the cache has is found below.

    Raises:
        ArgumentError: there is no such policy, no room for a page, or no such page.
    """
    for name, tokens in (("capacity", capacity), ("below", below)):
        if tokens < page_size and (tokens or name == "capacity"):
            raise ArgumentError(f"{name} must be at least {page_size} tokens, got {tokens}")
    if policy not in POLICIES:
        raise ArgumentError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if page_size != BLOCK_TOKENS:
        requests = paged(requests, page_size)
    found = _found(requests, capacity // page_size, policy)
    ends = found
    if below:
        ends = [*map(max, found, _found(requests, below // page_size, "lru"))]
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


def _found(requests: Sequence[Request], num_pages: int, policy: str) -> list[int]:
    """Blocks that each request finds."""
    if policy in paging.POLICIES:
        return _through_the_pool(requests, num_pages, policy)
    return _through(requests, optimum(num_pages, requests) if policy == "opt" else GENERAL[policy](num_pages))


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
