"""Plans of configurations as they are published, and of prompts that are read in any pieces."""

from __future__ import annotations

import pytest
import torch
import transformers
from integrations.models.test_families import FAMILIES, family
from integrations.models.test_vision_models import FAMILIES as VISION
from integrations.models.test_vision_models import vision_model
from planning.test_plan import filled

import kvloom
from kvloom.integrations.transformers import KVCache


@pytest.mark.parametrize("kv", ["float32", "int4:g2,recent=9"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mistral"])
def test_a_plan_is_the_most_of_all_ways_to_read_a_prompt(name: str, kv: str) -> None:
    """In pieces windows have their tokens twice: before the step and after it."""
    model, seen = family(name), {}
    for context in (30, 61, 200):
        planned = kvloom.plan(model.config, kv, context=context, batch=2, page_size=4)
        for piece in (1, 3, 40, 50, context):
            cache = KVCache.for_model(model, kv, page_size=4, max_tokens=-(-context // 4) * 8)
            with torch.no_grad():
                for own in torch.ones(2, context, dtype=torch.int64).split(piece, 1):
                    model(own, past_key_values=cache, use_cache=True)
            seen[context, piece] = cache.nbytes
            assert cache.nbytes <= planned.cache + planned.scales, (context, piece)
    if kv == "float32":
        assert seen[200, 50] == planned.cache  # the most there is


@pytest.mark.skipif("DeepSeek-V3" not in FAMILIES, reason="this transformers has no DeepSeek V3")
def test_quantized_weights_are_those_that_transformers_loads() -> None:
    """As published, in float8 with a scale of each block; the cache is that of the dtype all the same."""
    config = family("DeepSeek-V3").config
    config.dtype = torch.bfloat16
    plain = kvloom.plan(config, context=9)
    said = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
    }
    config.quantization_config = said
    planned = kvloom.plan(config, context=9)
    assert planned.cache == plain.cache and config.quantization_config is said
    assert 0.5 * plain.weights < planned.weights < plain.weights


@pytest.mark.parametrize("name", VISION)
def test_the_dtype_may_be_said_of_the_text_alone(name: str) -> None:
    config = vision_model(name).config
    config.dtype, config.get_text_config().dtype = None, "bfloat16"
    planned = kvloom.plan(config, context=20)
    config.get_text_config().dtype = torch.float32
    assert kvloom.plan(config, context=20).cache == 2 * planned.cache


def test_decisions_of_a_forward_without_data_do_not_refuse_it() -> None:
    """RoPE that depends on the length asks for it, which tensors without data do not say."""
    factors = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "long_mscale": 1.2, "short_mscale": 1.2}
    rope = {**factors, "rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 1e4}
    config = transformers.PhimoeConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64, rope_scaling=rope,
    )  # fmt: skip
    model = transformers.PhimoeForCausalLM(config).eval()
    cache = filled(model, KVCache.for_model(model), 1, 20)
    assert kvloom.plan(config, context=20).cache == cache.nbytes


def test_the_factor_of_frequencies_stretches_no_text() -> None:
    config = family("Llama").config
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters = {**rope, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
    config.max_position_embeddings = 131072
    assert kvloom.plan(config).context == 131072
    config.rope_parameters = config.rope_parameters | {"rope_type": "yarn", "factor": 4.0}
    config.max_position_embeddings = 8192
    assert kvloom.plan(config).context == 32768


@pytest.mark.parametrize("name", ["Llama4Config", "Qwen3_5Config", "Gemma3Config"])
def test_weights_have_the_tower_of_models_that_also_come_without(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    text |= {"intermediate_size_mlp": 32, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 32}
    vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = getattr(transformers, name)(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    planned = kvloom.plan(config, context=20)
    assert planned.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    assert planned.weights > kvloom.plan(config.get_text_config(), context=20).weights
