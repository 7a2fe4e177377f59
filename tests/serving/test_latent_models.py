"""A server of a model with multi-head latent attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from integrations.attention.test_latents import FAMILIES, family
from oracles.serving import PROMPT, served

from kvloom.integrations.transformers import disable, enable, load_model
from kvloom.models import bundled_model_path


@pytest.mark.skipif(not FAMILIES, reason="this version of transformers caches no latents")
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_answers_are_those_of_generate(kv: str) -> None:
    _, tokenizer = load_model(bundled_model_path(), progress=False)
    model = family("deepseek_v3", vocab_size=len(tokenizer), kv_lora_rank=64, qk_rope_head_dim=16)
    prompts = [PROMPT, PROMPT + " files", "import"]

    def generated(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    enable(model, kv)
    expected = [generated(prompt) for prompt in prompts]
    disable(model)
    with served(kv, model=model) as server, server.client() as client:

        def answer(prompt: str) -> Any:
            return client.completions.create(model="bundled", prompt=prompt, max_tokens=6, temperature=0)

        with ThreadPoolExecutor(3) as threads:
            answers = [x.choices[0].text for x in threads.map(answer, prompts)]
        report = server.session.report()
    assert report.batch_invariant and report.page_size == 16
    assert answers == expected
