"""Replay of requests through a pool of a model with recurrent states: hits need states and all pages.

Pools and trees are those of ``KVPool``, with an optional store below, and so is the rule for states. They are
kept after the last multiple of the interval in a text, also after the multiple before if the text ends there,
and after the last multiple before the text diverges from a known text.
"""

from collections.abc import Sequence
from typing import Final

from kvloom import paging
from kvloom.core.arguments import expect_least
from kvloom.errors import ArgumentError
from kvloom.paging import PagePool, PageRef, PrefixTree
from kvloom.paging.grid import grid_interval
from kvloom.simulation.below import SimulatedStore
from kvloom.simulation.replay import Hits
from kvloom.simulation.trace import BLOCK_TOKENS, Request, paged

_MOST: Final = 3  # maximum number of texts whose states one request leaves
_USED: Final = 2  # maximum number of pages that one request takes for each of its own: read, and computed


def replay_states(
    requests: Sequence[Request],
    capacity: int,
    policy: str = "lru",
    *,
    page_size: int = BLOCK_TOKENS,
    max_states: int | None = None,
    state_interval: int | None = None,
    below: int = 0,
    state_tokens: int | None = None,
) -> Hits:
    """Replay requests in order: each finds, computes and leaves pages and states, as in ``KVPool``.

    Only full pages count, and the last token of a prompt is always computed. If a prompt exceeds the
    capacity, the pool keeps its beginning.

    Args:
        requests: Requests in order; their times are ignored.
        capacity: Number of tokens, as ``max_tokens`` of the pool, rounded up to whole pages.
        policy: ``"lru"`` or ``"ours"``.
        page_size: Tokens in a page; see ``paged``.
        max_states: Number of texts whose states are kept: ``max_state_bytes`` of the pool divided by the
            bytes of one text's states, which ``kvloom plan`` prints; ``None`` for no limit.
        state_interval: Interval of the grid in tokens, a multiple of ``page_size``; by default 256, rounded
            up to one.
        below: Capacity, in tokens, of a store below that gets pages and states of every request and evicts by
            LRU; 0 for none.
        state_tokens: Number of tokens with as many bytes in this store as the states of one text, which
            ``kvloom plan`` prints; ``None`` only without a store.

    Raises:
        ArgumentError: an argument has another value, or there is no room for a page or for states.
    """
    if policy not in paging.POLICIES:
        raise ArgumentError(
            f"policy must be one of {', '.join(paging.POLICIES)} with recurrent states, got {policy!r}"
        )
    for name, tokens in (("capacity", capacity), ("below", below)):
        if tokens < page_size and (tokens or name == "capacity"):
            raise ArgumentError(f"{name} must be at least {page_size} tokens, got {tokens}")
    if below and state_tokens is None:
        raise ArgumentError(
            f"state_tokens must be given for a store of recurrent states, with below {below}, got None"
        )
    for name, count in (("state_tokens", state_tokens), ("max_states", max_states)):
        if count is not None:
            expect_least(name, count, 1)
    requests = paged(requests, page_size)
    interval = grid_interval(state_interval, page_size)
    most = _MOST * len(requests)
    num_states = most if max_states is None else min(max_states, most)
    store = SimulatedStore(below, page_size, state_tokens) if below and state_tokens is not None else None
    num_pages = min(-(-capacity // page_size), _USED * sum(len(x.hash_ids) for x in requests))
    pool = StatefulPool(num_pages, num_states, page_size, interval, policy, store)
    num_found = sum(pool.ask(x.hash_ids, x.input_length) for x in requests)
    return Hits(
        num_found - pool.num_read,
        (num_found - pool.num_read) * page_size,
        sum(x.input_length // page_size for x in requests),
        sum(x.input_length for x in requests),
        pool.num_read,
        pool.num_read * page_size,
        states_kept=pool.num_kept,
        states_evicted=pool.num_written - pool.num_kept,
    )


class StatefulPool:
    """Pool of pages of keys and values, and of states of some texts; for one request after the other.

    Args:
        num_pages: Number of pages of keys and values.
        num_states: Maximum number of texts with states.
        page_size: Tokens in a page.
        interval: Interval of the grid in tokens, a multiple of the page size.
        policy: Eviction policy of the pages; that of states is ``"lru"``.
        below: Store below; ``None`` for none.

    Attributes:
        num_written: Number of texts whose states were kept, evicted ones included.
        num_read: Number of pages that were found because the store had them or states after them.
    """

    def __init__(
        self,
        num_pages: int,
        num_states: int,
        page_size: int,
        interval: int,
        policy: str,
        below: SimulatedStore | None = None,
    ) -> None:
        self._page_size, self._step = page_size, interval // page_size
        self._pages, self._states = PagePool(num_pages, policy), PagePool(num_states)
        self._tree = PrefixTree(self._pages, 1)  # page ids are used as tokens
        self._states_tree = PrefixTree(self._states, 1, window=0)
        self._below = below
        self.num_written = self.num_read = 0

    @property
    def num_kept(self) -> int:
        """Number of texts with states."""
        return self._states_tree.num_pages

    def ask(self, ids: Sequence[int], num_tokens: int) -> int:
        """Let a request find, compute and leave its pages and states.

        Args:
            ids: Ids of its pages, of which the last may be partly filled.
            num_tokens: Number of tokens of its prompt, at most those that fit all pages.

        Returns:
            Number of pages found. The last token of a prompt is always computed.
        """
        size, step = self._page_size, self._step
        num_tokens = min(num_tokens, self._pages.num_pages * size)
        findable = ids[: (num_tokens - 1) // size]
        found, held = self._begin(findable)
        parted = self._tree.num_parted(findable) // step * step
        num_pages = -(-num_tokens // size)
        for start in range(found, num_pages, step):  # in pieces, as the text is computed
            held += self._pages.take(min(step, num_pages - start))
        last = num_tokens // (size * step) * step
        ends = {parted, last}
        if num_tokens == last * size:
            ends.add(last - step)
        before = found
        for end in sorted(end for end in ends if end > found):
            self._keep(ids[:end], held[:end], before, is_parted=end == parted)
            before = end
        for ref in held:
            self._pages.release(ref)
        return found

    def _begin(self, ids: Sequence[int]) -> tuple[int, list[PageRef]]:
        """Pages of the longest prefix whose pages and states are found, here or below; held by the caller."""
        found = self._num_whole(ids)
        held, states = (
            tree.retain(tree.walk(pages, ""), found, pages, "", len(ids))
            for tree, pages in ((tree, tree.packed(ids)) for tree in (self._tree, self._states_tree))
        )
        if self._below is not None:
            num_here, wanted = found, ids[: self._num_whole(ids, self._below)]
            held += self._read(wanted, self._below)
            states += self._read_states(wanted, self._below)
            found = self._num_whole(ids)
            self.num_read += found - num_here
            held = _hold(self._pages, self._tree.pages_from(ids[:found], "", 0), held)
            needed = self._states_tree.pages_from(ids[:found], "", max(found - 1, 0))
            states = _hold(self._states, needed, states)
        for ref in states:
            self._states.release(ref)
        return found, held

    def _num_whole(self, ids: Sequence[int], below: SimulatedStore | None = None) -> int:
        """Number of pages of the longest prefix with all pages and the states after it, here or ``below``."""
        there, states = self._tree.known(ids), self._states_tree.known(ids)
        if below is not None:
            there = [x or below.has((i, False)) for x, i in zip(there, ids, strict=True)]
            states = [x or below.has((i, True)) for x, i in zip(states, ids, strict=True)]
        num_pages = next((i for i, is_there in enumerate(there) if not is_there), len(there))
        return max((i for i, is_there in enumerate(states[:num_pages], 1) if is_there), default=0)

    def _read(self, ids: Sequence[int], below: SimulatedStore) -> list[PageRef]:
        """Hold the pages of a text; read missing ones, as many as there is room for."""
        refs = _hold(self._pages, self._tree.pages_from(ids, "", 0))
        end = min(len(ids), len(refs) + self._pages.num_free + self._pages.num_evictable)
        if end == len(refs):
            return refs
        below.read((i, False) for i in reversed(ids[len(refs) : end]) if below.has((i, False)))
        return self._tree.insert(ids[:end], refs + self._pages.take(end - len(refs)))

    def _read_states(self, ids: Sequence[int], below: SimulatedStore) -> list[PageRef]:
        """Hold the states after a text; read them if they are missing."""
        first = max(len(ids) - 1, 0)
        refs = self._states_tree.pages_from(ids, "", first)
        has_room = self._states.num_free + self._states.num_evictable > 0
        if refs or not ids or not has_room:
            return _hold(self._states, refs)
        below.read([(ids[-1], True)])
        self.num_written += 1
        return self._states_tree.insert(ids, self._states.take(1), first=first)

    def _keep(self, ids: Sequence[int], refs: Sequence[PageRef], before: int, *, is_parted: bool) -> None:
        """Let others find a text and its states; it was continued from the states after ``before`` pages."""
        for ref in refs:
            self._pages.retain(ref)
        refs = self._tree.insert(ids, refs)
        first = len(ids) - 1
        new = self._states_tree.pages_from(ids, "", first)
        if new:
            self._states.retain(new[0])
        else:
            new = self._states_tree.insert(ids, self._states.take(1), first=first)
            self.num_written += 1
        for ref in self._states_tree.pages_from(ids[:before], "", before - 1) if before else ():
            self._states.retain(ref)
            self._states.release(ref, is_passed=True)
        if is_parted:
            self._states.prefer(new)
        if self._below is not None:
            self._below.write((*((i, False) for i in reversed(ids)), (ids[-1], True)))
        self._states.release(new[0])
        for ref in refs:
            self._pages.release(ref)


def _hold(pool: PagePool, needed: list[PageRef], held: Sequence[PageRef] = ()) -> list[PageRef]:
    """Retain ``needed``, then release ``held``, the last ones first; returns ``needed``."""
    for ref in needed:
        pool.retain(ref)
    for ref in reversed(held):
        pool.release(ref)
    return needed
