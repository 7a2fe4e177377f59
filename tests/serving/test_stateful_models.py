"""A server of a model with recurrent states."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from oracles.serving import PROMPT, served
from oracles.stateful_models import NEEDS_STATES_IN_SESSIONS, stateful_model
from serving.test_metrics import read

from kvloom.integrations.transformers import load_model
from kvloom.models import bundled_model_path


@NEEDS_STATES_IN_SESSIONS
def test_answers_are_those_of_generate() -> None:
    _, tokenizer = load_model(bundled_model_path(), progress=False)
    model = stateful_model("qwen3_next", vocab_size=len(tokenizer))
    prompts = [PROMPT, " ".join([PROMPT] * 60), "import"]  # of the second one states are kept

    def generated(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    expected = [generated(prompt) for prompt in prompts]
    with served("auto", model=model) as server, server.client() as client:

        def answer(prompt: str) -> Any:
            return client.completions.create(model="bundled", prompt=prompt, max_tokens=6, temperature=0)

        for _ in range(2):
            with ThreadPoolExecutor(3) as threads:
                answers = [x.choices[0].text for x in threads.map(answer, prompts)]
            assert answers == expected
        server.until(finished=6, running=0)
        report, metrics = server.session.report(), read(server)
    assert report.finished == 6 and report.running == 0 == report.state_bytes
    assert metrics["kvloom_state_bytes", ""] == 0
    assert metrics["kvloom_found_state_bytes", ""] == report.found_state_bytes > 0
    assert not report.batch_invariant and report.not_invariant
