"""``KvloomConnector``: prefixes that outlive vLLM's process, in the stores of ``kvloom.store``.

vLLM makes a connector in the scheduler's process and in each worker, and calls it in every step.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvloom.core.specs import QuantSpec
from kvloom.core.spelling import Kind
from kvloom.errors import ConfigError, UnsupportedError
from kvloom.integrations.vllm import blocks
from kvloom.integrations.vllm.backend import BITS
from kvloom.integrations.vllm.blocks import Blocks, Group
from kvloom.integrations.vllm.options import Options
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.integrations.vllm.residual import SUFFIX
from kvloom.integrations.vllm.storing.identity import identify
from kvloom.integrations.vllm.storing.metrics import COUNTS, ConnectorMetrics, Stats
from kvloom.integrations.vllm.storing.mover import Mover
from kvloom.integrations.vllm.storing.planner import Planner, TransferPlan
from kvloom.integrations.vllm.storing.recurrent import StateGroups, States, spec_of, state_groups
from kvloom.integrations.vllm.storing.watch import WeightWatch, model_of
from kvloom.store import Fingerprint, KVStore
from kvloom.store.backends import store_url
from kvloom.store.sums import read_sums
from kvloom.store.transfer import digest_of

_OPTIONS: Final = ("store", "max_bytes", "max_age", "keep_text", "timeout", "max_queued", "mode", "key_file")
_GUESSES: Final = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation without keys and values of their own, which a store would not have."""


@dataclass(slots=True)
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """A message from the scheduler's connector to those of the workers."""

    plan: TransferPlan = field(default_factory=TransferPlan)


@dataclass(slots=True)
class _Smoothed(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A message from a worker's connector to the scheduler's: digest of the smoothing of keys."""

    digest: str


class _Aside(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A message from a worker's connector to the scheduler's: its model has changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "_Aside":
        """The same message for several ranks."""
        return self


class KvloomConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Reads prefixes from a store while other requests are computed, and writes new ones in the background.

    Its options (``kv_connector_extra_config``) are ``store``, a URL, a folder or a list of these, and the
    arguments of ``KVStore``.

    Raises:
        ConfigError: an option is unknown, or has an invalid value.
        UnsupportedError: pages of this engine cannot be stored.
    """

    _cache_hit_source = CacheHitSource.DISK
    _planner: Planner  # in the scheduler's process only

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                f"pipeline_parallel_size must be 1 with a store, got {parallel.pipeline_parallel_size}"
            )
        speculation = vllm_config.speculative_config
        if speculation is not None and speculation.method not in _GUESSES:
            raise UnsupportedError(
                f"speculative_config.method must be one of {_GUESSES} with a store, got "
                f"{speculation.method!r}"
            )
        _refuse_residuals(kv_cache_config)
        every = kv_cache_config.kv_cache_groups
        self._states = state_groups(vllm_config, every)
        recurrent = () if self._states is None else self._states.numbers
        attending = [group for number, group in enumerate(every) if number not in recurrent]
        self._groups = [_group(group) for group in attending]
        self._fingerprint = _fingerprint(vllm_config, attending, self._groups, self._states)
        size = blocks.page_size(self._groups)
        if self._states is not None and size % self._states.block_size:
            raise UnsupportedError(
                f"blocks of attention must have a multiple of the {self._states.block_size} tokens in blocks "
                f"of recurrent layers for a store, got {size}"
            )
        self._reported: dict[str, int] = {}
        self._mover: Mover | None = None
        transfer = self._kv_transfer_config
        # Only the first rank writes, so only it removes files beyond the limits.
        is_first = role == KVConnectorRole.WORKER and get_tp_group().rank_in_group == 0
        self._store = _store(transfer.kv_connector_extra_config or {}, is_first and transfer.is_kv_producer)
        if role == KVConnectorRole.SCHEDULER:
            self._planner = Planner(
                self._store,
                self._fingerprint,
                size,
                transfer.is_kv_consumer,
                transfer.is_kv_producer,
                self._states,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False, since tokens that are not written are computed again."""
        return False

    # In the scheduler's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens that a store has after the computed ones; ``None`` if it is not known yet."""
        found = self._planner.match(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request."""
        self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of this step: pages to read and to write."""
        scheduled, state = scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
        offers = {} if state is None else state.boundary_state_offloads
        return _Metadata(self._planner.plan(scheduled, self._kv_cache_manager.get_block_ids, offers))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in failed reads, and whether the model has changed."""
        if connector_output.kv_connector_worker_meta is not None:
            self._planner.set_aside()
        self._planner.failed(set(connector_output.failed_recving or ()))

    def reset_cache(self) -> bool:
        """Forget found prefixes, and compare all weights before the next read.

        The store keeps its pages, which other engines use, too; pages are found by the weights that computed
        them.
        """
        self._planner.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks can be freed, since pages to be written were copied."""
        self._planner.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same as ``request_finished``, for several groups."""
        return self.request_finished(request, [])

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take in the digest of key smoothing, which workers calibrated when they loaded their model."""
        for said in metadata.values():
            if isinstance(said, _Smoothed):
                self._planner.know(replace(self._fingerprint, smoothing=said.digest))

    # In each worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the pages of all layers.

        Raises:
            UnsupportedError: pages of a layer are not kvloom's.
        """
        config = self._vllm_config
        known, layers, smoothed = config.compilation_config.static_forward_context, {}, {}
        recurrent = () if self._states is None else self._states.layers
        stateful = {name for names in recurrent for name in names}
        for name, memory in kv_caches.items():
            if name in stateful:
                continue
            impl = known[name].impl
            if not getattr(impl, "is_kvloom", False):
                raise UnsupportedError(
                    f"pages must be kvloom's in all layers for a store, got vLLM's in {name}"
                )
            _, quant = _kept(config, impl.kv_quant_mode, impl.head_size)
            layers[_number(name)] = PageFormat.heads(impl.head_size, config.model_config.dtype, quant).view(
                memory
            )
            smoothed[_number(name)] = impl.smoothing
        digest = digest_of([smoothing for _, smoothing in sorted(smoothed.items())])
        self._fingerprint = replace(self._fingerprint, smoothing=digest)
        ranks = get_tp_group()
        mine = None
        heads = self._fingerprint.layers[0].heads
        if ranks.world_size > 1:
            mine = blocks.heads_of(heads, ranks.rank_in_group, ranks.world_size)
        own = Blocks(self._fingerprint, mine or range(heads), self._groups, layers)
        states = None
        if self._states is not None:
            whose = self._states.fingerprint(self._fingerprint)
            states = States(whose, [[known[name].kv_cache for name in names] for names in recurrent])
        self._mover = Mover(
            self._store,
            self._fingerprint,
            own,
            mine,
            ranks if ranks.world_size > 1 else None,
            WeightWatch(model_of(known[next(iter(kv_caches))])).is_changed,
            states,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Message with the digest of key smoothing."""
        return _Smoothed(self._fingerprint.smoothing)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the reads of this step."""
        if self._mover is not None:
            self._mover.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, since requests wait for all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, since layers are saved together."""

    def wait_for_save(self) -> None:
        """Copy the tokens that this step computed, to be written in the background."""
        if self._mover is not None:
            self._mover.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose reads ended since the last call, and those that were not read completely."""
        if self._mover is None:
            return KVConnectorTransferResults()
        done, failed = self._mover.finished(self._plan.is_idle)
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Message if the model of this rank has changed, else ``None``."""
        return _Aside() if self._mover is not None and self._mover.is_aside else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call, in the scheduler's process or in a rank."""
        counted = [tier.counts for tier in self._store.tiers]
        if self._mover is not None:
            counted.append(self._mover.counts)
        totals = {name: sum(counts[name] for counts in counted) for name in COUNTS}
        if self._mover is not None and get_tp_group().rank_in_group:  # ranks have parts of the same tokens
            totals = {name: total for name, total in totals.items() if not name.startswith("tokens_")}
        new = {name: total - self._reported.get(name, 0) for name, total in totals.items()}
        self._reported = totals
        return Stats(new) if any(new.values()) else None

    def shutdown(self) -> None:
        """Wait until everything is read and written."""
        if self.role == KVConnectorRole.SCHEDULER:
            self._planner.close()
        if self._mover is not None:
            self._mover.close()
        self._store.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "Stats":
        """Counts that another process sent."""
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> "ConnectorMetrics":
        """Counters of the server's ``/metrics``."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _plan(self) -> TransferPlan:
        metadata: _Metadata = self._get_connector_metadata()
        return metadata.plan


def _store(options: dict[str, Any], is_limited: bool) -> KVStore:
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(f"kv_connector_extra_config must have {', '.join(_OPTIONS)} only, got {name!r}")
    named = options.get("store")
    texts = [named] if isinstance(named, str) else named
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"kv_connector_extra_config.store must be a URL or a list of them, got {named!r}")
    rest = {name: value for name, value in options.items() if name != "store"}
    if not is_limited:
        rest = {name: value for name, value in rest.items() if name not in ("max_bytes", "max_age")}
    key = read_sums(rest.pop("key_file", None)).key
    return KVStore(*map(store_url, texts), key=key, **rest)


def _fingerprint(config: Any, own: list[Any], groups: list[Group], states: StateGroups | None) -> Fingerprint:
    model, parallel = config.model_config, config.parallel_config
    ranks, layers = parallel.tensor_parallel_size, {}
    total = model.get_total_num_kv_heads()
    for group in own:
        for name in group.layer_names:
            spec = spec_of(group, name)
            kind, quant = _kept(config, spec.kv_quant_mode, spec.head_size)
            heads = total if max(1, total // ranks) == spec.num_kv_heads else spec.num_kv_heads * ranks
            number = _number(name)
            if number in layers:
                raise UnsupportedError(f"layers must have a number each for a store, got {number} twice")
            rotation = "none" if kind is None else kind.rotate
            layers[number] = blocks.layer_format(heads, spec.head_size, model.dtype, quant, rotation)
    recurrent = [] if states is None else [_number(name) for names in states.layers for name in names]
    if (found := sorted({*layers, *recurrent})) != list(range(len(found))):
        raise UnsupportedError(
            f"all layers must have keys and values or states for a store, got layers {found}"
        )
    formats = tuple(layers[number] for number in sorted(layers))
    attention = blocks.attention_text(groups) + (" beside recurrent layers of vLLM's" if recurrent else "")
    return identify(config, attention, formats)


def _group(group: Any) -> Group:
    specs = [spec_of(group, name) for name in group.layer_names]
    for spec in specs:
        if isinstance(spec, MLAAttentionSpec):
            raise UnsupportedError(
                "pages must be keys and values for a store: a store has no latents of vLLM's"
            )
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise UnsupportedError(
                f"pages must be of decoder attention for a store, got {type(spec).__name__}"
            )
    first = specs[0]
    window = first.sliding_window if type(first) is SlidingWindowSpec else None
    return Group(tuple(map(_number, group.layer_names)), first.block_size, window)


def _kept(config: Any, mode: Any, head_dim: int) -> tuple[Kind | None, QuantSpec | None]:
    """Kind and quantization of a layer's pages; ``None`` for both if they are not quantized."""
    bits = BITS.get(mode)
    if bits is None:
        return None, None
    options = Options.of(config.additional_config)
    return options.kind(bits, head_dim), options.quant(bits, head_dim)


def _refuse_residuals(kv_cache_config: Any) -> None:
    """Refuse residual windows, which a store does not have, so a prefix that is read would not have them.

    Raises:
        UnsupportedError: there is a residual window.
    """
    for group in kv_cache_config.kv_cache_groups:
        if any(name.endswith(SUFFIX) for name in group.layer_names):
            window = spec_of(group, group.layer_names[0]).sliding_window
            raise UnsupportedError(f"kvloom.recent must be 0 with a store, got {window}")


def _number(name: str) -> int:
    """The number of a layer in a name such as ``model.layers.3.self_attn.attn``."""
    found = re.findall(r"(?<=\.)\d+(?=\.)", name)
    if len(found) != 1:
        raise UnsupportedError(f"layers must have one number in their names for a store, got {name!r}")
    return int(found[0])
