"""vLLM as it runs for others: workers of their own, tensor parallel, compiled, and its server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.vllm.engines import (
    INT8,
    child,
    needs_vllm,
    prompts,
    tokens_of,
    tokens_of_child,
)
from integrations.vllm.servers import Server, server

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

TWO_CORES = (os.cpu_count() or 1) > 1


@pytest.fixture(scope="module")
def int8() -> list[list[int]]:
    return tokens_of(kv_cache_dtype=INT8)


@pytest.mark.skipif(not TWO_CORES, reason="one core")
def test_two_ranks_give_the_tokens_of_one_in_float32(int8: list[list[int]], tmp_path: Path) -> None:
    arguments = {"kv_cache_dtype": INT8, "tensor_parallel_size": 2}
    assert tokens_of_child(arguments, tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1") == int8


def test_a_compiled_model_gives_the_tokens_of_an_eager_one(int8: list[list[int]], tmp_path: Path) -> None:
    found = tokens_of_child({"kv_cache_dtype": INT8, "enforce_eager": False}, tmp_path)
    assert sum(a == b for a, b in zip(found, int8, strict=True)) >= 10  # texts; it rounds otherwise


def test_speculation_changes_nothing(int8: list[list[int]], tmp_path: Path) -> None:
    guess = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    arguments = {"kv_cache_dtype": INT8, "speculative_config": guess}
    assert tokens_of_child(arguments, tmp_path) == int8


def test_switched_off_it_is_stock_vllm(tmp_path: Path) -> None:
    assert tokens_of_child({}, tmp_path, KVLOOM_VLLM="0") == tokens_of()


def test_a_plug_in_that_fails_ends_the_engine(tmp_path: Path) -> None:
    done = child({"kv_cache_dtype": INT8}, tmp_path, KVLOOM_ISA="none")
    assert done.returncode != 0 and "TOKENS" not in done.stdout
    assert "KVLOOM_ISA must be" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def int8_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One over int8 pages."""
    pytest.importorskip("openai")
    with server(tmp_path_factory.mktemp("server") / "log.txt") as started:
        yield started
    assert started.log.read_text().count("attends to pages of int8:g64") == 1


def test_the_server_answers_with_the_tokens_of_an_engine(int8_server: Server, int8: list[list[int]]) -> None:
    assert int8_server.answers()[0] == int8


def test_a_stream_is_the_answer_in_parts(int8_server: Server) -> None:
    arguments = {"model": "bundled", "prompt": prompts()[1], "temperature": 0, "max_tokens": 32}
    with int8_server.client() as client:
        whole = client.completions.create(**arguments).choices[0].text
        parts = [event.choices[0].text for event in client.completions.create(**arguments, stream=True)]
    assert len(parts) > 4 and "".join(parts) == whole
