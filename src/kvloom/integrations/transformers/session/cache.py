"""The cache of transformers' scheduler, on pages of this library.

Shapes: T new tokens of all requests of a step, P pages of a request, H key/value heads, Hq query
heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.layer_specs import sources_of
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentSessions
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.requests.groups import Limits
from kvloom.integrations.transformers.session.requests.prefixes import SessionPrefixes
from kvloom.integrations.transformers.session.requests.prompt import Prompt, num_asked
from kvloom.integrations.transformers.session.requests.session_requests import SessionRequests
from kvloom.integrations.transformers.session.requests.state_rows import nbytes_of
from kvloom.integrations.transformers.session.stand_ins import NoSectors
from kvloom.integrations.transformers.session.steps.recurrent import MixerCalls
from kvloom.integrations.transformers.session.steps.step import SharedKeys, Steps
from kvloom.integrations.transformers.states.mixers import CacheOfMixers

KIND: Final = "full_attention"
"""Layer type that the scheduler sees for all layers; it counts pages of the first group."""


class BatchCache(CacheOfMixers):
    """Pages of all requests of a session, found again by their tokens, and attention over them.

    It replaces transformers' ``PagedAttentionCache`` and its allocator, with all names that continuous
    batching uses, over ``SessionRequests`` and ``Steps``. A block of transformers is a page of the first
    group of layers. Groups with windows have their own pages, of which a request holds those of its window.

    Pages are allocated when they are needed, up to ``max_pages``. When all are in use, pages that no request
    holds are evicted, as ``policy`` says. Methods may be called from any thread.

    Args:
        config: Configuration of the model.
        limits: Its groups of layers, and the requests and tokens of a step.
        device: Device of the model.
        max_pages: Largest number of pages in the first group.
        share: Whether requests find pages of others.
        policy: Which pages are evicted first, as in ``PagePool``.
        watch: Watch of the model's state; ``None`` for a model that never changes.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        states: Pages of states that requests find; ``None`` without sharing.
        agents: Sessions of agents, which hold pages; ``None`` for new ones.
        cuts: Where texts are cut for mixers; ``None`` if bits may depend on what else is in a step.

    Attributes:
        requests: The requests that hold pages.
        steps: The steps.
        codes: Groups of all layers that keep keys and values.
        residuals: Groups of residual windows.
        assistant: ``Assistant`` with pages of its own; set after construction; ``None`` for none.
    """

    assistant: Any = None
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
        limits: Limits,
        device: torch.device,
        *,
        max_pages: int,
        share: bool,
        policy: str = "lru",
        watch: ModelWatch | None = None,
        stateful: Sequence[Any] | None = None,
        states: PoolStates | None = None,
        agents: AgentSessions | None = None,
        cuts: Cuts | None = None,
    ) -> None:
        groups, num_codes = limits.groups(max_pages, policy, device), len(limits.codes)
        self.codes, self.residuals = groups[:num_codes], groups[num_codes:]
        prefixes = SessionPrefixes(groups, watch, states, stateful, agents, cuts)
        self.requests = SessionRequests(groups, prefixes, share)
        kept = self.codes, self.residuals, limits.format.recent, sources_of(config), stateful, device
        self.steps, self._cuts = Steps(*kept, self.requests.lock, cuts), cuts
        self.max_pages, self.max_batch_tokens = max_pages, limits.max_batch_tokens
        self.tokens_per_page = size = limits.format.page_size
        self.device, self.use_prefix_sharing, self.pool = device, share, NoSectors()
        self.cache_allocators = {KIND: self}
        positions = int(getattr(config, "max_position_embeddings", None) or 0)
        self.most_tokens = max(max_pages * size, positions if groups[0].window else 0)
        """Largest number of tokens of a request by its pages; all positions if only windows are kept."""
        self.bytes_per_sector = round(size * sum(x.nbytes_per_token for x in groups[0].storages.values()))
        self.candidate: Any = None
        """Request whose prompt is looked up next, since the scheduler passes its id, but not its salt."""

    @property
    def block_table(self) -> dict[str, list[int]]:
        """Ids of the pages of each request."""
        return {x.request_id: [*x.pages] for x in self.requests.page_map().requests}

    def counts(self) -> dict[str, Any]:
        """The attributes of ``BatchReport`` that tell of pages, requests and steps, at one moment."""
        requests, steps = self.requests, self.steps
        prefixes, pool = requests.prefixes, requests.pages.pool
        with requests.lock:
            states = requests.page_map().states
            return {
                "page_size": self.tokens_per_page,
                "page_bytes": self.bytes_per_sector,
                "max_pages": self.max_pages,
                "num_pages": pool.num_pages,
                "free": pool.num_free,
                "active": pool.num_active,
                "evictable": pool.num_evictable,
                "shared": states.count("shared"),
                "kept": states.count("kept"),
                "finished": requests.num_finished,
                "preemptions": requests.num_preempted,
                "tokens_asked": requests.num_asked,
                "tokens_found": requests.num_found,
                "steps": steps.num_steps,
                "tokens_computed": steps.num_tokens,
                "tokens_drafted": steps.num_drafted,
                "tokens_accepted": steps.num_accepted,
                "tokens_assisted": steps.num_assisted,
                "assistant": {} if self.assistant is None else self.assistant.report(),
                "window_bytes": sum(group.pages.nbytes for group in self.codes[1:]),
                "recent_bytes": sum(group.pages.nbytes for group in self.residuals),
                "state_bytes": nbytes_of(requests.states),
                "found_state_bytes": 0 if prefixes.states is None else prefixes.states.nbytes,
                "store": {} if prefixes.reads is None else prefixes.reads.report(),
            }

    # Pages of requests

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Let ``candidate`` begin with the known pages of its prompt.

        Returns:
            Number of tokens that were found.
        """
        state = self.candidate
        if state is None or state.request_id != request_id or not self.use_prefix_sharing:
            return 0
        return self.requests.begin_if_known(Prompt.by(state))

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Take pages for ``request_len`` more tokens of a request; returns false if there are too few.

        Args:
            state: The request.
            request_len: Number of new tokens.
            dry_run: Only check, and take no pages.
        """
        past, requests, request_len = state.current_len(), self.requests, self.num_whole(state, request_len)
        if not request_len:
            return False
        if dry_run:
            return requests.num_missing(state.request_id, past + request_len) <= requests.pages.num_room
        has_room = requests.extend(state.request_id, past, past + request_len)
        if has_room is None:
            prompt = Prompt.by(state)
            prompt = prompt if self.use_prefix_sharing else prompt._replace(most=0)
            return requests.begin(prompt, past, past + request_len)
        return has_room

    def num_whole(self, state: Any, count: int) -> int:
        """Largest number of next tokens of a request, at most ``count``, that a step may compute.

        It is 0 for a part of a prompt that is shorter than a piece.
        """
        return (
            count
            if self._cuts is None
            else self._cuts.num_whole(num_asked(state), state.current_len(), count)
        )

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release the pages of a request; pages that can be found again are evicted last.

        Args:
            request_id: Id of the request, which may hold no pages.
            no_cache: Whether the request is preempted.
        """
        self.requests.release(request_id, no_cache)
        if self.assistant is not None:
            self.assistant.release(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Release the pages of all requests, and with ``clear_ledgers`` evict all findable pages."""
        self.requests.release_all(clear_ledgers)
        self.steps.clear()
        if self.assistant is not None:
            self.assistant.release_all(clear_ledgers)

    def reset(self) -> None:
        """Release and evict all pages."""
        self.free_all_requests(clear_ledgers=True)

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Let others find the full pages of a request, whose tokens are all computed."""
        if complete_blocks:
            own = state.initial_tokens, state.generated_tokens, state.current_len()
            self.requests.publish(state.request_id, *own)

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Let new requests share the pages of another; shared pages are copied before a write.

        Returns:
            All of ``dst_req_ids``.
        """
        self.requests.fork(src_state.request_id, src_state.current_len(), dst_req_ids)
        return dst_req_ids

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        """Do nothing, since shared pages are copied before a write."""

    # What the scheduler counts

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Number of pages that a request needs for ``query_length`` more tokens, copies included."""
        return self.requests.num_missing(request_id, past_length + query_length)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Number of requests, counted from the first, for which there is room together."""
        room = self.requests.pages.num_room
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
        pages = self.requests.pages
        return (
            pages.num_room / max(pages.limit, 1)
            if relative
            else float(pages.num_room * self.bytes_per_sector)
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
        self.steps.add(self.requests[request_id], past_length, query_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, Tensor]:
        """Pass new tokens on to attention, which stores them; layers call this since transformers 5.24.

        Attention finds this cache in ``kwargs``, or with the keys if the model gives none, as GPT-NeoX.
        """
        if kwargs is None:
            return SharedKeys(self, layer_idx, key_states), value_states
        kwargs["cache"] = self
        return self.steps.handed_on(self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, since a step passes the positions of its tokens; models that count them are not supported."""
        return 0

    @property
    def recording(self) -> MixerCalls | None:
        """The calls of mixers in this step; ``None`` for a model without recurrent states."""
        return self.steps.calls
