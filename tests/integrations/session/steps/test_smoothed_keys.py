"""Sessions smooth the keys of a model where they are codes, and know the positions of what requests see."""

from __future__ import annotations

import torch
from integrations.smoothing.test_doors import biased, said_of
from transformers import GenerationConfig

from kvloom import continuous_batching


def test_sessions_say_what_was_done_in_each_layer() -> None:
    model = biased()
    said = said_of(model)
    continuous_batching(model, "int4")
    report = model.init_continuous_batching().report()
    assert (report.kv, report.smoothing) == ("int4:g16", said)


def test_requests_behind_a_window_know_the_positions_of_what_they_see() -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    model = biased(eos_token_id=None, pad_token_id=0, **window)
    prompts = torch.randint(3, 199, (2, 560), generator=torch.Generator().manual_seed(6))
    options = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, 560:]
    continuous_batching(model, "int8")
    found = model.generate_batch(prompts.tolist(), GenerationConfig(**options), progress_bar=False)
    assert [output.generated_tokens for output in found.values()] == want.tolist()
