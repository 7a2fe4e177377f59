"""vLLM's engine in this process, its greedy tokens, and small models of random weights for it."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.models import bundled_model_path
from kvloom.models.corpus import iter_texts

NEW_TOKENS = 64
INT8, INT4 = "int8_per_token_head", "int4_per_token_head"
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SIZES = {"max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}


def needs_vllm() -> None:
    """Skip the module that calls this where there is no vLLM; ``make test-vllm`` has one."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})


def prompts() -> list[str]:
    """Twelve, short and long ones in turn."""
    texts = list(iter_texts("heldout", 4000))[:6]
    return [part for text in texts for part in (text[:300], text[1000:4000])]


class Engine:
    """``vllm.LLM`` of a model in this process."""

    def __init__(self, model: str | Path | None = None, **arguments: Any) -> None:
        from vllm import LLM

        arguments = {"dtype": "float32", **SIZES, **arguments}
        self.llm = LLM(model=str(model or bundled_model_path()), **arguments)

    def close(self) -> None:
        """Give its memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def run(self, texts: list[str], max_tokens: int = NEW_TOKENS, **sampling: Any) -> list[Any]:
        """Greedy requests."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
        return list(self.llm.generate(texts, parameters, use_tqdm=False))

    def tokens(self, texts: list[str], max_tokens: int = NEW_TOKENS) -> list[list[int]]:
        """What follows each text."""
        return [list(request.outputs[0].token_ids) for request in self.run(texts, max_tokens)]

    def kinds(self) -> set[str]:
        """Who attends, of all layers: ``"kvloom"``, ``"vLLM"``."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        layers = runner.compilation_config.static_forward_context.values()
        found = [layer.impl for layer in layers if hasattr(layer, "impl")]
        return {"kvloom" if impl.is_kvloom else "vLLM" for impl in found}


def tokens_of(
    model: str | Path | None = None, texts: list[str] | None = None, **arguments: Any
) -> list[list[int]]:
    """Greedy tokens of an engine that lives for this call."""
    with closing(Engine(model, **arguments)) as engine:
        return engine.tokens(texts or prompts())


CHILD = """
import json, sys
from integrations.vllm.engines import tokens_of
if __name__ == "__main__":
    found = tokens_of(**json.loads(sys.argv[1]))
    print("TOKENS", json.dumps(found))
"""


def search_path() -> str:
    """``PYTHONPATH`` of a process that imports these tests, and vLLM from where this one does."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).strip(
        os.pathsep
    )


def child(arguments: dict[str, Any], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``tokens_of`` in a process of its own, whose workers are others still."""
    script = folder / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    settings = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    } | environment
    command = [sys.executable, str(script), json.dumps(arguments)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


def tokens_of_child(arguments: dict[str, Any], folder: Path, **environment: str) -> list[list[int]]:
    """Greedy tokens of ``child``."""
    done = child(arguments, folder, **environment)
    found = [line.removeprefix("TOKENS ") for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert found, done.stdout + done.stderr
    tokens: list[list[int]] = json.loads(found[-1])
    return tokens


def random_model(folder: Path, config: Any, **changes: Any) -> Path:
    """A model of random weights, large enough that attention decides tokens, with the bundled tokenizer."""
    from transformers import AutoModelForCausalLM

    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                # What is tied to the output would repeat the last token if it were large.
                embedding = 0.02 if config.tie_word_embeddings else 1.0
                weight.normal_(std=embedding if "embed" in name else weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, folder / name)
    return folder
