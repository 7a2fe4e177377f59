"""``kvloom quality``: its options, its table, and its plot."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracles.language_models import FakeQuantCache4
from transformers import AutoTokenizer

import kvloom
from kvloom.cli import main
from kvloom.measuring.chart import Point, as_svg
from kvloom.models import bundled_model_path

SVG = "http://www.w3.org/2000/svg"


def test_command_prints_a_row_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("def load(path):\n    return open(path).read()\n" * 9, encoding="utf-8")
    arguments = ["quality", "--text", str(file), "--kv", "int8", "--kv", "int4:g32,recent=8"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    for word in ("DynamicCache", "5,120", "kvloom int8", "kvloom int4:g32,recent=8", "perplexity"):
        assert word in table
    plot, page = tmp_path / "plot.svg", tmp_path / "page.html"
    assert main([*arguments, "--json", "--tokens", "40", "--plot", str(plot), "--html", str(page)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["DynamicCache", "int8", "int4:g32,recent=8"]
    assert [row["nbytes_per_token"] for row in rows] == [5120, 1320, 720 + 32 * 5120 / 8192]
    assert rows[0]["num_tokens"] == 39
    assert rows[0]["worst_head"] is None
    assert rows[2]["worst_head"]["error"] > rows[1]["worst_head"]["error"] > 0.0
    assert [len(heads) for heads in rows[1]["head_errors"].values()] == [4] * 5
    assert main([*arguments, "--json", "--tokens", "60", "--window", "20", "--after", "10"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["num_tokens"] == 3 * 9
    assert ">kvloom int4:g32,recent=8</text>" in plot.read_text(encoding="utf-8")
    shared = page.read_text(encoding="utf-8")
    assert plot.read_text(encoding="utf-8") in shared and '<td class="number">1,320</td>' in shared
    assert f"kvloom {kvloom.__version__}" in shared and "http" not in shared.replace(SVG, "")


def test_command_decodes_other_texts_with_other_keys(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quality", "--text", "torch", "--kv", "int8,smooth=none"]
    arguments += ["--tokens", "40", "--window", "20", "--decode"]
    found = {}
    for keys in ("plain", "outliers", "biases-high:30"):
        assert main([*arguments, "--keys", keys, "--json"]) == 0
        found[keys] = json.loads(capsys.readouterr().out)
        assert [row["num_tokens"] for row in found[keys]] == [2 * 9] * 2
    stock, outliers = (found[x][0]["perplexity"] for x in ("plain", "outliers"))
    assert outliers == pytest.approx(stock, rel=1e-3)
    for keys in ("outliers", "biases-high:30"):
        assert found[keys][1]["mean_kl"] > 3 * found["plain"][1]["mean_kl"]
    assert main([*arguments, "--after", "17", "--keys", "both"]) == 0
    assert "4 tokens of torch, decoded after 17 of 20, keys with both" in capsys.readouterr().out


def test_command_reads_as_long_a_text_as_the_model_has_positions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quality", "--kv", "int8", "--json", "--window", "max", "--tokens", "30"]
    monkeypatch.setattr("kvloom.integrations.transformers.models.positions.positions_of", lambda model: 10)
    assert main(arguments) == 0
    assert {row["num_tokens"] for row in json.loads(capsys.readouterr().out)} == {3 * 9}
    monkeypatch.setattr("kvloom.integrations.transformers.models.positions.positions_of", lambda model: None)
    assert main(arguments) == 2
    assert (
        "--window must be a number if the model's configuration says no positions, got 'max'"
        in capsys.readouterr().err
    )


def test_command_makes_a_plan_and_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, plan = tmp_path / "text.txt", str(tmp_path / "plan.json")
    text.write_text("def load(path):\n    return open(path).read()\n" * 9, encoding="utf-8")
    arguments = ["quality", "--text", str(text), "--calibrate", str(text), "--kv", "int8", "--tokens", "60"]
    assert main([*arguments, "--plan", plan, "--budget", "1000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows] == ["DynamicCache", "int8", plan]
    assert 950 < rows[2]["nbytes_per_token"] <= 1000 + 80 * 5120 / 8192
    assert main(["generate", "--prompt", "def f(", "--kv", plan, "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "int5"], "--kv must be one of"),
        (["--kv", "int8:g48"], "--kv must have a group"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--window", "1"], "--window must be at least 2, got 1"),
        (["--after", "511"], "--after must be from 0 to 510, got 511"),
        (["--decode", "--after", "511"], "--after must be from 0 to 510, got 511"),
        (["--keys", "real"], "--keys must be one of plain, outliers"),
        (["--text", "/nowhere/at/all"], "--text must be text in UTF-8"),
        (["--model", "/nowhere/at/all"], "--model must be"),
        (["--plan", "x.json"], "--bits or --budget must be given with --plan, got neither"),
        (["--plan", "x.txt", "--bits", "5"], "--plan must be a file that ends in .json, got x.txt"),
        (["--bits", "5"], "--plan must be given with --bits"),
        (["--calibrate", "/nowhere"], "--plan must be given with --bits"),
        (["--plan", "x.json", "--bits", "5", "--calibrate", "/nowhere"], "--calibrate must be text in UTF-8"),
        (["--plan", "x.json", "--bits", "0.5", "--tokens", "512"], "--bits must be at least"),
    ],
)
def test_command_names_the_option_that_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command_leaves_out_peers_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers.cache_utils

    def missing(backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "hqq":
            raise ImportError("You need to install `HQQ`\nin order to use it")
        return FakeQuantCache4()

    monkeypatch.setattr(transformers.cache_utils, "QuantizedCache", missing)
    file = tmp_path / "text.txt"
    file.write_text("def load(path):\n    return open(path).read()\n" * 9, encoding="utf-8")
    assert main(["quality", "--text", str(file), "--kv", "int8", "--peers", "--json", "--tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert [row["kind"] for row in json.loads(out)] == ["DynamicCache", "int8", "quanto int4"]
    assert err == "kvloom: left out hqq int4: You need to install `HQQ`\n"


def test_plot_has_a_point_of_each_kind_with_less_error_lower() -> None:
    points = [Point("float", 2560, 0.0), Point("a<b", 1320, 5e-5), Point("peer", 800, 1e-2, is_peer=True)]
    root = ET.fromstring(as_svg(points))
    circles = [x for x in root if x.tag.endswith("circle")]
    texts = [x.text for x in root.iter() if x.tag.endswith("text")]
    assert len(circles) == 2
    assert "a<b" in texts
    assert "float" not in texts  # an error of 0 has no place on a logarithmic axis
    ours, theirs = ({name: x.get(name) for name in ("cx", "cy", "fill")} for x in circles)
    assert float(ours["cx"]) > float(theirs["cx"])
    assert float(ours["cy"]) > float(theirs["cy"])
    assert ours["fill"] != theirs["fill"]


def test_plot_without_points_is_an_empty_one() -> None:
    assert ET.fromstring(as_svg([])).tag.endswith("svg")


BOTH = ["--document", "document.txt", "--text", "text.txt"]


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Bart that reads 30 tokens, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("bart")
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    sizes = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip
    config = transformers.BartConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=30)
    torch.manual_seed(0)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "document.txt").write_text("def load(path):\n    return 1\n", encoding="utf-8")
    (folder / "text.txt").write_text("load returns one, whatever path is" * 9, encoding="utf-8")
    return folder


def test_command_measures_what_a_decoder_says_of_a_document(
    encoder_decoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, text = encoder_decoder / "document.txt", encoder_decoder / "text.txt"
    asked = ["quality", "--model", str(encoder_decoder), "--document", str(document), "--text", str(text)]
    asked += ["--kv", "int8:g8", "--tokens", "40", "--window", "11"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = transformers.BartForConditionalGeneration.from_pretrained(encoder_decoder).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder_decoder)
    ids = tokenizer(text.read_text(encoding="utf-8")).input_ids[:40]
    texts = torch.tensor(ids).view(4, 10)
    texts = torch.cat([torch.full((4, 1), 2), texts], 1)
    read = torch.tensor([tokenizer(document.read_text(encoding="utf-8")).input_ids]).expand(4, -1)
    rows = kvloom.quality(model, texts, ["int8:g8"], encoder_inputs={"input_ids": read})
    for told, row in zip(found, rows, strict=True):
        assert told["mean_kl"] == pytest.approx(row.mean_kl, rel=1e-3)
        assert told["perplexity"] == pytest.approx(row.perplexity)
        assert (told["num_tokens"], told["nbytes_per_encoder_token"]) == (40, row.nbytes_per_encoder_token)
    assert found[1]["worst_encoder_head"]["error"] > 0
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "encoder's head" in shown and f" {rows[1].nbytes_per_encoder_token:,.0f} " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "text.txt"], "--document and --text must be given as files for BartFor"),
        (["--document", "document.txt"], "--document and --text must be given as files for BartFor"),
        (["--document", "nowhere.txt", "--text", "text.txt"], "--document must be text in UTF-8"),
        (["--document", "text.txt", "--text", "text.txt"], "--document must have at least 1 token and at"),
        ([*BOTH, "--window", "31"], "--window must be at most 30"),
        ([*BOTH, "--keys", "biases"], "--model must have no encoder, got BartForConditional"),
        ([*BOTH, "--plan", "x.json", "--bits", "5"], "--model must have no encoder, got BartFor"),
    ],
)  # fmt: skip
def test_command_names_what_an_encoder_decoder_needs(
    arguments: list[str],
    message: str,
    encoder_decoder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(encoder_decoder)
    assert main(["quality", "--model", ".", "--kv", "int8:g8", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_command_refuses_a_document_for_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "document.txt").write_text("def", encoding="utf-8")
    assert main(["quality", "--document", str(tmp_path / "document.txt")]) == 2
    assert (
        "--document must not be given for LlamaForCausalLM, which has no encoder" in capsys.readouterr().err
    )
