"""TRL trains a model whose completions are generated in sessions on pages of this library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import continuous_batching, load_model
from kvloom.models import bundled_model_path

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl, which `make test-clients` gets"),
    pytest.mark.filterwarnings("ignore"),  # of TRL and of what it needs
]


def test_grpo_generates_in_sessions_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_model(bundled_model_path(), progress=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    continuous_batching(model.float(), kv="int8")
    managers, rewarded, begin = [], [], model.init_continuous_batching

    def noted(*args: Any, **options: Any) -> Any:
        managers.append(begin(*args, **options))
        return managers[-1]

    model.init_continuous_batching = noted

    def reward(completions: list[str], **columns: Any) -> list[float]:
        rewarded.append(completions)
        return [float(len(text)) for text in completions]

    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        max_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"page_size": 16, "num_blocks": 64},
    )
    before = [x.detach().clone() for x in model.parameters()]
    attention = model.config._attn_implementation
    data = Dataset.from_dict({"prompt": ["import os\n\ndef main", "import sys\n\nclass Reader"] * 4})
    GRPOTrainer(model, reward, args=arguments, train_dataset=data, processing_class=tokenizer).train()
    assert [len(texts) for texts in rewarded] == [4, 4]
    assert len({*rewarded[0]}) > 1
    assert managers and all(manager.report().kv.startswith("int8") for manager in managers)
    assert model.config._attn_implementation == attention
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
