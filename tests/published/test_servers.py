"""``kvloom serve`` of published folders: a chat has the stock cache's tokens, or is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import campaign
import pytest
import torch
from published.folders import PUBLISHED, one_of_each, small_model
from published.test_chats import TOOL, tokenizer_of
from published.test_doors import NEW, PIECES, runs
from transformers import ContinuousBatchingConfig, GenerationMixin

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.supports import support_of
from kvloom.integrations.transformers.versions import IS_4

if IS_4:
    pytest.skip("kvloom serve needs transformers 5", allow_module_level=True)
pytest.importorskip("uvicorn")
from oracles.serving import Served, running

from kvloom.serving.answering.session import ServingSession
from kvloom.serving.endpoints.models import Model
from kvloom.serving.settings import Settings

pytestmark = pytest.mark.model
SETTINGS = Settings(port=0)
ASKED = [{"role": "user", "content": "def walk(path):"}]
NAMES = [x for x in (PUBLISHED if campaign.is_whole() else one_of_each(lambda x: x.family)) if runs(x)]


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_has_the_stock_tokens(name: str, tmp_path: Path) -> None:
    folder = PUBLISHED[name]
    model = small_model(folder.written_small(tmp_path))
    (tmp_path / "tokenizer").mkdir()
    tokenizer = tokenizer_of(folder, tmp_path / "tokenizer")
    support = support_of(model)
    options = ContinuousBatchingConfig(page_size=16, num_blocks=64)
    if model.config.model_type in PIECES or support.why_not["continuous_batching"]:
        with pytest.raises(UnsupportedError, match=r"^model must "):
            session = ServingSession(model, tokenizer, SETTINGS, options)
            with running([Model(("small",), session)], SETTINGS):
                pass
        return
    expected = stock_text(model, tokenizer)
    session = ServingSession(model, tokenizer, SETTINGS, options)
    with running([Model(("small",), session)], SETTINGS) as port:
        served = Served(session, port, SETTINGS)
        status, answer = ask(served, {})
        if folder.chat is None:
            assert status == 400 and "need a chat template" in answer["error"]["message"]
            return
        assert status == 200, answer
        [choice] = answer["choices"]
        assert choice["message"]["content"] == expected
        status, answer = ask(served, {"tools": [TOOL]})
        if folder.chat == "list":
            assert status == 200, answer
        else:
            assert status == 400 and "tools must be left out" in answer["error"]["message"]


def ask(served: Served, fields: dict[str, Any]) -> tuple[int, Any]:
    """Status and answer of a greedy chat."""
    asked = {"messages": ASKED, "max_tokens": NEW, "temperature": 0} | fields
    status, body = served.send("POST", "/v1/chat/completions", json.dumps(asked).encode())
    return status, json.loads(body)


def stock_text(model: Any, tokenizer: Any) -> str:
    """What ``generate`` answers with transformers' own cache."""
    if tokenizer.chat_template is None:
        return ""
    given = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = GenerationMixin.generate(
            copy.deepcopy(model),
            given["input_ids"],
            do_sample=False,
            num_beams=1,
            max_new_tokens=NEW,
            min_length=0,
        )
    text: str = tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return text
