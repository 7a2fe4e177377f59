"""``GET /metrics`` as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from oracles.serving import PROMPT, Served, served
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("int8,recent=16") as running:
        yield running


def read(server: Served) -> dict[tuple[str, str], float]:
    """Samples by name and label."""
    status, text = server.send("GET", "/metrics")
    assert status == 200
    return {
        (sample.name, "".join(x for name, x in sample.labels.items() if name != "model")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_count_what_was_asked(server: Served) -> None:
    before = read(server)
    with server.client() as client:
        answers = [
            client.completions.create(model="bundled", prompt=PROMPT, max_tokens=5, n=2) for _ in range(2)
        ]
        with pytest.raises(Exception, match="404"):
            client.completions.create(model="other", prompt=PROMPT)
    server.until(active=0)
    after, report = read(server), server.session.report()

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0)

    usages = [answer.usage for answer in answers]
    assert all(usage is not None for usage in usages)
    assert grown("kvloom_generated_tokens_total") == sum(x.completion_tokens for x in usages if x) == 20
    assert grown("kvloom_time_to_first_token_seconds_count") == 2
    assert grown("kvloom_http_responses_total", "200") == 3  # one reading of the metrics among them
    assert grown("kvloom_http_responses_total", "404") == 1
    assert grown("kvloom_prompt_tokens_total") == 2 * sum(x.prompt_tokens for x in usages if x)
    assert grown("kvloom_prompt_tokens_found_total") == report.tokens_found > 0
    assert grown("kvloom_finished_requests_total") == 4
    assert after["kvloom_preemptions_total", ""] == 0 and after["kvloom_steps_total", ""] == report.steps
    assert after["kvloom_pages_limit", ""] == 256 and after["kvloom_page_tokens", ""] == 16
    assert after["kvloom_recent_bytes", ""] == report.recent_bytes > 0
    assert after["kvloom_state_bytes", ""] == after["kvloom_found_state_bytes", ""] == 0
    assert (after["kvloom_batch_invariant", ""], after["kvloom_packed_bytes", ""]) == (1, 0)
    pages = {state: after["kvloom_pages", state] for state in ("free", "active", "evictable")}
    assert pages == {"free": report.free, "active": 0, "evictable": report.evictable}
    assert sum(pages.values()) == report.num_pages and report.evictable > 0
    assert after["kvloom_requests", "waiting"] == after["kvloom_requests", "running"] == 0
