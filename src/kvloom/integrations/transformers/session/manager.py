"""transformers' manager of continuous batching, on pages of this library."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from threading import RLock
from typing import Any, Final

from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvloom.caches.tensors.memory import free_bytes
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.attention.held import attending_in_place
from kvloom.integrations.transformers.attention.latents import expect_absorbed
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.cache.trial import trial_of
from kvloom.integrations.transformers.fingerprint.scopes import scope_of
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.invariance import (
    NO_WISH,
    Wish,
    hold_layers,
    release_layers,
    report_layers,
)
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.models.rope import dynamic_rope
from kvloom.integrations.transformers.models.text_config import has_latents, only_head_dims, text_config_of
from kvloom.integrations.transformers.pool.configured import expect_same_layers
from kvloom.integrations.transformers.pool.states import PoolStates, expect_interval, least_bytes
from kvloom.integrations.transformers.session.attention import IMPLEMENTATION
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.choices.penalties import text_apart
from kvloom.integrations.transformers.session.config import expect_config, expect_prompt
from kvloom.integrations.transformers.session.drafts import expect_drafts
from kvloom.integrations.transformers.session.drafts.drafter import Drafter
from kvloom.integrations.transformers.session.drafts.guesses import MOST
from kvloom.integrations.transformers.session.drafts.lent import LentModel, expect_free
from kvloom.integrations.transformers.session.report import BatchReport, PageMap
from kvloom.integrations.transformers.session.requests.agent_sessions import AgentSessions
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.requests.groups import (
    STATES_SHARE,
    Limits,
    page_bytes,
    stateful_layers_of,
    token_layers_of,
)
from kvloom.integrations.transformers.session.requests.prompt import SALT, TURN, AgentTurn
from kvloom.integrations.transformers.session.scheduler import scheduler_class
from kvloom.integrations.transformers.session.stand_ins import Attending
from kvloom.integrations.transformers.session.steps.drafted import VerifyingProcessor
from kvloom.integrations.transformers.smoothing import smoothing_for, smoothing_report
from kvloom.integrations.transformers.states.mixers import watch_mixers
from kvloom.integrations.transformers.states.specs import Specs
from kvloom.paging import Miss, expect_policy, expect_salt
from kvloom.store.store import KVStore
from kvloom.tracing.recorder import Recorded, Recorder

PAGE_SIZE: Final = 16
"""Tokens in a page if no ``ContinuousBatchingConfig`` is given."""
MAX_BATCH_TOKENS: Final = 2048
"""Largest number of tokens in a step if none is given."""


class BatchingManager(Recorder, ContinuousBatchingManager):  # type: ignore[misc]
    """A session of continuous batching: transformers' manager, on pages of this library.

    ``add_request`` and ``add_requests`` also take a ``cache_salt``: only requests with the same salt find
    each other's pages.

    In the ``ContinuousBatchingConfig``, ``num_blocks`` is the number of pages of ``page_size`` tokens in any
    format. Without it, there can be as many as fit into ``max_memory_percent`` of the free memory.
    ``max_blocks_per_request`` has no effect.

    ``record``, ``why``, ``view`` and ``save_events`` are those of ``KVPool``. They may be called from any
    thread, also before a session begins. A recording names requests by their ids. It can be read until this
    manager begins another session with new pages.

    Args:
        model: The model of ``continuous_batching``.
        generation_config: As in ``model.init_continuous_batching``.
        continuous_batching_config: The same; pages of 16 tokens if ``None``.
        workload_hints: The same.
        kv: Format of keys.
        values: Format of values.
        layout: Axis order of the pages.
        share: Whether requests find pages of others.
        policy: Which pages are evicted when others need room, as in ``KVPool.for_model``.
        wish: Changes of the model's layers while this manager holds it.
        state_interval: Multiples at which prefixes are found in a model with recurrent states, as in
            ``continuous_batching``.
        store: Store below the pages.
        drafts: Where drafted tokens come from, as in ``continuous_batching``.

    Raises:
        ArgumentError: an argument, or a field of a configuration, has an invalid value; nothing was changed.
        UnsupportedError: a field is not supported, latents of the model must be expanded, or the model is
            wrong in pieces; nothing was changed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        *,
        kv: str = "auto",
        values: str | None = None,
        layout: str = "auto",
        share: bool = True,
        policy: str = "lru",
        wish: Wish = NO_WISH,
        state_interval: int | None = None,
        store: KVStore | None = None,
        drafts: PreTrainedModel | str | None = None,
    ) -> None:
        expect_policy(policy)
        expect_drafts(model, drafts, wish, generation_config or model.generation_config)
        if isinstance(drafts, PreTrainedModel) and drafts is not model:
            expect_free(drafts)
        self._wish, self._store, self._drafts = wish, store, drafts
        self._identity: tuple[str, Any] | None = None
        config = continuous_batching_config or ContinuousBatchingConfig(page_size=PAGE_SIZE)
        expect_config(config)
        scheduler_class(config.scheduler_type)
        text = text_config_of(model)
        if has_latents(text):
            expect_absorbed(model)
        smoothing = smoothing_for(model, kv)
        self._format = cache_format(text, kv, config.page_size, None, values, layout, smoothing)
        self._smoothing = smoothing_report(self._format, smoothing)
        self._kv = self._format.kind(*only_head_dims(text))
        self._share, self._policy = share and config.allow_block_sharing, policy
        self._interval = expect_interval(state_interval, config.page_size)
        self._layers = token_layers_of(model)  # while the model still has its own attention
        if getattr(text, "compile_config", None) is not None:
            raise UnsupportedError("model must have no compile_config, as steps differ in their tokens")
        generation = deepcopy(generation_config or model.generation_config)
        if generation.eos_token_id is None:
            generation.eos_token_id = -1
        self._cache: BatchCache | None = None
        self.agents = AgentSessions()
        """Sessions of agents; may be replaced before a session begins, to have other limits."""
        self._has_begun = False  # with this cache
        self._making = RLock()
        self._stateful = stateful_layers_of(model)
        self._specs: Specs = {}
        if self._stateful is not None:
            why_wrong, self._specs = trial_of(model)  # while the model still has its own attention
            if why_wrong:
                raise UnsupportedError(why_wrong)
            watch_mixers(model)
        self._lent: LentModel | None = None
        if isinstance(drafts, PreTrainedModel):
            layers = wish._replace(batch_invariant=False, attention=False)
            self._lent = LentModel(drafts, model, config.page_size, self._holder, layers)
        stepped = Attending(model) if self._stateful is not None else model
        config = replace(config, max_blocks_per_request=0)
        configs = {"generation_config": generation, "continuous_batching_config": config}
        with text_apart(self, generation):
            super().__init__(model=stepped, workload_hints=workload_hints, **configs)
        self.model = model
        self.stepped: Any = model
        """Model that each step calls; may be replaced before a session begins, to see its logits."""
        self.logit_processor.supported_keys.update({SALT: str, TURN: AgentTurn})

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set the attention that reads these pages; ``stop`` restores the one before."""
        model = model.attending if isinstance(model, Attending) else model
        present = [x for x in layers_of(model) if x.number in self._layers]
        expect_same_layers([*self._layers.values()], present, "session")
        if self._lent is not None:
            self._lent.begin()
        hold_layers(model, self._holder, self._wish)
        before = model.config._attn_implementation
        with attending_in_place(model, self._holder):  # it agrees with attention of steps
            self._identify(model)
        model.set_attn_implementation(IMPLEMENTATION)
        if before != IMPLEMENTATION:
            self._original_attn_impl = before

    def _identify(self, model: Any) -> None:
        """Identify the model as steps compute it, for its watch and for a store."""
        if not hasattr(self, "_watch"):
            self._watch = ModelWatch(model)
        state = self._watch.state()
        if self._store is not None and (self._identity is None or self._identity[0] != state):
            from kvloom.integrations.transformers.pool.identity import identify

            self._identity = state, identify(model, self._format)
            self._put_below(self._cache)

    def _put_below(self, cache: BatchCache | None) -> None:
        """Put the store below the pages of a cache."""
        if cache is not None and self._store is not None and self._identity is not None:
            from kvloom.integrations.transformers.session.requests.store_reads import StoreReads

            state, identity = self._identity
            own = self._store, cache.requests.groups, identity, state, self._wake_up_loop.set
            with cache.requests.lock:
                cache.requests.prefixes.reads = StoreReads(*own)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop as transformers does, and restore the layers of the model."""
        super().stop(*args, **kwargs)
        if not self.is_running():
            self.release()

    def release(self) -> None:
        """Restore the layers of the model, and its assistant, as before the session; ``stop`` does so."""
        release_layers(self.model, self._holder)
        if self._lent is not None:
            self._lent.end()

    @property
    def _holder(self) -> str:
        return f"session {id(self)}"

    def add_request(
        self,
        input_ids: list[int],
        *args: Any,
        cache_salt: str = "",
        agent_turn: AgentTurn | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Add a request as transformers does, with a salt and optionally an agent's session.

        Args:
            input_ids: Tokens of the prompt.
            args: As in transformers.
            cache_salt: Only requests with the same salt share pages.
            agent_turn: A new turn of the session that holds the pages of the request after its end.
            kwargs: As in transformers.

        Raises:
            ArgumentError: ``input_ids`` is no list, is empty, has one token while ``num_return_sequences`` is
                above 1, or has what is no int or has no row in the model's embedding; or the salt is no
                string, or the turn is no ``AgentTurn``.
        """
        expect_prompt(input_ids, 2 if self.num_return_sequences > 1 else 1, self.model)
        expect_salt(cache_salt, "cache_salt")
        if agent_turn is not None and not isinstance(agent_turn, AgentTurn):
            raise ArgumentError(f"agent_turn must be an AgentTurn, got {agent_turn!r}")
        if cache_salt:
            kwargs[SALT] = cache_salt
        if agent_turn is not None:
            kwargs[TURN] = agent_turn
        name: str | None = super().add_request(input_ids, *args, **kwargs)
        return name

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Join as transformers does, but wake the thread, which else waits up to a tenth of a second."""
        self._wake_up_loop.set()
        super().join(stop_trigger_time, timeout)

    def report(self) -> BatchReport:
        """Report of the present pages, requests and counts; no pages before the session begins."""
        cache, processor, layers = self._cache, self.batch_processor, report_layers(self.model).summary()
        of_layers = {
            name: layers[name] for name in ("batch_invariant", "packed_bytes", "not_invariant", "not_packed")
        }
        of_layers["smoothing"] = self._smoothing
        if cache is None:
            return BatchReport(self._kv, self._format.page_size, **of_layers)
        scheduler = None if processor is None else processor.scheduler
        return BatchReport(
            kv=self._kv,
            waiting=0 if scheduler is None else len(scheduler.waiting_requests),
            running=0 if scheduler is None else len(scheduler.active_requests),
            **cache.counts(),
            **of_layers,
        )

    @property
    def most_positions(self) -> int | None:
        """Largest length of a request that does not change the RoPE of others; ``None`` for any."""
        rope = dynamic_rope(self.model)
        return None if rope is None else rope.limit

    def tokens_found(self, request_id: str) -> int:
        """Number of tokens of a running request's prompt whose pages were found; 0 if it holds no pages."""
        return 0 if self._cache is None else self._cache.requests.tokens_found(request_id)

    def page_map(self) -> PageMap:
        """Map of the pages and their holders; empty before the session begins."""
        return PageMap((), ()) if self._cache is None else self._cache.requests.page_map()

    def why(self, input_ids: Sequence[int], salt: str = "") -> list[Miss]:
        """Reasons why a request would not find full pages of a text now; empty if it would find all.

        A store below is asked, too, as in ``KVPool.why``.

        Args:
            input_ids: Tokens of the prompt; the last one is always computed.
            salt: Its ``cache_salt``.

        Raises:
            ArgumentError: ``salt`` is no string.
            StateError: events are not recorded.
        """
        expect_salt(salt)
        prefixes = self._cache_to_record().requests.prefixes
        misses = self._why(input_ids[:-1], prefixes.scope(salt))
        below: Any = prefixes.main.below
        return list(below.misses(misses, input_ids[:-1], scope_of(salt))) if misses and below else misses

    def _recorded(self) -> Recorded:
        cache = self._cache_to_record()
        requests, main, states = cache.requests, cache.requests.groups[0], cache.requests.prefixes.states
        own = main.pages.pool, main.tree, requests.tables, cache.bytes_per_sector, requests.lock
        return Recorded(*own, None if states is None else states.record)

    def _cache_to_record(self) -> BatchCache:
        """The cache of the session, made now if there is none."""
        with self._making:
            if self._cache is None:
                self._cache = self._make_cache()
            return self._cache

    def _generation_step(self) -> None:
        """Compute a step as transformers does, with ``stepped`` as the model."""
        self.batch_processor._generation_step(self.stepped)

    def _create_batch_processor(self) -> Any:
        """Make a processor as transformers does, with our cache and scheduler."""
        if isinstance(self.batch_processor, VerifyingProcessor):
            self.batch_processor.reset()
            return self.batch_processor
        config = self.continuous_batching_config
        with self._making:
            if self._has_begun:
                self._cache = None
            cache, self._has_begun = self._cache_to_record(), True
        config.num_blocks, config.max_batch_tokens = cache.max_pages, cache.max_batch_tokens
        config.max_requests_per_batch = min(config.max_requests_per_batch, cache.max_batch_tokens)
        self._use_prefix_sharing = cache.use_prefix_sharing
        scheduler = scheduler_class(config.scheduler_type)(
            cache=cache,
            safety_margin=config.safety_margin,
            max_requests_per_batch=config.max_requests_per_batch,
        )
        processor = VerifyingProcessor(
            cache=cache,
            config=text_config_of(self.model),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        scheduler.fail = processor._handle_request_error
        scheduler.most_positions = self.most_positions
        if self._drafts is not None:
            scheduler.drafter = drafter = Drafter(cache.requests, cache.assistant)
            if self._stateful is not None:
                scheduler.most_drafted = max(MOST, config.max_requests_per_batch)
            processor.note_time, processor.note_drafts = drafter.costs.note, drafter.note
        return processor

    def _make_cache(self) -> BatchCache:
        self.agents.lose_all("the session of the server began again")
        config, model, text = self.continuous_batching_config, self.model, text_config_of(self.model)
        max_pages, max_batch_tokens = config.num_blocks, config.max_batch_tokens or MAX_BATCH_TOKENS
        count = min(config.max_requests_per_batch, max_batch_tokens)
        limits = Limits(self._layers, self._format, count, max_batch_tokens)
        if max_pages is None:
            free = free_bytes(model.device)
            # If free memory is unknown, pages for 64 requests of the model's longest text.
            longest = getattr(text, "max_position_embeddings", None) or 4096
            max_pages = 64 * -(-longest // config.page_size)
            if free is not None:
                specs = [x for own in self._specs.values() for x in own]
                room, own_bytes = free * config.max_memory_percent, page_bytes(self._layers, self._format)
                if self._lent is not None:  # a page of the assistant beside each of the session
                    room *= own_bytes / (own_bytes + self._lent.page_bytes)
                most_drafted = 0 if self._drafts is None else MOST
                limits, max_pages = limits.fitted(int(room), specs, most_drafted)
                config.max_requests_per_batch = limits.num_requests
        cache = BatchCache(
            text,
            limits,
            model.device,
            max_pages=max_pages,
            share=self._share,
            policy=self._policy,
            watch=self._watch,
            stateful=self._stateful,
            states=self._make_states(max_pages) if self._share and self._stateful is not None else None,
            agents=self.agents,
            cuts=self._make_cuts(max_batch_tokens),
        )
        if self._lent is not None:
            cache.assistant = self._lent.assistant(max_pages, limits, self._share, self._policy)
        self._put_below(cache)
        return cache

    def _make_cuts(self, max_batch_tokens: int) -> Cuts | None:
        """Where texts are cut for mixers, if there are any and the session is batch invariant."""
        if self._stateful is None or not self._wish.batch_invariant:
            return None
        return Cuts.of(self._interval, max_batch_tokens, self.num_return_sequences > 1)

    def _make_states(self, max_pages: int) -> PoolStates:
        """Pages of findable recurrent states, in half the bytes of pages, at least for eight texts."""
        model, size, specs = self.model, self._format.page_size, self._specs
        nbytes = max_pages * page_bytes(self._layers, self._format) // STATES_SHARE
        return PoolStates(specs, size, self._interval, max(nbytes, least_bytes(specs, size)), model.device)
