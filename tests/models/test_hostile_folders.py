"""Folders that somebody else made: loaded, or refused in one line, and never unpickled or run."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.models import bundled_model_path

safetensors = pytest.importorskip("safetensors.torch")

Change = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model's folder, to be damaged."""
    return Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))


def says(file: str, **settings: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(content | settings))

    return change


def has(file: str, content: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def lacks(*files: str) -> Change:
    return lambda folder: [(folder / file).unlink() for file in files]


def cut(file: str, num_bytes: int) -> Change:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:num_bytes])


def with_tensor(name: str, tensor: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        tensors = safetensors.load_file(folder / WEIGHTS)
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
        safetensors.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def in_parts(named: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        places = named(folder / "part.safetensors") if callable(named) else named
        has(INDEX, json.dumps({"metadata": {}, "weight_map": places}))(folder)

    return change


def every_tensor(file: Path) -> dict[str, str]:
    return dict.fromkeys(safetensors.load_file(file), file.name)


REFUSED: dict[str, tuple[Change, str]] = {
    "pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "--model must have a model.safetensors, for pickles are never loaded",
    ),
    "an index of pickles": (in_parts({"a": "evil.bin"}), "must name safetensors files in"),
    "an index that leaves the folder": (in_parts({"a": "../x.safetensors"}), "got '../x.safetensors'"),
    "an index of absent files": (in_parts({"a": "b.safetensors"}), "got no 'b.safetensors'"),
    "an index of nothing": (in_parts(None), "must name safetensors files in"),
    "an adapter": (says("adapter_config.json"), "--model must be whole, got an adapter"),
    "another name for weights": (
        says("config.json", transformers_weights="adapter_model.bin"),
        "--model must name no transformers_weights in config.json, got 'adapter_model.bin'",
    ),
    "code for the model": (
        says(
            "config.json",
            model_type="mine",
            auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        ),
        "--model must be one that loads",
    ),
    "code for the tokenizer": (
        says("tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": ["evil.T", None]}),
        "--model must be one that loads",
    ),
    "kernels of a hub": (
        says("config.json", text_config={"attn_implementation": "evil/kernels"}),
        "--model must name no kernels of a hub in config.json, got attn_implementation 'evil/kernels'",
    ),
    "no tokenizer": (lacks("tokenizer.json", "tokenizer_config.json"), "--model must be one that loads"),
    "half a tokenizer": (cut("tokenizer.json", 1000), "--model must be one that loads"),
    "a nested tokenizer": (has("tokenizer.json", NESTED), "RecursionError"),
    "unknown model_type": (says("config.json", model_type="nonsense"), "model type `nonsense`"),
    "no causal model": (says("config.json", model_type="t5"), "the encoder and decoder of T5Config"),
    "zero heads": (says("config.json", num_attention_heads=0), "num_attention_heads of 1 to"),
    "negative sizes": (says("config.json", hidden_size=-256), "hidden_size of 1 to"),
    "negative sizes that nobody names": (says("config.json", intermediate_size=-1), "negative dimension"),
    "absurd depth": (says("config.json", num_hidden_layers=10**9), "num_hidden_layers of 1 to 47 in"),
    "absurd width": (says("config.json", hidden_size=10**9), "hidden_size of 1 to"),
    "absurd vocabulary": (says("config.json", vocab_size=10**12), "vocab_size of 1 to"),
    "sizes that are words": (says("config.json", hidden_size="many"), "--model must be one that loads"),
    "unknown dtype": (says("config.json", dtype="float99"), "--model must be one that loads"),
    "weights of a deeper model": (says("config.json", num_hidden_layers=6), "got none for model.layers.5"),
    "a nested configuration": (has("config.json", NESTED), "--model must have JSON in"),
    "a configuration that is a list": (has("config.json", "[]"), "JSON object in"),
    "a configuration that is no text": (has("config.json", b"\xff\xfe"), "--model must have JSON in"),
    "an empty configuration": (has("config.json", "{}"), "--model must be one that loads"),
    "half the weights": (cut(WEIGHTS, 100_000), "must have a whole model.safetensors"),
    "half a header": (cut(WEIGHTS, 500), "must have a whole model.safetensors"),
    "no header": (has(WEIGHTS, b""), "must have a whole model.safetensors"),
    "an oversized header": (has(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), "header too large"),
    "a nested header": (has(WEIGHTS, struct.pack("<Q", len(NESTED)) + NESTED.encode()), "must have a whole"),
    "no tensors": (has(WEIGHTS, struct.pack("<Q", 2) + b"{}"), "weights are 0 tensors"),
    "a tensor too few": (with_tensor("model.norm.weight", None), "got none for model.norm.weight"),
    "a tensor of another shape": (
        with_tensor("model.norm.weight", torch.ones(7)),
        "weights have other shapes",
    ),
    "beams": (
        says("generation_config.json", num_beams=4),
        "num_beams 1 in its generation_config.json, got 4",
    ),
    "several results": (says("generation_config.json", num_return_sequences=3), "num_return_sequences"),
    "decoding by code of a hub": (says("generation_config.json", penalty_alpha=0.6, top_k=4), "can generate"),
    "settings that are words": (says("generation_config.json", eos_token_id="x"), "can generate"),
    "nested settings": (has("generation_config.json", NESTED), "RecursionError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = REFUSED[case]
    change(folder)
    arguments = ["generate", "--prompt", "import os\n", "--max-new-tokens", "2", "--model", str(folder)]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("kvloom: --model must ")
    assert err.count("\n") == 1


SERVED: dict[str, Change] = {
    "as it is": lambda folder: None,
    "weights in parts": in_parts(every_tensor),
    "no settings": lacks("generation_config.json"),
    "a cache of its own": says("generation_config.json", cache_implementation="static"),
    "results in a class": says("generation_config.json", return_dict_in_generate=True, output_scores=True),
    "code that nobody needs": says("config.json", auto_map={"AutoModelForCausalLM": "evil.M"}),
}


@pytest.mark.parametrize("case", SERVED)
def test_served(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SERVED[case](folder)
    (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')\n")
    arguments = ["generate", "--prompt", "import os\n", "--max-new-tokens", "2", "--model", str(folder)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("import os\n")
    assert captured.err.count("\n") == 1


def test_code_of_a_folder_never_runs_and_nobody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvloom.integrations.transformers import load_model

    REFUSED["code for the model"][0](folder)
    (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    with pytest.raises(ArgumentError, match="custom code"):
        load_model(folder)


def test_a_token_that_the_model_lacks_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    capsys.readouterr()
    assert main(["generate", "--prompt", "import os\n", "--model", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "--model must have an embedding for each token of its tokenizer, got token" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["Bart", "Whisper"])
def test_an_encoder_and_a_decoder_are_named(name: str, folder: Path) -> None:
    """transformers would load the decoder alone, or miss weights that are tied."""
    import transformers

    from kvloom.integrations.transformers import load_model

    sizes = {
        "vocab_size": 99, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes)
    (folder / WEIGHTS).unlink()
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder)
    with pytest.raises(
        ArgumentError, match=f"^model must be a decoder, got the encoder and .* of {name}Config"
    ):
        load_model(folder)
    if name == "Whisper":
        with pytest.raises(ArgumentError, match=r"^model must have an encoder of texts alone, got Whisper"):
            load_model(folder, with_encoder=True)
    else:
        model, _ = load_model(folder, with_encoder=True)
        assert type(model).__name__ == "BartForConditionalGeneration"


@pytest.mark.parametrize("path", [None, 3, b"folder"])
def test_what_is_no_path_is_named(path: Any) -> None:
    from kvloom.integrations.transformers import load_model

    with pytest.raises(ArgumentError, match=rf"^path must be the name of a folder, got {path}$"):
        load_model(path)
