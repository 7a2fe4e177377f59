"""What a running vLLM computed goes on in other engines, and what they computed in it, through a store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.engines import NEW_TOKENS, Engine, needs_vllm, prompts
from integrations.vllm.test_connector import BLOCK, on

from kvloom.errors import ArgumentError
from kvloom.models import bundled_model_path

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")


def engine_on(folder: Path) -> Engine:
    """An engine in float32 whose pages of floats are kvloom's, so that a store has them."""
    arguments = {"kv_cache_dtype": "auto", "additional_config": {"kvloom": {"float": True}}}
    return Engine(**on(folder) | arguments)


def test_pages_of_vllm_go_on_elsewhere_and_come_back(tmp_path: Path) -> None:
    """vLLM, store, state of llama.cpp, transformers' ``generate``, another store, another vLLM: 64 tokens."""
    from kvloom.carry import from_pool, geometry_of, llama_state, read_llama, to_cache, to_pool
    from kvloom.integrations.transformers import KVPool, load_model

    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    text, geometry = prompts()[1], geometry_of(model)
    tokens = tokenizer(text, return_tensors="pt").input_ids
    whole = (tokens.shape[1] - 1) // BLOCK * BLOCK
    with closing(engine_on(tmp_path / "first")) as engine:
        [wanted] = engine.tokens([text])

    def pool_on(name: str) -> Any:
        return KVPool.for_model(
            model, "auto", BLOCK, max_tokens=4096, store=f"file://{tmp_path}/{name}", batch_invariant=False
        )

    with pool_on("first") as pool:
        carried = from_pool(pool, tokens[0, :-1].tolist())
    assert carried.num_tokens == whole
    state = llama_state(carried, geometry)
    through = read_llama(state, geometry, tokens=carried.tokens)
    with pool_on("second") as pool:
        assert to_pool(through, pool) == whole
        assert pool.flush()
    found = model.generate(
        tokens, past_key_values=to_cache(through, model), max_new_tokens=NEW_TOKENS, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    assert found[0, tokens.shape[1] :].tolist() == wanted
    with closing(engine_on(tmp_path / "second")) as engine:
        [request] = engine.run([text])
    assert request.num_cached_tokens == whole
    assert list(request.outputs[0].token_ids) == wanted
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1e-3
    with pool_on("first") as pool, pytest.raises(ArgumentError, match="pool must have the first page"):
        from_pool(pool, tokens[0, :-1].tolist())
