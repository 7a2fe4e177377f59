"""compose.yaml, the Dockerfile and Prometheus's configuration say the same; nothing is built here."""

import re
from pathlib import Path

import pytest

from kvloom.cli import _parser

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]


def test_each_service_is_a_target_with_options_that_the_command_has() -> None:
    text = (ROOT / "containers" / "Dockerfile").read_text(encoding="utf-8")
    targets = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert {x["build"]["target"] for x in SERVICES.values()} <= {*targets}
    args = _parser().parse_args(["serve", "--host", "0.0.0.0", *SERVICES["server"]["command"]])
    assert args.store == ["redis://redis:6379/0"] and "redis" in SERVICES["server"]["depends_on"]
    assert {x.rpartition(":")[0] for service in SERVICES.values() for x in service.get("ports", ())} == {
        "127.0.0.1:8000", "127.0.0.1:9090"
    }  # fmt: skip


def test_prometheus_has_the_key_and_the_address_of_the_server() -> None:
    read = yaml.safe_load((ROOT / "containers" / "prometheus.yml").read_text(encoding="utf-8"))
    [job] = read["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert job["authorization"]["credentials"] == SERVICES["server"]["environment"]["KVLOOM_API_KEY"]
