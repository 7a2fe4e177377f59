"""Benchmarks of attention on the CPU: a small case beside peers, of which missing ones are named."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvloom.ops.impl import cpu

pytest.importorskip("transformers")

# Peers that happen to be installed may warn.
pytestmark = [
    pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.compile
def test_attention_on_the_cpu_is_timed_beside_memory_and_peers(quick: Callable[..., Any]) -> None:
    cores = os.sched_getaffinity(0)
    result = quick("attend_cpu", "--threads", "1", "--kinds", "bfloat16", "int8 g64", "--layout", "NHD")
    assert [x["kind"] for x in result["rows"]] == ["bfloat16", "int8 g64"]
    for row in result["rows"]:
        assert {"ours", "torch"} <= row["of_read_speed"].keys()
        assert all(x > 0 for x in row["of_read_speed"].values())
        assert all(x <= result["tolerance"][row["kind"]] for x in row["difference"].values())
    assert result["isa"] == cpu.ISA
    assert os.sched_getaffinity(0) == cores


@pytest.mark.compile
def test_peers_that_are_not_installed_are_named(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("onnxruntime", "openvino", "zentorch", "llama_cpp"):
        monkeypatch.setitem(sys.modules, module, None)
    result = quick("attend_cpu", "--threads", "1", "--kinds", "float32")
    assert [x.split(":")[0] for x in result["missing"]] == [
        "zentorch",
        "ONNX Runtime",
        "OpenVINO",
        "llama.cpp",
    ]
    assert result["rows"][0]["peer_over_ours"].keys() == {"torch", "torch, enable_gqa"}


def test_a_peer_with_another_answer_is_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, quick: Callable[..., Any]
) -> None:
    import attention_peers
    import problem

    some = problem.random_problem("float32", (4, 2, 8), stored=20, copies=2)
    right = attention_peers.torch_gqa(some)(0)
    wrong = attention_peers.Peer("wrong", ("torch",), lambda _: lambda i: right * (1 + i / 10))
    found, missing = attention_peers.prepare(some, right, [wrong, attention_peers.PEERS[0]])
    assert found.keys() == {"torch"}
    assert missing == {"wrong, float32": "differs by 0.1, 0.0001 allowed"}


def test_vllm_that_is_not_installed_is_named(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cpu_sections

    monkeypatch.setitem(sys.modules, "vllm", None)
    result = quick("vllm_cpu", "--kinds", "bfloat16", "int4 g64")
    assert result["missing"] == ["vLLM: not installed"]
    assert [x["case"] for x in result["rows"]] == ["2 x 200", "prompt of 96"]
    assert all(x["us"].keys() == {"bfloat16", "int4 g64"} and "of_vllm" not in x for x in result["rows"])
    text = cpu_sections.vllm_cpu_section(result)
    assert "Not measured: vLLM: not installed." in text
    assert f"| 2 x 200 |  | {result['rows'][0]['us']['bfloat16']:,.0f} |" in text


def test_every_cache_is_a_multiple_of_vllms_bfloat16(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import attention_peers
    import cpu_sections

    stand_in = attention_peers.Peer("vLLM", ("torch",), attention_peers.torch_gqa, ("bfloat16",))
    monkeypatch.setattr(attention_peers, "VLLM", stand_in)
    result = quick("vllm_cpu", "--layout", "NHD")
    assert result["missing"] == [] and result["threads"] == 1 and result["page"] == 128
    for row in result["rows"]:
        assert row["us"].keys() == {"vLLM", "bfloat16", "int8 g64", "int4 g64"}
        assert row["of_vllm"].keys() == {"bfloat16", "int8 g64", "int4 g64"}
    result["rows"] = [
        {"case": "1 x 8", "us": {"int4 g64": 1500, "vLLM": 3000}, "of_vllm": {"int4 g64": 0.504}}
    ]
    text = cpu_sections.vllm_cpu_section(result)
    assert "|  | vLLM bfloat16 | kvloom int4 g64 |\n" in text
    assert "| 1 x 8 | 3,000 | 1,500 (0.50) |" in text


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "threads"),
    [("prefill_cpu", ["--threads", "1"]), ("movement", ["--threads", "1"]), ("threads_cpu", [])],
)
def test_the_other_rows_of_the_cpu_run(quick: Callable[..., Any], name: str, threads: list[str]) -> None:
    rows = quick(name, *threads, "--kinds", "float32", "int4 g64")["rows"]
    assert {x["kind"] for x in rows} == {"float32", "int4 g64"}
