"""Difference of quantized pages and float pages in vLLM, by its own ``prompt_logprobs``.

Models with outliers and biases in their keys are the bundled one, saved with such weights.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams, TokensPrompt

from kvloom.measuring.changed_keys import changed_keys
from kvloom.measuring.key_statistics import parse_statistics
from kvloom.models import bundled_model_path
from kvloom.models.corpus import iter_texts

PROMPT, PROMPTS = 500, 16


class Difference(NamedTuple):
    """Difference of the next-token distributions of all prompts.

    Attributes:
        mean_kl: Mean of KL(float pages || pages), in nats.
        same: Part of the positions at which the same token is the likeliest.
    """

    mean_kl: float
    same: float


def changed(folder: Path, keys: str) -> Path:
    """The bundled model in a folder, with keys of such statistics (as ``kvloom quality --keys``)."""
    shutil.copytree(bundled_model_path(), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = model.state_dict()
    with changed_keys(model, parse_statistics("keys", keys)), torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj") and "self_attn" in name:
                bias = module(torch.zeros(1, module.in_features))
                weights[f"{name}.weight"] = (module(torch.eye(module.in_features)) - bias).T.contiguous()
                weights[f"{name}.bias"] = bias[0]
    model.config.attention_bias = True
    with_biases: nn.Module = AutoModelForCausalLM.from_config(model.config)
    with_biases.load_state_dict(weights)
    with_biases.save_pretrained(folder)
    return folder


@contextmanager
def engine(model: Path, **arguments: Any) -> Iterator[LLM]:
    """An engine of a model, which lives for this context."""
    common = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024}
    llm = LLM(model=str(model), max_logprobs=-1, **common, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def texts(llm: LLM) -> list[list[int]]:
    """``PROMPTS`` of ``PROMPT`` held-out tokens each."""
    tokenizer = llm.get_tokenizer()
    tokens = (tokenizer(text).input_ids[:PROMPT] for text in iter_texts("heldout", 4000))
    return list(islice((x for x in tokens if len(x) == PROMPT), PROMPTS))


def log_probs(llm: LLM) -> Tensor:
    """Log probabilities ``[PROMPTS * (PROMPT - 1), V]`` float32 of each token after the first."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    rows = []
    for text in texts(llm):
        (request,) = llm.generate([TokensPrompt(prompt_token_ids=text)], sampling, use_tqdm=False)
        for place in request.prompt_logprobs[1:]:
            row = torch.empty(len(place))
            row[list(place)] = torch.tensor([x.logprob for x in place.values()])
            rows.append(row)
    return torch.stack(rows)


def differences(
    kinds: dict[str, dict[str, Any]], dtype: str, model: Path | None = None
) -> dict[str, Difference]:
    """Differences of engines of a model, the bundled one by default, from one with float pages of vLLM's."""
    model = model or bundled_model_path()
    with engine(model, dtype=dtype) as llm:
        expected = log_probs(llm)
    found = {}
    for name, arguments in kinds.items():
        with engine(model, dtype=dtype, **arguments) as llm:
            log = log_probs(llm)
        kl = (expected.exp() * (expected - log)).sum(1).mean()
        same = (expected.argmax(1) == log.argmax(1)).double().mean()
        found[name] = Difference(float(kl), float(same))
    return found
