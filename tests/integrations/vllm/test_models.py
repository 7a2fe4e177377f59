"""Windows, groups of layers, soft caps, sinks and ALiBi: float pages of kvloom against vLLM's own kernel."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from integrations.vllm.engines import INT8, Engine, needs_vllm, prompts, random_model

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TEXTS = 4
HYBRID = {"num_hidden_layers": 4, "sliding_window": 96}
LAYERS = ["sliding_attention", "full_attention"] * 2


def window() -> tuple[Any, dict[str, Any]]:
    from transformers import MistralConfig

    return MistralConfig(**SMALL, sliding_window=100), {"sliding_window": None}


def hybrid() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **{**SMALL, **HYBRID}, layer_types=LAYERS, query_pre_attn_scalar=32, tie_word_embeddings=False
    )
    return config, {"sliding_window": 2048}


def softcap() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma2Config

    config = Gemma2Config(
        **{**SMALL, **HYBRID},
        layer_types=LAYERS,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=2.0,
        tie_word_embeddings=True,
    )
    return config, {"attn_logit_softcapping": 1000.0}


def sinks() -> tuple[Any, dict[str, Any]]:
    from transformers import GptOssConfig

    config = GptOssConfig(
        **{**SMALL, "num_hidden_layers": 2}, sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    )
    return config, {"sliding_window": 2048}


def alibi() -> tuple[Any, dict[str, Any]]:
    from transformers import BloomConfig

    return BloomConfig(vocab_size=2048, hidden_size=128, n_layer=3, n_head=4), {}


MODELS = [window, hybrid, softcap, sinks, alibi]


def answers(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens, and the logarithms of their probabilities."""
    outputs = [request.outputs[0] for request in engine.run(prompts()[:TEXTS], 16, logprobs=0)]
    tokens = [list(output.token_ids) for output in outputs]
    return tokens, [x.logprob for output in outputs for step in output.logprobs for x in step.values()]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_pages_of_kvloom_give_what_vllms_own_kernel_gives(kind: Any, tmp_path: Path) -> None:
    config, without = kind()
    model = random_model(tmp_path / "model", config)
    ours = {"additional_config": {"kvloom": {"float": True}}}
    found = []
    for arguments in ({}, ours, {"kv_cache_dtype": INT8}):
        with closing(Engine(model, **arguments)) as engine:
            assert engine.kinds() == {"kvloom" if arguments else "vLLM"}
            found.append(answers(engine))
    (stock, stock_logs), (floats, float_logs), (codes, _) = found
    assert floats == stock
    assert float_logs == pytest.approx(stock_logs, abs=2e-3)
    same = sum(a == b for x, y in zip(codes, stock, strict=True) for a, b in zip(x, y, strict=True))
    assert same > 0.8 * sum(map(len, stock))
    if without:  # or the test would not see it
        with closing(Engine(random_model(tmp_path / "without", config, **without))) as engine:
            assert engine.tokens(prompts()[:TEXTS], 16) != stock
