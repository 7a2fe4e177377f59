"""Models with recurrent layers: their attention over pages of kvloom's, beside states that stay vLLM's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from integrations.vllm.engines import INT4, INT8, Engine, needs_vllm, prompts, random_model
from integrations.vllm.test_models import SMALL, TEXTS, answers

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT = {"additional_config": {"kvloom": {"float": True}}}
# Its kernels of Mamba2 on a CPU give no states within a step, which prefix caching reads.
WITHOUT_PREFIXES = {"enable_prefix_caching": False}


def granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **{**SMALL, "num_hidden_layers": 4}, layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=64,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=256,
        position_embedding_type="rope", tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("granite"), granite())


def test_attention_over_pages_of_kvloom_beside_states_of_vllm(model: Path) -> None:
    found = {}
    for name, arguments in {
        "stock": {},
        "float": FLOAT,
        "int8": {"kv_cache_dtype": INT8},
        "int4": {"kv_cache_dtype": INT4},
    }.items():
        with closing(Engine(model, **WITHOUT_PREFIXES, **arguments)) as engine:
            assert engine.kinds() == {"kvloom" if arguments else "vLLM"}
            found[name] = answers(engine)
    (stock, stock_logs), (floats, float_logs) = found["stock"], found["float"]
    assert floats == stock
    assert float_logs == pytest.approx(stock_logs, abs=2e-3)
    firsts = slice(0, None, len(stock[0]))  # steps behind another token are another text's
    assert found["int8"][1][firsts] == pytest.approx(stock_logs[firsts], abs=0.1)
    assert [tokens[0] for tokens in found["int8"][0]] == [tokens[0] for tokens in stock]
    assert found["int8"][1] != stock_logs
    assert sum(a[0] == b[0] for a, b in zip(found["int4"][0], stock, strict=True)) >= TEXTS - 1


def test_keys_are_not_smoothed_by_what_recurrent_layers_give_without_states(model: Path) -> None:
    with closing(Engine(model, **WITHOUT_PREFIXES, kv_cache_dtype=INT8)) as engine:
        runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        layers = runner.compilation_config.static_forward_context.values()
        found = [layer.impl for layer in layers if hasattr(layer, "impl")]
    assert len(found) == 2 and all(impl.smoothing is None for impl in found)
    assert all("got recurrent ones" in impl.smoothed.reason for impl in found)


def test_prompts_in_pieces_and_preempted_requests_change_nothing(model: Path) -> None:
    arguments = {**WITHOUT_PREFIXES, "kv_cache_dtype": INT8, "disable_log_stats": False}
    with closing(Engine(model, **arguments)) as engine:
        expected = engine.tokens(prompts()[:TEXTS], 200)
    few = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 14}
    with closing(Engine(model, **arguments, **few)) as engine:
        assert engine.tokens(prompts()[:TEXTS], 200) == expected
        preempted = [x.value for x in engine.llm.get_metrics() if x.name == "vllm:num_preemptions"]
        assert sum(preempted) > 0
