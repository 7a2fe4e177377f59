"""Prefixes that outlive vLLM: found by the next engine, after damage, and by other integrations."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from integrations.vllm.engines import (
    INT4,
    INT8,
    Engine,
    needs_vllm,
    prompts,
    random_model,
    tokens_of,
    tokens_of_child,
)
from integrations.vllm.test_models import hybrid, window

from kvloom.errors import ArgumentError, ConfigError, UnsupportedError
from kvloom.models import bundled_model_path

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 32
DRAFT = {"method": "draft_model", "model": str(bundled_model_path()), "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def int8() -> list[list[int]]:
    return tokens_of(kv_cache_dtype=INT8)


def on(folder: Path | str, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    """Arguments of an engine with a store."""
    transfer = {
        "kv_connector": "KvloomConnector",
        "kv_connector_module_path": "kvloom.integrations.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(folder), **options},
    }
    return {
        "kv_cache_dtype": INT8,
        "block_size": BLOCK,
        "kv_transfer_config": transfer,
        "disable_log_stats": False,
    }


def counts(engine: Engine) -> dict[str, int]:
    """What the connectors of an engine counted, the one that schedules and the one that works."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    total = Counter[str]()
    for connector in (
        get_kv_transfer_group(),
        engine.llm.llm_engine.engine_core.engine_core.scheduler.connector,
    ):
        connector.get_kv_connector_stats()
        total += Counter(connector._reported)
    return total


def whole_pages(texts: list[str], engine: Engine, page_size: int = BLOCK) -> int:
    """Tokens of prompts that may be read: the last token is computed."""
    tokenizer = engine.llm.get_tokenizer()
    return sum((len(tokenizer(text).input_ids) - 1) // page_size * page_size for text in texts)


def test_the_next_engine_reads_what_one_computed(int8: list[list[int]], tmp_path: Path) -> None:
    with closing(Engine(**on(tmp_path))) as engine:
        assert engine.tokens(prompts()) == int8
    with closing(Engine(**on(tmp_path))) as engine:
        found = engine.run(prompts())
        assert [list(request.outputs[0].token_ids) for request in found] == int8
        assert sum(request.num_cached_tokens for request in found) == whole_pages(prompts(), engine)
        assert counts(engine)["tokens_loaded"] > 0 and counts(engine)["tokens_failed"] == 0


def test_a_damaged_run_is_computed_told_and_rewritten(
    int8: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Engine(**on(tmp_path))) as engine:
        engine.run(prompts(), 1)
    files = sorted(tmp_path.glob("*/*.safetensors"))
    flipped, cut, foreign, other, *_ = files
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    foreign.write_bytes(other.read_bytes())
    with closing(Engine(**on(tmp_path))) as engine:
        assert engine.tokens(prompts()) == int8
        assert counts(engine)["damaged"] == 3 and counts(engine)["tokens_failed"] > 0
    assert "damaged run, which is not used" in caplog.text
    assert len(list((tmp_path / "quarantine").iterdir())) == 3
    assert {file.name for file in files} <= {file.name for file in tmp_path.glob("*/*.safetensors")}
    with closing(Engine(**on(tmp_path))) as engine:
        found = engine.run(prompts())
        assert [list(request.outputs[0].token_ids) for request in found] == int8
        assert sum(request.num_cached_tokens for request in found) == whole_pages(prompts(), engine)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_two_ranks_read_what_one_computed_and_the_other_way_round(
    int8: list[list[int]], tmp_path: Path
) -> None:
    with closing(Engine(**on(tmp_path / "store"))) as engine:
        engine.run(prompts()[:6], 1)
    files = list((tmp_path / "store").glob("*/*.safetensors"))
    for file in files:
        os.utime(file, (1, 1))
    ranks = {"tensor_parallel_size": 2, **on(tmp_path / "store")}
    assert tokens_of_child(ranks, tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1") == int8
    assert files and all(file.stat().st_mtime > 1 for file in files)  # which are read are touched
    with closing(Engine(**on(tmp_path / "store"))) as engine:
        found = engine.run(prompts())
        assert [list(request.outputs[0].token_ids) for request in found] == int8
        assert sum(request.num_cached_tokens for request in found) == whole_pages(prompts(), engine)


@pytest.mark.parametrize(
    ("kind", "kv", "options"),
    [
        (INT8, "int8", {}),
        (INT8, "int8,smooth=none", {"kvloom": {"smooth": "none"}}),
        (INT4, "int4,recent=0", {"kvloom": {"recent": 0}}),
    ],
    ids=["int8", "unsmoothed", "int4"],
)
def test_a_pool_of_transformers_has_the_codes_of_vllm(
    kind: str, kv: str, options: dict[str, Any], int8: list[list[int]], tmp_path: Path
) -> None:
    import torch

    from kvloom.integrations.transformers import KVPool, load_model
    from kvloom.integrations.transformers.pool.identity import fingerprint_of
    from kvloom.store import KVStore
    from kvloom.store.transfer import pack_pages

    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    tokens = tokenizer(prompts()[1], return_tensors="pt").input_ids
    arguments = {**on(tmp_path), "kv_cache_dtype": kind, "additional_config": options}
    with closing(Engine(**arguments)) as engine:
        engine.run(prompts()[1:2], 1)
    wanted = (tokens.shape[1] - 1) // BLOCK * BLOCK
    fingerprint = fingerprint_of(model, kv)
    with KVStore(f"file://{tmp_path}") as store:
        (piece,) = store.load(fingerprint, "", tokens[0, :wanted].tolist())
    sizes = {"kv": kv, "max_tokens": 4096, "page_size": BLOCK}
    with KVPool.for_model(model, **sizes, store=f"file://{tmp_path}") as pool:
        cache = pool.begin(tokens)
        assert cache.get_seq_length() == wanted
        ids = [ref.id for ref in cache.sequences[0].tables[0].pages]
        assert pack_pages(cache.sequences[0].pages, ids, fingerprint) == piece.data
        logits = model(tokens[:, wanted:], past_key_values=cache).logits[0, -1]
    assert int(logits.argmax()) == int8[1][0]


def test_vllm_reads_what_a_pool_of_transformers_computed(int8: list[list[int]], tmp_path: Path) -> None:
    import torch

    from kvloom.integrations.transformers import KVPool, load_model

    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    with KVPool.for_model(model, kv="int8", max_tokens=16384, store=f"file://{tmp_path}") as pool:
        for text in prompts():
            tokens = tokenizer(text, return_tensors="pt").input_ids
            cache = pool.begin(tokens)
            pool.commit(
                cache, model.generate(tokens, past_key_values=cache, max_new_tokens=1, do_sample=False)
            )
    with closing(Engine(**on(tmp_path))) as engine:
        found = engine.run(prompts())
        assert [list(request.outputs[0].token_ids) for request in found] == int8
        assert sum(request.num_cached_tokens for request in found) == whole_pages(prompts(), engine)


def test_pages_of_other_smoothing_are_not_found(tmp_path: Path) -> None:
    loaded = []
    for smooth in ("none", "keys", "none"):
        config = {"kvloom": {"smooth": smooth}}
        with closing(Engine(**on(tmp_path), additional_config=config)) as engine:
            engine.run(prompts()[1:4], 1)
            loaded.append(counts(engine)["tokens_loaded"])
    assert loaded[:2] == [0, 0] and loaded[2] > 0


def test_a_producer_writes_and_a_consumer_reads(int8: list[list[int]], tmp_path: Path) -> None:
    texts = prompts()[:6]
    for _ in range(2):
        with closing(Engine(**on(tmp_path, "kv_producer"))) as engine:
            assert engine.tokens(texts, 1) == [tokens[:1] for tokens in int8[:6]]
            assert counts(engine)["tokens_loaded"] == 0
    files = set(tmp_path.glob("*/*.safetensors"))
    assert files
    with closing(Engine(**on(tmp_path, "kv_consumer"))) as engine:
        assert engine.tokens(prompts()) == int8
        assert counts(engine)["tokens_loaded"] == whole_pages(texts, engine)
        assert counts(engine)["tokens_saved"] == 0
    assert set(tmp_path.glob("*/*.safetensors")) == files


def test_guesses_from_the_text_change_nothing(int8: list[list[int]], tmp_path: Path) -> None:
    arguments = {**on(tmp_path / "store"), "speculative_config": NGRAM}
    assert tokens_of_child(arguments, tmp_path) == int8
    files = list((tmp_path / "store").glob("*/*.safetensors"))
    for file in files:
        os.utime(file, (1, 1))
    assert tokens_of_child(arguments, tmp_path) == int8
    assert any(file.stat().st_mtime > 1 for file in files)  # which are read are touched


def test_an_engine_with_overrides_finds_pages_of_its_own_function(
    int8: list[list[int]], tmp_path: Path
) -> None:
    changes = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}
    texts = prompts()[1:4]
    expected = tokens_of(texts=texts, kv_cache_dtype=INT8, **changes)
    assert expected != int8[1:4]
    with closing(Engine(**on(tmp_path))) as engine:
        engine.run(texts, 1)
    loaded = []
    for _ in range(2):
        with closing(Engine(**on(tmp_path), **changes)) as engine:
            assert engine.tokens(texts) == expected
            loaded.append(counts(engine)["tokens_loaded"])
            whole = whole_pages(texts, engine)
    assert loaded == [0, whole]


@pytest.mark.parametrize("kind", [window, hybrid], ids=lambda kind: kind.__name__)
def test_windows_and_groups_of_layers(kind: Any, tmp_path: Path) -> None:
    config, _ = kind()
    model = random_model(tmp_path / "model", config)
    arguments = {"model": model, **on(tmp_path / "store")}
    texts = prompts()[1::4]
    with closing(Engine(**arguments)) as engine:
        wanted = engine.tokens(texts)
    assert wanted == tokens_of(model, texts, kv_cache_dtype=INT8, block_size=BLOCK)
    with closing(Engine(**arguments)) as engine:
        found = engine.run(texts)
        assert [list(request.outputs[0].token_ids) for request in found] == wanted
        assert sum(request.num_cached_tokens for request in found) >= 0.9 * whole_pages(texts, engine)
        assert counts(engine)["tokens_failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kv_cache_dtype": "auto"}, UnsupportedError, "pages must be kvloom's in all layers for a store"),
        (
            on("store", bytes=1),
            ConfigError,
            "kv_connector_extra_config must have store, .* only, got 'bytes'",
        ),
        (on("ftp://x"), ArgumentError, "store must be a URL of file, .* got 'ftp://x'"),
        (
            {"speculative_config": DRAFT},
            UnsupportedError,
            r"speculative_config\.method must be one of .* with a store, got 'draft_model'",
        ),
        ({"load_format": "dummy"}, UnsupportedError, "load_format must be one of .* got 'dummy'"),
        (
            {"kv_cache_dtype": INT4},
            UnsupportedError,
            r"kvloom\.recent must be 0 with a store, got 64",
        ),
    ],
    ids=["float", "option", "url", "draft", "dummy", "residual"],
)
def test_what_cannot_be_stored_is_refused_at_start(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    try:
        with pytest.raises(error, match=message):
            Engine(**{**on(tmp_path), **arguments})
    finally:
        ensure_kv_transfer_shutdown()
