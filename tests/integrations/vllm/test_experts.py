"""Mixtures of experts and a store: their files have experts one by one, transformers has them in one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.engines import INT8, Engine, needs_vllm, prompts, random_model, tokens_of
from integrations.vllm.test_connector import BLOCK, counts, on, whole_pages
from integrations.vllm.test_fingerprints import fingerprint, in_transformers
from integrations.vllm.test_folder_weights import with_weights
from integrations.vllm.test_models import SMALL

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = prompts()[1::4]


@pytest.fixture(autouse=True)
def no_groups() -> None:
    """The first engine of a process makes groups of ranks, of experts only if its model has some."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen3MoeConfig(**SMALL, **experts, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("config", "expert"),
    [
        (mixtral, "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        (qwen3_moe, "model.layers.1.mlp.experts.2.up_proj.weight"),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_engines_and_pools_share_what_one_computed(config: Any, expert: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvloom.integrations.transformers import KVPool

    folder = random_model(tmp_path / "model", config())

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[expert][3, 5] += 1

    other = with_weights(folder, tmp_path / "other", change)
    assert fingerprint(folder) == in_transformers(folder) != fingerprint(other) == in_transformers(other)
    unsmoothed = {"additional_config": {"kvloom": {"smooth": "none"}}}
    arguments = {"model": folder, **on(tmp_path / "store"), **unsmoothed}
    with closing(Engine(**arguments)) as engine:
        wanted = engine.tokens(TEXTS)
        assert counts(engine)["tokens_loaded"] == 0
    assert wanted == tokens_of(folder, TEXTS, kv_cache_dtype=INT8, block_size=BLOCK, **unsmoothed)
    with closing(Engine(**arguments)) as engine:
        found = engine.run(TEXTS)
        assert [list(request.outputs[0].token_ids) for request in found] == wanted
        assert sum(request.num_cached_tokens for request in found) == whole_pages(TEXTS, engine)
        assert counts(engine)["tokens_loaded"] > 0 and counts(engine)["tokens_failed"] == 0
    with closing(Engine(**{**arguments, "model": other})) as engine:
        engine.run(TEXTS, 1)
        assert counts(engine)["tokens_loaded"] == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt").input_ids
    sizes = {"kv": "int8,smooth=none", "max_tokens": 4096, "page_size": BLOCK}
    with KVPool.for_model(model, **sizes, store=f"file://{tmp_path / 'store'}") as pool:
        cache = pool.begin(tokens)
        length = cache.get_seq_length()
        assert length == (tokens.shape[1] - 1) // BLOCK * BLOCK
        logits = model(tokens[:, length:], past_key_values=cache).logits[0, -1]
    assert int(logits.argmax()) == wanted[0][0]
