"""The cache of transformers' scheduler, on pages of this library.

Shapes: T new tokens of all requests of a step, P pages of a request, H key/value heads, Hq query
heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from kvloom.caches import CacheFormat
from kvloom.core.text import Text
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.layer_specs import sources_of
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.integrations.transformers.session.agent_sessions import AgentSessions, turn_of
from kvloom.integrations.transformers.session.groups import Limits, TokenLayers
from kvloom.integrations.transformers.session.growing import GrowingPages
from kvloom.integrations.transformers.session.held import Held, most_findable, page_map_of, salt_of
from kvloom.integrations.transformers.session.prefixes import SessionPrefixes
from kvloom.integrations.transformers.session.recurrent import MixerCalls, copied, expect_apart
from kvloom.integrations.transformers.session.report import PageMap
from kvloom.integrations.transformers.session.stand_ins import NoSectors
from kvloom.integrations.transformers.session.step import Steps
from kvloom.integrations.transformers.states.mixers import CacheOfMixers
from kvloom.paging import PageTable, check

KIND: Final = "full_attention"
"""Layer type that the scheduler sees for all layers; it counts pages of the first group."""


class BatchCache(CacheOfMixers):
    """Pages of all requests of a session, found again by their tokens, and attention over them.

    It replaces transformers' ``PagedAttentionCache`` and its allocator, with all names that continuous
    batching uses. A block of transformers is a page of the first group of layers. Groups with windows have
    their own pages, of which a request holds those of its window.

    Pages are allocated when they are needed, up to ``max_pages``. When all are in use, pages that no request
    holds are evicted, as ``policy`` says. Methods may be called from any thread.

    Args:
        config: Configuration of the model.
        layers: Its layers that keep keys and values.
        format: Cache format of the tokens.
        device: Device of the model.
        max_pages: Largest number of pages in the first group.
        max_batch_tokens: Largest number of tokens in a step.
        share: Whether requests find pages of others.
        policy: Which pages are evicted first, as in ``PagePool``.
        watch: Watch of the model's state; ``None`` for a model that never changes.
        num_requests: Largest number of requests in a step.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        states: Pages of states that requests find; ``None`` without sharing.
        agents: Sessions of agents, which hold pages; ``None`` for new ones.
    """

    index = 0
    layer_type = KIND
    max_blocks_per_request = 0  # no block table: the pages of a step are in the step
    max_decode_fast_path_length = 0
    max_tokens_read = 0  # nothing is gathered
    read_cache_limit = None
    blocks_per_sector = 1
    read_trash_index = write_trash_index = -1  # slots of padding, which does not occur

    def __init__(
        self,
        config: Any,
        layers: TokenLayers,
        format: CacheFormat,
        device: torch.device,
        *,
        max_pages: int,
        max_batch_tokens: int,
        share: bool,
        policy: str = "lru",
        watch: ModelWatch | None = None,
        num_requests: int = 1024,
        stateful: Sequence[Any] | None = None,
        states: PoolStates | None = None,
        agents: AgentSessions | None = None,
    ) -> None:
        size = format.page_size
        self.tokens_per_page, self.max_pages, self.max_batch_tokens = size, max_pages, max_batch_tokens
        self._num_positions = int(getattr(config, "max_position_embeddings", None) or 0)
        self.device, self.use_prefix_sharing, self.pool = device, share, NoSectors()
        self.cache_allocators = {KIND: self}
        limits = Limits(layers, format, num_requests, max_batch_tokens)
        self.groups = limits.groups(max_pages, policy, device)
        codes, residuals = self.groups[: len(limits.codes)], self.groups[len(limits.codes) :]
        self.codes, self.residuals = codes, residuals
        main = self.groups[0]
        self.pages, self.tree = cast(GrowingPages, main.pages), main.tree
        self.bytes_per_sector = round(size * sum(x.nbytes_per_token for x in main.storages.values()))
        self.num_asked = self.num_found = self.num_preempted = self.num_finished = 0
        self.candidate: Any = None
        """Request whose prompt is looked up next, since the scheduler passes its id, but not its salt."""
        self.prefixes = SessionPrefixes(self.groups, watch, states, stateful, agents)
        self._held: dict[str, Held] = {}
        self.lock = self.prefixes.agents.lock
        steps = codes, residuals, format.recent, sources_of(config), stateful, device, self.lock
        self.steps = Steps(*steps)

    @property
    def block_table(self) -> dict[str, list[int]]:
        """Ids of the pages of each request."""
        with self.lock:
            return {name: [ref.id for ref in held.table.pages] for name, held in self._held.items()}

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a request by its pages; all positions if only windows are kept."""
        most = self.max_pages * self.tokens_per_page
        return most if self.groups[0].window is None else max(most, self._num_positions)

    @property
    def num_room(self) -> int:
        """Number of pages that requests can still take."""
        return self.pages.num_room

    # Pages of requests

    def num_known(self, tokens: Sequence[int], salt: str, max_tokens: int) -> int:
        """Number of first tokens, at most ``max_tokens``, whose pages would be found."""
        with self.lock:
            return self._num_known(tokens, salt, max_tokens) * self.tokens_per_page

    def _num_known(self, tokens: Sequence[int], salt: str, max_tokens: int) -> int:
        return self.prefixes.num_known(tokens, self.prefixes.scope(salt), max_tokens)

    def is_read(self, state: Any) -> bool:
        """Whether a waiting request may begin, since stores have been read for it; starts reading them."""
        most = most_findable(state, state.initial_tokens)
        with self.lock:
            own = state.initial_tokens, salt_of(state), most, turn_of(state)
            return self.prefixes.is_read(state.request_id, *own)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Let ``candidate`` begin with the known pages of its prompt.

        Returns:
            Number of tokens that were found.
        """
        state = self.candidate
        if state is None or state.request_id != request_id or not self.use_prefix_sharing:
            return 0
        with self.lock:
            own = prompt_ids, salt_of(state), self._num_findable(state)
            is_read = self.prefixes.has_read(request_id) or self._num_known(*own)
            if not is_read and not self.prefixes.find_part(turn_of(state), *own, 0)[1]:
                return 0  # counted when it gets pages, since each step until then may look it up
            held = self._begin(state)
            self._hold(state, held)
            self.num_found += held.num_found
            return held.num_found

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Take pages for ``request_len`` more tokens of a request; returns false if there are too few.

        Args:
            state: The request.
            request_len: Number of new tokens.
            dry_run: Only check, and take no pages.
        """
        past = state.current_len()
        with self.lock:
            held = self._held.get(state.request_id)
            if held is not None and not dry_run:
                return self._extend(held, past, past + request_len)
            missing = self.needs_new_blocks(state.request_id, past, request_len)
            if not dry_run:
                self.pages.make_room(missing)
            if dry_run or missing > self.num_room:
                return missing <= self.num_room
            held = self._begin(state)
            if not self._extend(held, past, past + request_len):
                self._release(held)
                return False
            self._hold(state, held)
            return True

    def _extend(self, held: Held, past: int, end: int) -> bool:
        """Take pages for the tokens of a request from ``past`` to ``end`` in every group, if possible."""
        try:
            for group, own in zip(self.groups, held.groups, strict=True):
                group.release_passed(own, past)
                new = end - own.num_tokens
                if new > 0 and not own.fill(new):
                    group.append(own, new)
        except (MemoryError, torch.OutOfMemoryError):  # OutOfPages among them; nothing was taken
            return False
        return True

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release the pages of a request; pages that can be found again are evicted last.

        Args:
            request_id: Id of the request, which may hold no pages.
            no_cache: Whether the request is preempted.
        """
        with self.lock:
            held = self._held.pop(request_id, None)
            if held is not None:
                self.prefixes.store(held)
                self._release(held)
                self.num_preempted += no_cache
                self.num_finished += not no_cache

    def keep_turn(self, state: Any) -> None:
        """Let the agent's session of a request that ends, if it has one, hold its pages."""
        turn = turn_of(state)
        with self.lock:
            held = self._held.get(state.request_id)
            if turn is None or held is None or not self.use_prefix_sharing or not state.generated_tokens:
                return
            tokens = (state.initial_tokens + state.generated_tokens)[: state.current_len()]
            self.prefixes.keep_turn(turn, held, tokens)  # all but the last one, which was not computed

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Release the pages of all requests, and with ``clear_ledgers`` evict all findable pages."""
        with self.lock:
            for request_id in [*self._held]:
                self.free_blocks(request_id)
            if clear_ledgers:
                self.prefixes.agents.give_up_all("the server gave up all pages")
                if self.pages.pool.events is not None:
                    self.pages.pool.events.request = 0
                for group in self.groups:
                    group.tree.evict(group.pages.pool.num_evictable)
            self.steps.clear()

    def reset(self) -> None:
        """Release and evict all pages."""
        self.free_all_requests(clear_ledgers=True)

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Let others find the full pages of a request, whose tokens are all computed."""
        with self.lock:
            held = self._held.get(state.request_id)
            if held is None or not complete_blocks:
                return
            tokens = Text(state.initial_tokens, state.generated_tokens, state.current_len())
            self.prefixes.publish(held, tokens)

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Let new requests share the pages of another; shared pages are copied before a write.

        Returns:
            All of ``dst_req_ids``.
        """
        with self.lock:
            parent = self._held[src_state.request_id]
            for own in parent.groups:  # drops the slot of the next token, which each request writes itself
                own.truncate(src_state.current_len())
            events = self.pages.pool.events
            for request_id in dst_req_ids:
                if events is not None:
                    events.begin(parent.salt, src_state.current_len())
                    events.name(request_id)
                number = None if events is None else events.request
                groups = [own.fork(number) for own in parent.groups]
                child = replace(parent, groups=groups, wanted=frozenset(), kept={})
                child.states = None if parent.states is None else copied(parent.states)
                self._held[request_id] = child
        return dst_req_ids

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Do nothing, since shared pages are copied before a write."""

    def _hold(self, state: Any, held: Held) -> None:
        self._held[state.request_id] = held
        self.num_asked += held.num_prompt

    def _release(self, held: Held) -> None:
        for own in held.groups:
            own.table.release()

    def _begin(self, state: Any) -> Held:
        """``Held`` of a request that begins, with the pages that it finds."""
        tokens, most = state.remaining_prefill_tokens, self._num_findable(state)
        own = len(state.initial_tokens), salt_of(state), most, turn_of(state)
        return self.prefixes.begin_request(state.request_id, tokens, *own)

    def _num_findable(self, state: Any) -> int:
        """Largest number of first tokens that may be found when a request begins."""
        if not self.use_prefix_sharing or state is not self.candidate:
            return 0
        return most_findable(state, state.remaining_prefill_tokens)

    # What the scheduler counts

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Number of pages that a request needs for ``query_length`` more tokens, copies included."""
        with self.lock:
            held = self._held.get(request_id)
            total = past_length + query_length
            if held is None:
                return -(-total // self.tokens_per_page)
            return self.groups[0].num_missing(held.groups[0], total)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Number of requests, counted from the first, for which there is room together."""
        room = self.num_room
        for count, needed in enumerate(list_blocks_needed):
            room -= needed[KIND]
            if room < 0:
                return count
        return len(list_blocks_needed)

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Number of pages that ``request_len`` more tokens complete; empty without sharing."""
        size, past = self.tokens_per_page, state.current_len()
        filled = (past + request_len) // size - past // size
        return {KIND: filled} if filled and self.use_prefix_sharing else {}

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Pages that requests can still take, as a share of the present limit, or in bytes."""
        return (
            self.num_room / max(self.pages.limit, 1)
            if relative
            else float(self.num_room * self.bytes_per_sector)
        )

    def evict_cached_blocks(self) -> bool:
        """Do nothing and return false, since taking a page evicts one if needed."""
        return False

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Number of tokens that a request attends to."""
        return past_length + query_length

    # A step

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """Add a request to the next step."""
        self.steps.add(self._held[request_id], past_length, query_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Any, Tensor]:
        """Pass new tokens on to attention, which stores them; layers call this since transformers 5.24."""
        kwargs["cache"] = self
        return self.steps.handed_on(self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, since a step passes the positions of its tokens; models that count them are not supported."""
        return 0

    @property
    def recording(self) -> MixerCalls | None:
        """The calls of mixers in this step; ``None`` for a model without recurrent states."""
        return self.steps.calls

    # Reports

    def tokens_found(self, request_id: str) -> int:
        """Number of tokens of a request's prompt whose pages were found; 0 if it holds no pages."""
        return self._held[request_id].num_found if request_id in self._held else 0

    def page_map(self) -> PageMap:
        """Map of the pages and their holders."""
        with self.lock:
            return page_map_of(self.pages.pool, self._held, self.prefixes.agents.tables(0))

    def check(self) -> None:
        """Check every invariant of the pages; raises ``StateError`` at the first that fails."""
        with self.lock:
            for i, group in enumerate(self.groups):
                tables = [held.groups[i].table for held in self._held.values()]
                tables += self.prefixes.agents.tables(i)
                check(group.pages.pool, group.tree, tables)
            expect_apart(self.held())

    def held(self) -> list[Held]:
        """``Held`` of all requests."""
        return [*self._held.values()]

    def tables(self) -> list[PageTable]:
        """Page tables of all requests in the first group."""
        return [held.table for held in self.held()]
