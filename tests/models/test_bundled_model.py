"""The bundled model is small, loads everywhere, has learned its language and says truthfully how well.

Its corpus is read from the interpreter that runs the tests, so thresholds leave room for other Pythons.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvloom.models import bundled_model_path, corpus_digest, corpus_files, iter_texts, split_of

FOLDER = bundled_model_path()


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="loads the tokenizer")
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers", reason="loads and runs the model")
    torch = pytest.importorskip("torch", reason="loads and runs the model")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def heldout_tokens(tokenizer: Any) -> Any:
    """The first 1025 tokens of eight held-out files."""
    torch = pytest.importorskip("torch", reason="runs the model")
    encoded = (tokenizer(text).input_ids for text in iter_texts("heldout", min_characters=5000))
    return torch.tensor([ids[:1025] for ids in encoded if len(ids) > 1024][:8])


def next_token_nats(model: Any, inputs: Any, targets: Any) -> Any:
    torch = pytest.importorskip("torch", reason="runs the model")
    with torch.no_grad():
        logits = model(inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")


@pytest.fixture(scope="module")
def heldout_nats(model: Any, heldout_tokens: Any) -> Any:
    """Losses in nats, (8 files, 1024 positions), each with all the file before it as context."""
    return next_token_nats(model, heldout_tokens[:, :-1], heldout_tokens[:, 1:])


def test_the_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 10_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(sizes)
    assert {"MODEL_CARD.md", "training.json"} <= set(sizes)


def test_the_config_is_a_grouped_query_llama() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"] == 4
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 2048


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "    def f(x):\n        return x  \n",
        "\tif x :\r\n\t\treturn 'n't' , \"don 't\" .\r\n\r\n",
        "naïve 漢字 🙂 a\u0301 \u200b\u00a0\ufeff\x00\x1b",
        "trailing   \n\n\n   ",
        "<|bos|> is only text here<|eos|>",
        "x" * 5000,
    ],
    ids=["empty", "space", "indented", "tabs-crlf", "unicode", "trailing", "special", "long"],
)
def test_the_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_pads_left_and_adds_nothing(tokenizer: Any) -> None:
    batch = tokenizer(["x", "x = 12"], padding=True)
    assert batch["input_ids"][0][:-1] == [tokenizer.pad_token_id] * (len(batch["input_ids"][1]) - 1)
    assert batch["attention_mask"][0][-1] == 1
    assert sum(batch["attention_mask"][0]) == 1
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_a_chat_is_source_that_goes_on(tokenizer: Any) -> None:
    """An answer that is sent back follows the prompt that it answered, so that its prefix is found."""
    asked = [{"role": "system", "content": "Files.\n"}, {"role": "user", "content": "Count\nlines"}]
    first = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert first == "<|bos|>import os\nimport sys\n\n\n# Files.\n# Count\n# lines\ndef"
    said = {"role": "assistant", "content": " count(path):\n    return 1\n"}
    again = [*asked, said, {"role": "user", "content": "Write"}]
    second = tokenizer.apply_chat_template(again, add_generation_prompt=True, tokenize=False)
    assert second == f"{first} count(path):\n    return 1\n\n\n# Write\ndef"
    assert tokenizer.apply_chat_template([*asked, said], tokenize=False) == second[: -len("# Write\ndef")]


def test_the_split_is_by_name_disjoint_and_whole() -> None:
    train, heldout = corpus_files("train"), corpus_files("heldout")
    assert sorted(f.name for f in train + heldout) == [f.name for f in corpus_files()]
    assert not {f.name for f in train} & {f.name for f in heldout}
    assert 0.02 < len(heldout) / len(train + heldout) < 0.12
    assert corpus_digest(train) != corpus_digest(heldout)


@pytest.mark.parametrize("name", ["threading.py", "plistlib.py", "calendar.py", "asyncio/streams.py"])
def test_these_files_are_held_out(name: str) -> None:
    assert split_of(name) == "heldout"


@pytest.mark.parametrize("name", ["argparse.py", "subprocess.py", "typing.py", "json/decoder.py"])
def test_these_files_are_trained_on(name: str) -> None:
    assert split_of(name) == "train"


def test_the_corpus_leaves_out_tests_packages_and_tables(tmp_path: Path) -> None:
    kept = ["a.py", "pkg/b.py", "testing.py"]
    left_out = ["test/c.py", "pkg/tests/d.py", "site-packages/e.py", "encodings/f.py", "pkg/g.txt"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\r\n", encoding="utf-8", newline="")
    files = corpus_files(root=tmp_path)
    assert [file.name for file in files] == kept
    assert files[0].read() == "x = 1\n"


def test_a_library_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="standard library"):
        corpus_files(root=tmp_path)


def test_heldout_loss_is_far_below_the_bigrams(heldout_nats: Any, report: dict[str, Any]) -> None:
    assert heldout_nats.shape == (8, 1024)
    assert heldout_nats.mean() < report["losses"]["bigram"]["nats_per_token"] - 1.0


def test_the_model_profits_from_a_long_context(model: Any, heldout_tokens: Any, heldout_nats: Any) -> None:
    late = heldout_tokens[:, 512:]
    windows = next_token_nats(model, late[:, :-1].reshape(-1, 64), late[:, 1:].reshape(-1, 64))
    assert heldout_nats[:, 512:].mean() < windows.mean() - 0.3


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("class Point:\n    def __repr__(", "self"),
        ("import os\nimport sys\n\n\ndef main():\n    if not os.path.exists", "("),
        ("    try:\n        value = int(text)\n    except", " ValueError"),
    ],
)
def test_greedy_continuations_are_python(model: Any, tokenizer: Any, prompt: str, continuation: str) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0]).startswith(prompt + continuation)


def test_the_report_agrees_with_itself(report: dict[str, Any]) -> None:
    losses, heldout = report["losses"], report["heldout"]
    for row in losses.values():
        assert row["perplexity"] == pytest.approx(math.exp(row["nats_per_token"]), rel=1e-3)
        bits = row["nats_per_token"] / math.log(2) * heldout["target_tokens"]
        assert row["bits_per_byte"] == pytest.approx(bits / heldout["target_bytes"], rel=1e-3)
    assert losses["model"]["nats_per_token"] < losses["bigram"]["nats_per_token"] - 1
    assert losses["bigram"]["nats_per_token"] < losses["unigram"]["nats_per_token"] - 1


def test_the_reported_curve_is_the_reported_run(report: dict[str, Any]) -> None:
    curve, settings = report["curve"], report["settings"]
    steps = [point["step"] for point in curve]
    assert steps == sorted(set(steps))
    assert steps[-1] == settings["steps"]
    assert curve[-1]["tokens"] == report["tokens_seen"] == settings["steps"] * settings["batch_tokens"]
    assert curve[-1]["heldout_nats"] < curve[0]["heldout_nats"]
    assert curve[-1]["heldout_nats"] == pytest.approx(report["losses"]["model"]["nats_per_token"], abs=0.3)


def test_the_report_counts_the_models_parameters(report: dict[str, Any], model: Any) -> None:
    assert report["parameters"] == model.num_parameters()
