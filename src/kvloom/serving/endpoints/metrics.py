"""``GET /metrics``, in the text format of Prometheus."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvloom.integrations.transformers.session.report import BatchReport
from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.models import Model

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_BY_STATE: Final = (
    ("kvloom_pages", "Allocated pages by state.", ("free", "active", "evictable")),
    ("kvloom_requests", "Requests of the session by state.", ("waiting", "running")),
)

_GAUGES: Final = (
    ("kvloom_pages_limit", "Pages that there can be.", "max_pages"),
    ("kvloom_kept_pages", "Pages that sessions of agents hold, and no request does.", "kept"),
    ("kvloom_page_bytes", "Bytes of a page in all its layers.", "page_bytes"),
    ("kvloom_window_bytes", "Allocated for windows beside the pages.", "window_bytes"),
    ("kvloom_recent_bytes", "Allocated for residual windows beside the pages.", "recent_bytes"),
    ("kvloom_state_bytes", "Recurrent states of running requests.", "state_bytes"),
    ("kvloom_found_state_bytes", "Allocated for states that are found.", "found_state_bytes"),
    ("kvloom_page_tokens", "Tokens in a page.", "page_size"),
    ("kvloom_assistant_bytes", "Allocated for pages of an assistant.", "assistant.nbytes"),
    ("kvloom_packed_bytes", "Of packed weights, beside or instead of the others.", "packed_bytes"),
    ("kvloom_batch_invariant", "1 if company changes no bit of an answer.", "batch_invariant"),
)
"""Names, help texts, and fields of the report, or of the session, store or assistant by its name."""

_COUNTERS: Final = (
    ("kvloom_prompt_tokens", "Tokens of prompts that were looked up.", "tokens_asked"),
    ("kvloom_prompt_tokens_found", "Those that were found in pages.", "tokens_found"),
    ("kvloom_store_tokens_read", "Tokens that were read from a store.", "store.tokens_read"),
    ("kvloom_store_runs_saved", "Runs of pages given to a store.", "store.runs_saved"),
    ("kvloom_store_runs_dropped", "Runs that it was too slow for.", "store.runs_dropped"),
    ("kvloom_generated_tokens", "New tokens of all answers.", "session.num_new"),
    ("kvloom_computed_tokens", "Tokens that went through the model.", "tokens_computed"),
    ("kvloom_drafted_tokens", "Drafted tokens among them.", "tokens_drafted"),
    ("kvloom_accepted_tokens", "Drafted tokens that were chosen.", "tokens_accepted"),
    ("kvloom_assisted_tokens", "Those that an assistant had drafted.", "tokens_assisted"),
    ("kvloom_steps", "Forwards of the model.", "steps"),
    ("kvloom_preemptions", "How often a request lost its pages to others.", "preemptions"),
    ("kvloom_session_restarts", "How often the session died and began again.", "session.num_restarts"),
    ("kvloom_finished_requests", "Requests that ended in any way.", "finished"),
)
"""The same for counters."""


class Metrics:
    """Metrics of one server; those of a model have its name as the label ``model``.

    Args:
        models: Models of the server.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SessionCollector(models))
        self.first_token = Histogram(
            "kvloom_time_to_first_token_seconds",
            "From a request to its first new token.",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.responses = Counter(
            "kvloom_http_responses", "Responses by status.", ["status"], registry=self._registry
        )

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def counted(self, app: Any) -> Any:
        """ASGI application that counts the responses of ``app``."""

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            async def counted_send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self.responses.labels(str(message["status"])).inc()
                await send(message)

            await app(scope, receive, counted_send)

        return counting


class _SessionCollector(Collector):
    """Collector of the counts of sessions, read at each scrape."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        """All metrics, each for all models."""
        reports = [(model.name, model.session.report(), model.session) for model in self._models]
        for name, help, states in _BY_STATE:
            by_state = GaugeMetricFamily(name, help, labels=["model", "state"])
            for model, report, _ in reports:
                for state in states:
                    by_state.add_metric([model, state], getattr(report, state))
            yield by_state
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, field in rows:
                family: Any = kind(name, help, labels=["model"])
                for model, report, session in reports:
                    family.add_metric([model], _value(report, session, field))
                yield family


def _value(report: BatchReport, session: ServingSession, field: str) -> float:
    """Value of a field; 0 for a field of a missing store or assistant."""
    owner, _, name = field.rpartition(".")
    if owner in ("store", "assistant"):
        return float(getattr(report, owner).get(name, 0))
    return float(getattr(session if owner == "session" else report, name))
