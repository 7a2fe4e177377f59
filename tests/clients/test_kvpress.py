"""kvpress compresses a ``KVCache`` in its pipeline, and answers as over transformers' own cache."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import DynamicCache, pipeline

from kvloom import KVCache, load_model
from kvloom.models import bundled_model_path

CONTEXT = (
    "import os\nimport sys\n\n\ndef walk(path, name):\n    for root, dirs, files in os.walk(path):\n" * 4
)
QUESTION = "\n\ndef main():\n    for path in"

pytestmark = [
    pytest.mark.skipif(find_spec("kvpress") is None, reason="needs kvpress, which `make test-clients` gets"),
    pytest.mark.filterwarnings("ignore"),  # of kvpress and of what it needs
]


@pytest.mark.parametrize("name", ["KnormPress", "SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress"])
def test_answers_are_those_of_the_stock_cache(name: str) -> None:
    import kvpress

    model, tokenizer = load_model(bundled_model_path(), progress=False)
    ask: Any = pipeline("kv-press-text-generation", model=model.float(), tokenizer=tokenizer)
    press = getattr(kvpress, name)(compression_ratio=0.5)

    def answer(cache: Any, press: Any) -> str:
        return ask(CONTEXT, question=QUESTION, press=press, cache=cache, max_new_tokens=16)["answer"]

    stock, ours, whole = DynamicCache(config=model.config), KVCache.for_model(model), KVCache.for_model(model)
    assert answer(ours, press) == answer(stock, press)
    torch.testing.assert_close(ours.layers[0].keys, stock.layers[0].keys)
    answer(whole, None)
    assert ours.get_seq_length() == stock.get_seq_length() == whole.get_seq_length() // 2
