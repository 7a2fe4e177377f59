"""How far quantized pages are from float pages in vLLM, by its own ``prompt_logprobs``."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt

from kvloom.models import bundled_model_path
from kvloom.models.corpus import iter_texts

PROMPT, PROMPTS = 500, 16


class Difference(NamedTuple):
    """Of the next-token distributions of all prompts.

    Attributes:
        mean_kl: Mean of KL(float pages || pages), in nats.
        same: Part of the positions at which the same token is the likeliest.
    """

    mean_kl: float
    same: float


@contextmanager
def engine(**arguments: Any) -> Iterator[LLM]:
    """An engine of the bundled model, which lives for this context."""
    common = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 1024}
    llm = LLM(model=str(bundled_model_path()), max_logprobs=-1, **common, **arguments)
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
    """``[PROMPTS * (PROMPT - 1), V]`` float32, those of each token behind the first."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    rows = []
    for text in texts(llm):
        (request,) = llm.generate([TokensPrompt(prompt_token_ids=text)], sampling, use_tqdm=False)
        for place in request.prompt_logprobs[1:]:
            row = torch.empty(len(place))
            row[list(place)] = torch.tensor([x.logprob for x in place.values()])
            rows.append(row)
    return torch.stack(rows)


def differences(kinds: dict[str, dict[str, Any]], dtype: str) -> dict[str, Difference]:
    """Of engines by their arguments, from one with float pages of vLLM's."""
    with engine(dtype=dtype) as llm:
        expected = log_probs(llm)
    found = {}
    for name, arguments in kinds.items():
        with engine(dtype=dtype, **arguments) as llm:
            log = log_probs(llm)
        kl = (expected.exp() * (expected - log)).sum(1).mean()
        same = (expected.argmax(1) == log.argmax(1)).double().mean()
        found[name] = Difference(float(kl), float(same))
    return found
