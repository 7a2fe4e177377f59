"""What folders of widely used models say: config.json, generation_config.json, tokenizer_config.json.

``said`` has them by their names on the Hub, in a file for each maker, with ``chat``, the kind of their chat
template. Long lists of numbers are shortened where nothing reads them; RoPE factors of the Phi models rise
evenly between their first and last numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from published.cutting import cut, cut_ids

TEXT_ALONE = {"llama4": "Llama4ForCausalLM", "gemma3n": "Gemma3nForCausalLM"}
"""Whose models of text and pictures do not run here: they lack a package, or fail without a picture."""
UNPLANNED = {
    "gemma-3n-E2B-it": "TimmWrapperModel requires the timm library",
    "recurrentgemma-2b-it": "a model that keeps recurrent states in its cache",
    "MiniMax-Text-01-hf": "MiniMax uses cache of its own",
    "rwkv-4-169m-pile": "must work with a DynamicCache, got RwkvForCausalLM, which has a cache of its own",
    "Llama-3.2-11B-Vision-Instruct": "got keys and values of pictures",
    "openai-gpt": "must take a cache, which OpenAIGPTLMHeadModel does not",
}
"""Models that no cache of kvloom fits, or whose package is missing, and what is said of them."""
SAID = Path(__file__).with_name("said")


@dataclass(frozen=True)
class Folder:
    """Files of one model's folder.

    Attributes:
        name: Name on the Hub, without the maker.
        files: What each file says.
        chat: Kind of the chat template: ``"chatml"``, ``"headers"``, ``"inst"`` and others; ``"file"`` for
            one in a file of its own, ``"list"`` for several in tokenizer_config.json; ``None`` without any.
    """

    name: str
    files: dict[str, dict[str, Any]]
    chat: str | None

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says."""
        return self.files["config.json"]

    @property
    def family(self) -> str:
        """Its ``model_type``."""
        return str(self.config["model_type"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells its configuration from others for a plan, but for the family."""
        text = self.config.get("text_config", self.config)
        said = self.config.get("quantization_config", {})
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        return (
            said.get("quant_method"), said.get("format"), said.get("bits"), "auto_map" in self.config,
            rope.get("rope_type", rope.get("type")), text is self.config, "layer_types" in text,
            text.get("sliding_window") is None,
        )  # fmt: skip

    def write(self, path: Path) -> Path:
        """The files, as published."""
        for name, said in self.files.items():
            (path / name).write_text(json.dumps(said), encoding="utf-8")
        return path

    def written_small(self, path: Path) -> Path:
        """The files, of a model that runs."""
        small = {name: cut_ids(said) for name, said in self.files.items()} | {"config.json": cut(self.config)}
        return Folder(self.name, small, self.chat).write(path)


def small_model(folder: Path) -> Any:
    """The random model in float32 of a folder that was written small, with its generation_config.json."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(0)
    if config.model_type in TEXT_ALONE:
        config, name = config.get_text_config(), TEXT_ALONE[config.model_type]
    else:
        [name] = config.architectures
    if hasattr(transformers, name):
        model = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
    else:  # a name of the code beside the files
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _read() -> dict[str, Folder]:
    found = {}
    for file in sorted(SAID.glob("*.json")):
        for name, said in json.loads(file.read_text(encoding="utf-8")).items():
            chat = said.pop("chat", None)
            assert name not in found, name
            found[name] = Folder(name, said, chat)
    return found


PUBLISHED = _read()
"""All folders, by their names."""


def one_of_each(kind: Callable[[Folder], Hashable]) -> list[str]:
    """Names of the first folder of each kind."""
    found: dict[Hashable, str] = {}
    for folder in PUBLISHED.values():
        found.setdefault(kind(folder), folder.name)
    return [*found.values()]
