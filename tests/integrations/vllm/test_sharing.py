"""Servers that share a store: what one computed the other reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.vllm.engines import INT8, needs_vllm, tokens_of
from integrations.vllm.servers import server, with_store
from store.servers import NO_MOTO, s3_server

needs_vllm()
pytest.importorskip("openai")
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def int8() -> list[list[int]]:
    return tokens_of(kv_cache_dtype=INT8)


# moto is not imported: beside its Flask, whose proxies it looks into, vLLM starts no engine in this process.
@pytest.fixture(params=["folder", pytest.param("s3", marks=NO_MOTO)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield f"file://{tmp_path}/store"
        return
    pytest.importorskip("obstore")
    with s3_server() as bucket:
        yield bucket


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_a_second_server_finds_what_the_first_one_computed(
    int8: list[list[int]], url: str, tmp_path: Path
) -> None:
    options = with_store(url)
    with server(tmp_path / "1.txt", *options) as first, server(tmp_path / "2.txt", *options) as second:
        tokens, num_prompt = first.answers()
        assert tokens == int8
        time.sleep(3)  # it is written behind, and found within two seconds
        assert second.answers() == (int8, num_prompt)
        assert second.count("external_prefix_cache_hits") >= 0.95 * num_prompt
        assert second.count("kvloom_tokens_loaded") == second.count("external_prefix_cache_hits")
        assert second.count("kvloom_tokens_failed") == second.count("kvloom_damaged") == 0
