"""What ``kvloom serve`` reads of published folders: the tokens that end an answer, and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published.folders import PUBLISHED, Folder
from transformers import AutoTokenizer, GenerationConfig

from kvloom.integrations.transformers.models.text_config import token_ids_in
from kvloom.integrations.transformers.versions import IS_4
from kvloom.models import bundled_model_path

pytest.importorskip("jinja2")
from kvloom.serving.protocol.messages import Chat

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(IS_4, reason="kvloom serve needs transformers 5"),
]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
FOR_TOOLS = "{% for t in tools %}tool {{ t.function.name }}; {% endfor %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
MARKS = ("bos_token", "eos_token", "pad_token", "additional_special_tokens")
"""Fields that every tokenizer reads, whichever its class is."""


def test_ends_are_a_number_a_list_or_none(tmp_path: Path) -> None:
    kinds = set()
    for folder in PUBLISHED.values():
        said = folder.files.get("generation_config.json", {})
        (tmp_path / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
        ends = said.get("eos_token_id")
        read = token_ids_in(GenerationConfig.from_pretrained(tmp_path).eos_token_id)
        assert read == (ends if isinstance(ends, list) else [] if ends is None else [ends]), folder.name
        kinds.add(type(ends))
    assert kinds == {int, list, type(None)}


def tokenizer_of(folder: Folder, path: Path) -> Any:
    """The bundled model's tokenizer with a folder's marks, and a template in the place where it has one."""
    for file in ("tokenizer.json", "config.json"):
        (path / file).write_bytes((bundled_model_path() / file).read_bytes())
    published = folder.files.get("tokenizer_config.json", {})
    said: dict[str, Any] = {name: published[name] for name in MARKS if published.get(name)}
    said["tokenizer_class"] = "PreTrainedTokenizerFast"
    if folder.chat == "list":
        named = {"default": TEMPLATE, "tool_use": FOR_TOOLS}
        said["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif folder.chat == "file":
        (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    elif folder.chat is not None:
        said["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return AutoTokenizer.from_pretrained(path)


def of_each_place() -> list[str]:
    """A folder for each place of a template, and each form of its marks."""
    found: dict[Any, str] = {}
    for folder in PUBLISHED.values():
        marks = folder.files.get("tokenizer_config.json", {})
        place = folder.chat if folder.chat in ("list", "file", None) else "text"
        found.setdefault((place, *(type(marks.get(name)) for name in MARKS)), folder.name)
    return [*found.values()]


@pytest.mark.parametrize("name", of_each_place())
def test_a_chat_is_read_wherever_its_template_is(name: str, tmp_path: Path) -> None:
    folder = PUBLISHED[name]
    tokenizer = tokenizer_of(folder, tmp_path)
    chat = Chat.of({"messages": [{"role": "user", "content": "list files"}]})
    if folder.chat is None:
        with pytest.raises(ValueError, match="messages need a chat template, which the model does not have"):
            chat.text(tokenizer)
        return
    end = tokenizer.eos_token or ""
    assert chat.text(tokenizer) == f"[user] list files{end}"
    with_tool = Chat.of({"messages": [{"role": "user", "content": "list files"}], "tools": [TOOL]})
    if folder.chat == "list":
        assert with_tool.text(tokenizer) == f"tool ls; [user] list files{end}"
    else:
        with pytest.raises(ValueError, match="tools must be left out, as the model's chat template does not"):
            with_tool.text(tokenizer)
