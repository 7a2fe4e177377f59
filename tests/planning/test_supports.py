"""``kvloom supports`` says what each layer keeps, and refuses what the doors refuse, in their words."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers
from integrations.cache.test_cross_layers import mllama
from integrations.models.test_families import family
from transformers import AutoConfig

from kvloom import KVCache, KVPool
from kvloom.cli import main
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.supports import USES, support_of
from kvloom.planning.supports import support_of_config

ROOT = Path(__file__).parents[2]


def supports(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    config.save_pretrained(tmp_path)
    main(["supports", "--model", str(tmp_path), *options])
    return capsys.readouterr().out


def test_a_model_of_attention_allows_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(supports(AutoConfig.for_model("llama"), tmp_path, capsys, "--json"))
    assert found["layers"] == {"keys and values": 32}
    if transformers.__version__ >= "5.19":
        assert found["why_not"] == dict.fromkeys(USES, "")
    else:
        assert found["why_not"] | dict.fromkeys(USES[3:], "") == dict.fromkeys(USES, "")


def test_windows_and_reasons_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = supports(AutoConfig.for_model("mllama"), tmp_path, capsys)
    assert "32 keep keys and values\n" in out and "8 keep keys and values of pictures\n" in out
    assert "KVPool " in out and "no: model must keep tokens or recurrent states in every layer" in out
    out = supports(AutoConfig.for_model("gemma2"), tmp_path, capsys)
    assert "13 keep keys and values of the last 4096 tokens\n" in out


@pytest.mark.parametrize("name", ["bart", "whisper", "t5"])
def test_of_an_encoder_and_a_decoder_both_halves_are_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not what the decoder alone allows, of which transformers has a model, too."""
    out = supports(AutoConfig.for_model(name), tmp_path, capsys)
    assert re.search(r"(\d+) keep keys and values\n +\1 keep keys and values of an encoder\n", out)
    assert re.search(
        r"KVCache +yes\nKVCache, static +yes\nKVPool +yes\ncontinuous_batching +no: model must be a", out
    )


def test_half_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = supports(AutoConfig.for_model("blip"), tmp_path, capsys)
    assert re.search(r"KVCache +half: keys and values of the encoder stay", out)


def test_a_door_refuses_in_the_same_words() -> None:
    model = mllama()
    with pytest.raises(UnsupportedError) as refused:
        KVPool.for_model(model, max_tokens=64)
    assert str(refused.value) == support_of(model).why_not["KVPool"]


@pytest.mark.parametrize("use", ["KVCache", "KVPool"])
def test_what_is_allowed_is_made(use: str) -> None:
    for name in ("Llama", "Gemma3", "DeepSeek-V3"):
        model = family(name)
        assert support_of(model).why_not[use] == ""
        KVCache.for_model(model) if use == "KVCache" else KVPool.for_model(model, max_tokens=64)


def test_something_else_is_no_model() -> None:
    with pytest.raises(UnsupportedError, match=r"^model must be one of transformers .*, got ViT"):
        support_of_config(AutoConfig.for_model("vit"))


def test_the_page_says_what_the_models_say() -> None:
    """A sample of its rows; with another version of transformers the page is of another table."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    if f"With transformers {transformers.__version__}, " not in text:
        pytest.skip(
            "families have other defaults in other versions: scripts/list_models.py writes those of this one"
        )
    module = runpy.run_path(str(ROOT / "scripts" / "list_models.py"))
    names = "llama gemma3_text deepseek_v32 qwen3_next falcon_h1 mamba moshi blt bart whisper blip mllama"
    for name in names.split():
        line = module["row"](name, module["support"](name), [])
        [told] = [x for x in text.splitlines() if x.startswith(f"| `{name}` |")]
        found, expected = (re.sub(r"\[\^\d+\]", "", x).strip() for x in (line, told))
        assert found == expected
