"""Weights that change while an engine runs: nothing of the store is served or written for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.engines import INT8, Engine, needs_vllm, prompts, search_path, tokens_of
from integrations.vllm.test_connector import BLOCK, counts, on, whole_pages

from kvloom.models import bundled_model_path

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts()[1::3]


WITHOUT = {"kv_cache_dtype": INT8, "block_size": BLOCK}
"""Arguments of an engine with the same pages and no store."""


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    return tokens_of(texts=TEXTS, **WITHOUT)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the pages of all texts."""
    folder = tmp_path_factory.mktemp("store")
    with closing(Engine(**on(folder))) as engine:
        engine.run(TEXTS, 1)
    return folder


def trained(folder: Path, names: str) -> Path:
    """The bundled model with other weights where names end so."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(bundled_model_path(), folder)
    (file,) = folder.glob("*.safetensors")
    torch.manual_seed(0)
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(names):
            weights[name] = (weight.float() * (1 + 0.2 * torch.randn(weight.shape))).to(weight.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def files(store: Path) -> set[str]:
    return {file.name for file in store.glob("*/*.safetensors")}


def scale_in_place(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight.data.mul_(1.5)


@pytest.mark.parametrize("names", ["v_proj.weight", "layernorm.weight"])
def test_weights_that_are_loaded_again(
    names: str, stock: list[list[int]], store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained(tmp_path / "model", names)
    expected, before = tokens_of(model, TEXTS, **WITHOUT), files(store)
    assert expected != stock
    with closing(Engine(**on(store))) as engine:
        assert engine.tokens(TEXTS[:1], 1) == [stock[0][:1]]
        assert (loaded := counts(engine)["tokens_loaded"]) > 0
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.tokens(TEXTS) == expected
        assert counts(engine)["tokens_loaded"] == loaded
    assert files(store) == before
    assert caplog.text.count("The weights of the model changed.") == 1
    with closing(Engine(model, **on(store))) as engine:
        assert engine.tokens(TEXTS) == expected


def test_weights_that_are_written_in_place(stock: list[list[int]], store: Path) -> None:
    with closing(Engine(**WITHOUT)) as engine:
        engine.llm.apply_model(scale_in_place)
        expected = engine.tokens(TEXTS)
    assert expected != stock
    before = files(store)
    with closing(Engine(**on(store))) as engine:
        engine.llm.apply_model(scale_in_place)
        assert engine.tokens(TEXTS) == expected
    assert files(store) == before


def test_a_reset_keeps_pages_that_are_right(stock: list[list[int]], store: Path) -> None:
    with closing(Engine(**on(store))) as engine:
        for _ in range(2):
            found = engine.run(TEXTS)
            assert [list(request.outputs[0].token_ids) for request in found] == stock
            assert sum(request.num_cached_tokens for request in found) == whole_pages(TEXTS, engine)
            assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert counts(engine)["tokens_loaded"] == 2 * whole_pages(TEXTS, engine)


CHILD = """
import json, sys
from integrations.vllm.engines import Engine
from integrations.vllm.test_weights import scale_in_last_rank
if __name__ == "__main__":
    texts, arguments = json.loads(sys.argv[1])
    engine = Engine(**arguments)
    engine.llm.collective_rpc(scale_in_last_rank)
    print("TOKENS", json.dumps(engine.tokens(texts)))
    engine.close()
"""


def scale_in_last_rank(worker: Any) -> None:
    if worker.rank == 1:
        worker.get_model().model.layers[1].post_attention_layernorm.weight.data.mul_(1.5)


@pytest.mark.process
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_weights_of_one_rank_of_two(stock: list[list[int]], store: Path, tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    settings = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    before, found = files(store), []
    for arguments in (WITHOUT, on(store)):
        given = json.dumps([TEXTS, {**arguments, "tensor_parallel_size": 2}])
        command = [sys.executable, str(script), given]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        found += [x for x in done.stdout.splitlines() if x.startswith("TOKENS ")]
    assert found[0] == found[1] and found[0] != f"TOKENS {json.dumps(stock)}"
    assert files(store) == before
