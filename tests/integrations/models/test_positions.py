"""Texts are no longer than what a model was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import make_model, short_model

import kvloom
from kvloom.cli import main
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.positions import expect_positions, positions_of, room_behind


def llama(rope: dict[str, Any] | None = None) -> transformers.LlamaConfig:
    config = transformers.LlamaConfig(max_position_embeddings=100)
    if rope is not None:
        config.rope_parameters = {"rope_theta": 1e4, **rope}
    return config


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (llama(), 100),
        (transformers.GPT2Config(n_positions=77), 77),
        (transformers.LlavaConfig(text_config=llama()), 100),
        (transformers.BloomConfig(), None),
        (transformers.MambaConfig(), None),
        (llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}), 400),
        (llama({"rope_type": "linear", "factor": 2.0}), 200),
        (llama({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 10}), 100),
    ],
)
def test_positions_are_those_of_the_configuration(config: Any, positions: int | None) -> None:
    assert positions_of(config) == positions


def test_room_is_what_is_left_behind_the_text() -> None:
    model = make_model()
    model.config.max_position_embeddings = 10
    assert [room_behind("text", model, n, 4) for n in (1, 6, 7, 9)] == [4, 4, 3, 1]
    with pytest.raises(ArgumentError, match=r"^text must be fewer tokens than .* 10 positions, got 10"):
        room_behind("text", model, 10, 4)
    expect_positions("text", model, 10)
    with pytest.raises(ArgumentError, match=r"^text must be at most 10 tokens, .* got 11"):
        expect_positions("text", model, 11)
    model.config.max_position_embeddings = -1
    assert room_behind("text", model, 10**6, 4) == 4
    expect_positions("text", model, 10**6)


def test_texts_are_no_longer_than_the_model_has_positions() -> None:
    model = make_model()
    model.config.max_position_embeddings = 8
    for measure in (kvloom.quality, lambda *args: kvloom.plan_bits(*args, bits=8)):
        measure(model, torch.ones(1, 8, dtype=torch.int64))
        with pytest.raises(ArgumentError, match=r"^input_ids must be at most 8 tokens, .* model, got 9"):
            measure(model, torch.ones(1, 9, dtype=torch.int64))


def test_command_reads_no_more_than_the_model_has_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quality", "--model", str(short_model(tmp_path, 64)), "--tokens", "130", "--kv", "int8"]
    plan = ["--plan", str(tmp_path / "plan.json"), "--bits", "6", "--calibrate", __file__]
    assert main([*command, "--json", *plan]) == 0
    shown = capsys.readouterr()
    assert {row["num_tokens"] for row in json.loads(shown.out)} == {2 * 63}
    assert "kvloom: --window is 64, not 512, for the model has no more positions\n" in shown.err
    assert main([*command, "--json", "--window", "64"]) == 0
    assert "windows" not in capsys.readouterr().err
    assert main([*command, "--window", "65"]) == 2
    said = "kvloom: --window must be at most 64 tokens, the positions of the model, got 65\n"
    assert capsys.readouterr().err == said
    assert main([*command, "--after", "63"]) == 2
    assert "--after must be from 0 to 62, got 63" in capsys.readouterr().err


def test_a_text_is_continued_up_to_the_last_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--model", str(short_model(tmp_path, 32)), "--prompt"]
    assert main([*command, "import os"]) == 0
    said = capsys.readouterr().err
    assert "[the text ends here: the model has 32 positions]" in said
    assert main([*command, "import os", "--max-new-tokens", "4"]) == 0
    assert "the text ends here" not in capsys.readouterr().err
    assert main([*command, "import os\n" * 40]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("kvloom: --prompt must be fewer tokens than the model's 32 positions, got ")


def test_a_recorded_text_ends_there_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, model = tmp_path / "text.py", short_model(tmp_path, 32)
    command = ["trace", "record", "--model", str(model), "--prompt-file", str(text)]
    command += [str(tmp_path / "events.jsonl"), "--max-new-tokens", "100"]
    text.write_text("import os")
    assert main(command) == 0
    text.write_text("import os\n" * 40)
    assert main(command) == 2
    assert "--prompt-file must be fewer tokens than the model's 32 positions" in capsys.readouterr().err


def test_a_plan_is_for_the_stretched_positions() -> None:
    config = make_model().config
    config.max_position_embeddings = 100
    config.rope_parameters = {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}
    assert kvloom.plan(config).context == 300
