"""What decides keys and values in an engine is in the fingerprint of its pages, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.vllm.engines import needs_vllm, random_model
from integrations.vllm.test_models import SMALL

from kvloom.core.specs import QuantSpec
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import blocks
from kvloom.models import bundled_model_path
from kvloom.store import Fingerprint

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")


def config_of(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"dtype": "float32", "max_model_len": 512, **arguments}
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def identify(config: Any) -> Fingerprint:
    from kvloom.integrations.vllm.storing.identity import identify

    model = config.model_config
    layer = blocks.layer_format(
        model.get_total_num_kv_heads(), model.get_head_size(), torch.float32, QuantSpec(8, 32)
    )
    return identify(config, "full", (layer,) * model.hf_text_config.num_hidden_layers)


def fingerprint(model: Path, **arguments: Any) -> Fingerprint:
    return identify(config_of(model, **arguments))


def in_transformers(folder: Path, **changes: Any) -> Fingerprint:
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvloom.integrations.transformers.pool.identity import fingerprint_of

    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return fingerprint_of(model, "int8:g32,smooth=none")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    return random_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SMALL, tie_word_embeddings=False))


def with_other_epsilon(config: Any) -> Any:
    config.rms_norm_eps = 0.25
    return config


OVERRIDES = [
    {"rms_norm_eps": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    {"num_hidden_layers": 2},
    with_other_epsilon,
]


def test_an_engine_and_transformers_name_a_model_alike(llama: Path) -> None:
    assert fingerprint(llama) == fingerprint(llama, max_model_len=64) == in_transformers(llama)
    assert fingerprint(llama, dtype="bfloat16") != fingerprint(llama)


def test_overrides_are_told_apart(llama: Path) -> None:
    found = [fingerprint(llama, hf_overrides=changes) for changes in OVERRIDES]
    assert len({fingerprint(llama), *found}) == len(OVERRIDES) + 1
    assert found == [fingerprint(llama, hf_overrides=changes) for changes in OVERRIDES]
    assert found[0] == in_transformers(llama, rms_norm_eps=0.5)


def test_what_a_model_does_to_its_configuration_changes_no_name(llama: Path) -> None:
    config = config_of(llama, hf_overrides=OVERRIDES[0])
    config.model_config.hf_config.rope_parameters["factor"] = 3.0
    assert identify(config) == fingerprint(llama, hf_overrides=OVERRIDES[0])


def test_a_configuration_from_elsewhere_is_told_apart(llama: Path, tmp_path: Path) -> None:
    said = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"rms_norm_eps": 0.5}))
    elsewhere = fingerprint(llama, hf_config_path=str(tmp_path))
    assert elsewhere == fingerprint(llama, hf_overrides=OVERRIDES[0])


def test_factors_of_longrope_are_told_apart(tmp_path: Path) -> None:
    from transformers import Phi3Config

    said = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    sizes = {name: value for name, value in SMALL.items() if name != "head_dim"}
    model = random_model(
        tmp_path,
        Phi3Config(**sizes, original_max_position_embeddings=256, rope_parameters={**said, **factors}),
    )
    short, long = fingerprint(model, max_model_len=256), fingerprint(model, max_model_len=257)
    assert short == fingerprint(model, max_model_len=64) and long == fingerprint(model, max_model_len=2048)
    assert len({short, long, in_transformers(model)}) == 3
    assert long.difference(short).startswith("rope is")


def test_frequencies_that_transformers_chooses_by_length_are_told_apart(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    said = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = random_model(tmp_path, LlamaConfig(**SMALL, rope_parameters=said, tie_word_embeddings=False))
    assert fingerprint(model) == fingerprint(model, max_model_len=64) != in_transformers(model)


@pytest.mark.parametrize("load_format", ["dummy", "pt", "sharded_state"])
def test_weights_that_are_not_the_folders_are_refused(load_format: str, llama: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"load_format must be one of .* got '{load_format}'"):
        fingerprint(llama, load_format=load_format)


def test_weights_that_are_quantized_are_refused(llama: Path) -> None:
    config = config_of(llama)
    config.model_config.quantization = "fp8"
    with pytest.raises(UnsupportedError, match="quantization must be None for a store, got 'fp8'"):
        identify(config)


def test_a_weight_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    model = Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))
    expected = fingerprint(model)
    (weights,) = model.glob("*.safetensors")
    shutil.copy(weights, model / "older.safetensors")
    with pytest.raises(UnsupportedError, match="each weight must be in one file for a store, got "):
        fingerprint(model)
    index = {"weight_map": dict.fromkeys(["model.norm.weight"], weights.name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(model) == expected
