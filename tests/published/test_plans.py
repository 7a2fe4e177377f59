"""``kvloom plan`` of configurations as they are published, uncut."""

from __future__ import annotations

from pathlib import Path

import campaign
import pytest
import torch
from integrations.models.test_families import FAMILIES
from published.folders import PUBLISHED, UNPLANNED, one_of_each
from transformers import CONFIG_MAPPING
from transformers.quantizers import AutoHfQuantizer

import kvloom
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.versions import IS_4
from kvloom.planning.making import model_of, read_config, without_logs
from kvloom.planning.model import ModelShape
from kvloom.planning.sections import bytes_by_section

pytestmark = pytest.mark.model
GIGABYTES = {
    "Llama-3.1-8B-Instruct": 16.06, "Mixtral-8x7B-Instruct-v0.1": 93.41, "gemma-3-27b-it": 54.86,
    "gpt-oss-20b": 13.76, "gpt-oss-120b": 65.25, "llama-3-8b-Instruct-bnb-4bit": 5.70,
    "Meta-Llama-3.1-8B-Instruct-AWQ-INT4": 5.73, "Meta-Llama-3.1-8B-Instruct-FP8": 9.08,
    "Meta-Llama-3.1-8B-Instruct-quantized.w4a16": 5.70, "Qwen2.5-7B-Instruct-GPTQ-Int4": 5.58,
    "Qwen2.5-7B-Instruct-GPTQ-Int8": 8.86, "Qwen2.5-7B-Instruct-AWQ": 5.57, "Qwen3-8B-FP8": 9.44,
}  # fmt: skip
"""Sizes of the published files of weights."""


@pytest.mark.skipif(IS_4, reason="families that transformers 5 added are among these")
@pytest.mark.parametrize("name", PUBLISHED if campaign.is_whole() else one_of_each(lambda x: x.kind))
def test_a_published_folder_is_planned_or_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = PUBLISHED[name]
    path = folder.write(tmp_path)
    if folder.config["model_type"] not in CONFIG_MAPPING:
        with pytest.raises(
            ArgumentError, match=r"got model_type .*, whose code 'configuration_.* never run$"
        ):
            kvloom.plan(path)
        return
    if name in UNPLANNED:
        with pytest.raises(UnsupportedError, match=UNPLANNED[name]):
            kvloom.plan(path)
        return
    shape = ModelShape.of(read_config(path))
    needs = {"encoder_tokens": 512} if shape.encoder and shape.encoder_positions is None else {}
    planned = kvloom.plan(shape, context=1000, **needs)
    assert len(shape.layers) == len(planned.layers) - len(shape.encoder)
    assert planned.cache or planned.states
    if name in GIGABYTES:
        assert planned.weights == pytest.approx(GIGABYTES[name] * 1e9, rel=2e-3)  # and its rounding
    if "quantization_config" in folder.config:
        given = kvloom.plan(shape, context=1000, weights=7)
        assert (given.weights, given.cache) == (7, planned.cache)
        assert {x.entry.key.dtype for x in shape.layers if x.entry} <= {"bfloat16", "float16"}


def test_a_section_does_not_change_the_cache(tmp_path: Path) -> None:
    config = read_config(PUBLISHED["Qwen3-8B-AWQ"].write(tmp_path))
    planned = kvloom.plan(config, "int8", context=100)
    del config.quantization_config
    assert kvloom.plan(config, "int8", context=100).cache == planned.cache


@pytest.mark.skipif("DeepSeek-V3" not in FAMILIES, reason="this transformers has no DeepSeek V3")
@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "Qwen3-30B-A3B-Instruct-2507-FP8", "Qwen3-8B-FP8"])
def test_weights_in_float8_are_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    """It makes these on any machine: all their weights and scales, of linear layers and of experts."""
    config = read_config(PUBLISHED[name].write(tmp_path))
    said = config.quantization_config
    with torch.device("meta"), without_logs():
        model = model_of(config)
        ours = bytes_by_section(model, said)
        AutoHfQuantizer.from_config(said, pre_quantized=True).preprocess_model(
            model=model, dtype=torch.bfloat16, device_map=None, checkpoint_files=None
        )
    assert ours == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))


def test_a_quantized_model_without_a_dtype_computes_in_bfloat16(tmp_path: Path) -> None:
    config = read_config(PUBLISHED["gpt-oss-20b"].write(tmp_path))
    planned = kvloom.plan(config, context=96)
    full, window = (2 * 96 * 2 * 8 * 64 * 12 for _ in range(2))  # 12 layers of each kind, 96 tokens in both
    assert planned.cache == full + window
