"""Plans of GGUF files are those of the same models' configurations, with the bytes of the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published.folders import PUBLISHED

import kvloom
from kvloom.cli import main
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.versions import IS_4
from kvloom.planning.making import read_config

gguf = pytest.importorskip("gguf")
pytestmark = [pytest.mark.model, pytest.mark.skipif(IS_4, reason="it reads fewer architectures")]
ARCHITECTURES = {
    "Llama-3.1-8B": "llama",
    "Qwen2.5-7B-Instruct": "qwen2",
    "Qwen3-0.6B": "qwen3",
    "gemma-2-9b-it": "gemma2",
    "gemma-3-1b-it": "gemma3",
    "Phi-3-mini-4k-instruct": "phi3",
    "gpt-oss-20b": "gpt-oss",
}
"""As llama.cpp names them."""


def written(folder: Path, config: Any, architecture: str, name: str = "model.gguf", **said: int) -> Path:
    """A file with a whole header, as llama.cpp's converter writes it, and one matrix for its weights."""
    path = folder / name
    file = gguf.GGUFWriter(path, architecture)
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    file.add_key_length(head_dim)
    file.add_value_length(head_dim)
    file.add_rope_dimension_count(head_dim)
    file.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        file.add_sliding_window(config.sliding_window)
    file.add_file_type(said.get("file_type", 15))
    for part in range(2):
        file.add_tensor(f"blk.{part}.weight", np.zeros((8, 16), dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def qwen3(folder: Path) -> Any:
    """A configuration in bfloat16, whose folder is beside the files of a test."""
    (folder / "said").mkdir()
    return read_config(PUBLISHED["Qwen3-0.6B"].write(folder / "said"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_is_planned_as_its_configuration(name: str, tmp_path: Path) -> None:
    config = read_config(PUBLISHED[name].write(tmp_path))
    path = written(tmp_path, config, ARCHITECTURES[name])
    for context in (100, 8000):
        expected = kvloom.plan(config, "float16", context=context)
        found = kvloom.plan(path, "float16", context=context)
        assert (found.cache, found.tables) == (expected.cache, expected.tables)
    assert found.weights == 2 * 8 * 16 * 4
    assert kvloom.plan(path).context == kvloom.plan(config).context


def test_files_in_parts_and_folders_with_one_model_are_planned(tmp_path: Path) -> None:
    config = qwen3(tmp_path)
    for part in (1, 2):
        written(tmp_path, config, "qwen3", f"small-{part:05}-of-00002.gguf", file_type=0)
    planned = kvloom.plan(tmp_path, context=100)
    assert planned.weights == 2 * 2 * 8 * 16 * 4
    assert planned.cache == 2 * kvloom.plan(config, context=100).cache  # float32, not bfloat16
    written(tmp_path, config, "qwen3", "other.gguf")
    with pytest.raises(
        ArgumentError, match=r"^model must be one of the GGUF files .*other.gguf, small-00001"
    ):
        kvloom.plan(tmp_path)


def test_what_is_no_file_or_another_architecture_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = qwen3(tmp_path)
    path = written(tmp_path, config, "rwkv6")
    with pytest.raises(UnsupportedError, match=r"architecture transformers reads, got 'rwkv6'"):
        kvloom.plan(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:3], whole[:60], b"GGUF" + bytes(60)):
        path.write_bytes(damaged)
        with pytest.raises(ArgumentError, match=r"^model must be a GGUF file with a whole header"):
            kvloom.plan(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["plan", "--model", str(path)]) == 2
    assert capsys.readouterr().err == "kvloom: this needs gguf: pip install gguf\n"
