"""Bytes of quantized weights by hand: codes in words, scales, zero points, and what stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.models.test_families import family

import kvloom
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.planning.sections import bytes_by_section

LAYER = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
"""Outputs and inputs of the linear layers of each of two layers."""
WEIGHTS = 2 * sum(out * width for out, width in LAYER)
OUTPUTS, INPUTS = (2 * sum(x[i] for x in LAYER) for i in (0, 1))
WEIGHT_OF_GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}


@pytest.fixture(scope="module")
def llama() -> Any:
    """In bfloat16, with a head of 99 x 32."""
    return family("Llama").bfloat16()


def compressed(weights: dict[str, Any], form: str, ignore: list[str]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignore}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": None}, WEIGHTS + 4 * 14),
        ({"quant_method": "fbgemm_fp8"}, WEIGHTS + 4 * OUTPUTS),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WEIGHTS + 4 * OUTPUTS),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, WEIGHTS // 2 + 4 * WEIGHTS // 64 + 14 * 64),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 16},
            WEIGHTS // 2 + 2 * WEIGHTS // 16 + WEIGHTS // 16 // 2,
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 16},
            WEIGHTS + 2 * WEIGHTS // 16 + WEIGHTS // 16 + 4 * INPUTS,
        ),
        (
            compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized", ["lm_head"]),
            WEIGHTS + 2 * OUTPUTS,
        ),
        (
            compressed(WEIGHT_OF_GROUP, "pack-quantized", ["lm_head"]),
            WEIGHTS // 2 + 2 * WEIGHTS // 16 + WEIGHTS // 16 // 2 + 14 * 16,
        ),
        (
            compressed({"num_bits": 8, "strategy": "tensor"}, "float-quantized", ["re:.*lm_head"]),
            WEIGHTS + 2 * 14,
        ),
    ],
)
def test_weights_have_the_bytes_of_their_section(llama: Any, section: dict[str, Any], expected: int) -> None:
    plain = sum(x.nbytes for x in (*llama.parameters(), *llama.buffers()))
    assert bytes_by_section(llama, section) == plain - 2 * WEIGHTS + expected


def test_modules_that_are_named_stay_as_they_are(llama: Any) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    plain, all_of_them = sum(x.nbytes for x in llama.state_dict().values()), bytes_by_section(llama, fp8)
    for name in ("mlp", "model.layers.*.mlp", "layers.0.mlp.down_proj"):
        some = bytes_by_section(llama, fp8 | {"modules_to_not_convert": [name]})
        assert all_of_them < some < plain
    every = bytes_by_section(llama, fp8 | {"modules_to_not_convert": ["model.layers"]})
    assert every == sum(x.nbytes for x in (*llama.parameters(), *llama.buffers()))
    assert bytes_by_section(llama, fp8 | {"modules_to_not_convert": ["lay", "down"]}) == all_of_them


def test_given_weights_stand_for_a_method_that_is_not_known() -> None:
    config = family("Llama").config
    plain = kvloom.plan(config, context=20)
    config.quantization_config = {"quant_method": "unheard-of"}
    with pytest.raises(UnsupportedError, match="got quant_method 'unheard-of': give weights"):
        kvloom.plan(config, context=20)
    config.dtype = torch.float32
    planned = kvloom.plan(config, context=20, weights=1234)
    assert (planned.weights, planned.cache) == (1234, plain.cache)
    for wrong in (-1, True, "5GB"):
        with pytest.raises(
            ArgumentError, match=f"^weights must be None or an int of at least 0, got {wrong!r}"
        ):
            kvloom.plan(config, context=20, weights=wrong)


def test_a_section_of_mlx_has_the_embedding_and_the_head(llama: Any) -> None:
    section = {"bits": 4, "group_size": 16}
    codes = WEIGHTS + 2 * 99 * 32
    rest = sum(x.nbytes for x in (*llama.parameters(), *llama.buffers())) - 2 * codes
    assert bytes_by_section(llama, section) == rest + codes // 2 + 4 * codes // 16


def test_layers_of_mlx_may_have_bits_of_their_own(llama: Any) -> None:
    codes = WEIGHTS + 2 * 99 * 32
    section = {"bits": 4, "group_size": 16, "lm_head": {"bits": 8, "group_size": 16}}
    uniform = bytes_by_section(llama, {"bits": 4, "group_size": 16})
    assert bytes_by_section(llama, section) == uniform + 99 * 32 // 2
    plain = bytes_by_section(llama, {"bits": 4, "group_size": 16, "lm_head": False})
    assert plain == uniform + 99 * 32 * 2 - 99 * 32 // 2 - 4 * 99 * 32 // 16
    scales = bytes_by_section(llama, {"bits": 4, "group_size": 16, "mode": "mxfp4"})
    assert scales == uniform - 3 * codes // 16


def test_mlx_may_call_its_section_quantization(llama: Any) -> None:
    section, sizes = {"bits": 4, "group_size": 16}, {}
    for name in ("quantization", "quantization_config"):
        config = copy.deepcopy(llama.config)
        setattr(config, name, section)
        sizes[name] = kvloom.plan(config, context=9).weights
    assert sizes["quantization"] == sizes["quantization_config"]
    assert sizes["quantization"] < kvloom.plan(llama.config, context=9).weights / 2
