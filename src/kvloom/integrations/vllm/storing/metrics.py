"""Counters of a connector, in vLLM's log and in its server's ``/metrics``."""

from collections import Counter
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTS: Final = {
    "tokens_loaded": "Tokens that were read from a store.",
    "tokens_failed": "Tokens that a store listed and did not give; they are computed.",
    "tokens_saved": "Tokens that were copied to be written.",
    "tokens_dropped": "Tokens for which the queue of what is to be written had no room.",
    "bytes_read": "Bytes that were read from stores and verified.",
    "bytes_written": "Bytes that were written to stores.",
    "damaged": "Runs that were damaged, and moved to the quarantine.",
    "runs_evicted": "Runs that were removed since a limit was reached.",
}
"""Names of the counters with their documentation; each counts all ranks together."""


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counts of some interval of time."""

    def reset(self) -> None:
        """Clear all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        """Sums of these counts and another's."""
        return Stats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Counts to log, without zeros."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus counters of each engine, such as ``vllm:kvloom_tokens_loaded_total``."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTS.items():
            counter = self._counter_cls(name=f"vllm:kvloom_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = create_metric_per_engine(counter, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an engine."""
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
