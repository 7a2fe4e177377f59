"""``kvloom carry``: from file to file with the bundled model, and what it says of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import load_model
from kvloom.carry import from_cache, geometry_of, read_llama, write_llama
from kvloom.carry.files.beside import path_beside
from kvloom.cli import main
from kvloom.models import bundled_model_path

pytestmark = pytest.mark.model
MODEL = str(bundled_model_path())
TEXT = "import os\n\n\ndef main():\n    return os.getcwd()\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence's file of the text without its last token, and the text."""
    from carry.models import prefilled

    folder = tmp_path_factory.mktemp("carry")
    model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    cache = from_cache(prefilled(model, ids[:, :-1]), model, ids[0, :-1].tolist())
    write_llama(cache, folder / "a.bin", geometry_of(model))
    (folder / "text.py").write_text(TEXT)
    (folder / "ids.json").write_text(json.dumps(ids[0].tolist()))
    return folder / "a.bin"


def carry(*options: Any) -> int:
    return main(["carry", *map(str, options), "--model", MODEL])


def test_a_cache_goes_round_all_formats(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlx, arrays, back = (source.with_name(x) for x in ("b.mlx", "c.safetensors", "d.bin"))
    assert carry(source, "--to", "mlx", "--out", mlx, "--prompt-file", source.with_name("text.py")) == 0
    said = capsys.readouterr().out
    assert "tokens of 5 layers (float32)" in said
    assert "first layer off by" in said
    assert carry(mlx, "--to", "safetensors", "--out", arrays) == 0  # which now knows its tokens
    assert "first layer off by" in capsys.readouterr().out
    assert carry(arrays, "--from", "safetensors", "--to", "llama.cpp", "--out", back) == 0
    assert back.read_bytes() == source.read_bytes()
    assert (
        json.loads(path_beside(back).read_text())["tokens"]
        == json.loads(source.with_name("ids.json").read_text())[:-1]
    )


def test_describe_needs_no_model(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["carry", str(source), "--describe"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("llama.cpp, file of a sequence, ")
    count = len(json.loads(source.with_name("ids.json").read_text())) - 1
    assert said[1] == f"cache of 5 layers, {count} cells, positions 0 to {count - 1}"
    assert said[2] == "  keys: 5 of f32 with 128 elements"
    assert said[-1] == "not in the file: heads, order of pairs"


def test_codes_are_asked_for_and_checked(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, ids = source.with_name("e.bin"), source.with_name("ids.json")
    options = (source, "--to", "llama.cpp", "--out", out, "--kind", "q8_0", "--tokens", ids)
    assert carry(*options) == 2
    assert "--out-rotated must be given for codes of llama.cpp" in capsys.readouterr().err
    assert carry(*options, "--out-rotated", "yes") == 2
    assert "rounding was not asked for" in capsys.readouterr().err
    assert carry(*options, "--out-rotated", "yes", "--round") == 0
    assert carry(out, "--to", "mlx", "--out", source.with_name("f"), "--rotated", "no", "--tokens", ids) == 2
    assert "it is with other rotation" in capsys.readouterr().err
    assert carry(out, "--to", "mlx", "--out", source.with_name("f"), "--rotated", "yes", "--tokens", ids) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--out", "x"), "--to must be given unless --describe is"),
        (("--to", "mlx"), "--out must be given"),
        (("--to", "mlx", "--out", "x", "--tokens", "short.json"), "--tokens must have a token more than the"),
        (
            ("--to", "mlx", "--out", "x", "--tokens", "other.json"),
            "--tokens must begin with the tokens",
        ),
        (("--to", "llama.cpp", "--out", "x", "--pairs", "halves"), "it is with other pairs"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    source: Path, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = json.loads(source.with_name("ids.json").read_text())
    source.with_name("short.json").write_text(json.dumps(ids[:-1]))
    source.with_name("other.json").write_text(json.dumps([ids[0] + 1, *ids[1:]]))
    found = [str(source.with_name(x)) if x == "x" or x.endswith(".json") else x for x in options]
    assert carry(source, *found) == 2
    assert said in capsys.readouterr().err
    assert not source.with_name("x").exists()


def test_another_model_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, ids = source.with_name("g.bin"), source.with_name("ids.json")
    assert carry(source, "--to", "llama.cpp", "--out", out, "--tokens", ids) == 0
    path_beside(out).write_text(json.dumps({"kvloom": "0" * 64, "tokens": None}))
    assert carry(out, "--to", "mlx", "--out", source.with_name("h"), "--tokens", ids) == 2
    assert "model must be that which computed the cache" in capsys.readouterr().err.replace("--", "")
    geometry = geometry_of(load_model(bundled_model_path(), progress=False)[0])
    assert read_llama(out, geometry).tokens is not None
