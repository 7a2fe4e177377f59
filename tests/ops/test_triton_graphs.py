"""On a CUDA device: no call waits for it, so a step is captured once and replayed over longer sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ops import kernels
from torch import Tensor

from kvloom import Batch, CacheIndex, KVSpec, KVView, QuantSpec, ops
from kvloom.models import bundled_model_path

pytestmark = [
    *kernels.pytestmark,
    pytest.mark.skipif(kernels.DEVICE != "cuda", reason="CUDA graphs need a CUDA device"),
]

ROWS, HEADS, HEAD_DIM, PAGE, MOST = 3, 2, 64, 16, 640


class Step:
    """A decode step on buffers that stay where they are."""

    def __init__(self, quant: QuantSpec | None) -> None:
        spec = KVSpec(1, HEADS, HEAD_DIM, torch.bfloat16, "2 B S H D", quant)
        cache, scale = spec.empty(ROWS * MOST, PAGE, device="cuda")
        self.kv = KVView.joint(spec.axes, cache, scale)
        pages = torch.randperm(ROWS * MOST // PAGE, device="cuda").view(ROWS, -1)
        self.index = CacheIndex.pages(pages * PAGE, PAGE)
        self.length = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.starts = torch.arange(ROWS + 1, device="cuda")
        self.key, self.value = torch.zeros(2, ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.query = torch.zeros(ROWS, 4 * HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def run(self, backend: str = "auto") -> Tensor:
        """One token more for each row."""
        slots = self.index.slots(self.starts[:-1], self.length)
        ops.store(self.key, self.value, slots, self.kv, backend=backend)
        self.length += 1
        kvstarts = torch.nn.functional.pad(self.length.cumsum(0), (1, 0))
        batch = Batch(self.index, self.starts, kvstarts)
        return ops.attend(self.query, self.kv, batch, backend=backend)


@pytest.mark.parametrize("quant", [None, QuantSpec(8, 64), QuantSpec(4, 64)], ids=["bf16", "int8", "int4"])
def test_replays_of_a_captured_step_equal_calls(quant: QuantSpec | None) -> None:
    torch.manual_seed(0)
    captured, called = Step(quant), Step(quant)
    called.index = captured.index
    captured.run()  # compiles
    captured.length.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.run()
    captured.length.zero_()
    for _ in range(600):
        for buffer in ("query", "key", "value"):
            x = torch.randn_like(getattr(called, buffer))
            getattr(called, buffer).copy_(x), getattr(captured, buffer).copy_(x)
        graph.replay()
        assert torch.equal(out, called.run())


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_generation_with_a_compiled_step_gives_the_tokens_of_plain_calls(kv: str) -> None:
    pytest.importorskip("transformers")
    from kvloom.integrations.transformers import KVCache, load_model

    path: Path = bundled_model_path()
    model, tokenizer = load_model(path)
    model = model.to("cuda", torch.bfloat16)
    model.set_attn_implementation("kvloom")
    prompt = tokenizer("import os\n\ndef main():\n", return_tensors="pt").to("cuda")
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    plain = model.generate(**prompt, past_key_values=KVCache.for_model(model, kv=kv), **options)
    forward = model.forward
    model.forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
    cache = KVCache.for_model(model, kv=kv, static=True, max_tokens=128)
    compiled = model.generate(**prompt, past_key_values=cache, disable_compile=True, **options)
    assert torch.equal(compiled, plain)
