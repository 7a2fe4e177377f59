"""``GET /metrics``, in the text format of Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvloom.serving.session import Session

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counts of one server.

    Args:
        session: Whose.
    """

    def __init__(self, session: Session) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SessionCollector(session))
        self.first_token = Histogram(
            "kvloom_time_to_first_token_seconds",
            "From a request to its first new token.",
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
        """An ASGI application whose responses are counted."""

        async def counting(scope: Any, receive: Any, send: Any) -> None:
            async def counted_send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self.responses.labels(str(message["status"])).inc()
                await send(message)

            await app(scope, receive, counted_send)

        return counting


class _SessionCollector(Collector):
    """Counters of a session, read when Prometheus asks."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def collect(self) -> Iterator[Any]:
        """All metrics of the session."""
        report = self._session.report()
        pages = GaugeMetricFamily("kvloom_pages", "Allocated pages by state.", labels=["state"])
        for state in ("free", "active", "evictable"):
            pages.add_metric([state], getattr(report, state))
        yield pages
        requests = GaugeMetricFamily("kvloom_requests", "Requests of the session by state.", labels=["state"])
        for state in ("waiting", "running"):
            requests.add_metric([state], getattr(report, state))
        yield requests
        for name, help, value in (
            ("kvloom_pages_limit", "Pages that there can be.", report.max_pages),
            ("kvloom_page_bytes", "Bytes of a page in all its layers.", report.page_bytes),
            ("kvloom_window_bytes", "Allocated for windows beside the pages.", report.window_bytes),
            ("kvloom_recent_bytes", "Allocated for residual windows beside the pages.", report.recent_bytes),
            ("kvloom_state_bytes", "Recurrent states of running requests.", report.state_bytes),
            ("kvloom_found_state_bytes", "Allocated for states that are found.", report.found_state_bytes),
            ("kvloom_page_tokens", "Tokens in a page.", report.page_size),
            (
                "kvloom_packed_bytes",
                "Of packed weights, beside or instead of the others.",
                report.packed_bytes,
            ),
            ("kvloom_batch_invariant", "1 if company changes no bit of an answer.", report.batch_invariant),
        ):
            yield GaugeMetricFamily(name, help, value)
        stored = report.store
        for name, help, value in (
            ("kvloom_prompt_tokens", "Tokens of prompts that were looked up.", report.tokens_asked),
            ("kvloom_prompt_tokens_found", "Those that were found in pages.", report.tokens_found),
            ("kvloom_store_tokens_read", "Tokens that were read from a store.", stored.get("tokens_read", 0)),
            ("kvloom_store_runs_saved", "Runs of pages given to a store.", stored.get("runs_saved", 0)),
            ("kvloom_store_runs_dropped", "Runs that it was too slow for.", stored.get("runs_dropped", 0)),
            ("kvloom_generated_tokens", "New tokens of all answers.", self._session.num_new),
            ("kvloom_computed_tokens", "Tokens that went through the model.", report.tokens_computed),
            ("kvloom_steps", "Forwards of the model.", report.steps),
            ("kvloom_preemptions", "How often a request lost its pages to others.", report.preemptions),
            (
                "kvloom_session_restarts",
                "How often the session died and began anew.",
                self._session.num_restarts,
            ),
            ("kvloom_finished_requests", "Requests that ended in any way.", report.finished),
        ):
            yield CounterMetricFamily(name, help, value)
