"""A decoder step of the bundled model's first layers generates in ONNX Runtime what it does in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="runs models")
pytest.importorskip("onnxscript", reason="exports models")

from torch import Tensor

from kvloom.errors import ArgumentError
from kvloom.integrations import onnx as kvonnx
from kvloom.models import bundled_model_path

NEW_TOKENS, NUM_SLOTS, NUM_LAYERS = 64, 128, 2
PROMPTS = ("import os\n\n\ndef main():\n", "class Queue:\n    def __init__(self")


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="loads the bundled model")
    path = bundled_model_path()
    sizes = {"dtype": torch.float32, "num_hidden_layers": NUM_LAYERS}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **sizes).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def step_inputs(new: list[Tensor], starts: list[int], caches: Any, scales: Any) -> dict[str, Any]:
    """Sequences one behind the other, each with a run of slots of its own."""
    lengths, start = torch.tensor([0, *map(len, new)]), torch.tensor(starts)
    return {
        "token_ids": torch.cat(new),
        "position_ids": torch.cat([torch.arange(s, s + len(x)) for s, x in zip(starts, new, strict=True)]),
        "seqstarts": lengths.cumsum(0),
        "kvstarts": torch.cat((lengths[:1], lengths[1:] + start)).cumsum(0),
        "cachestarts": torch.arange(len(new)) * NUM_SLOTS,
        "start_pos": start,
        "decoding_batches": torch.tensor(0),
        "caches": caches,
        "scales": scales,
    }


def greedy(
    run: Callable[[dict[str, Any]], Tensor], step: kvonnx.DecoderStep, prompts: list[Tensor]
) -> list[list[int]]:
    """64 tokens for each prompt, all in one batch."""
    caches, scales = step.empty_caches(NUM_SLOTS * len(prompts))
    new, starts = prompts, [0] * len(prompts)
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        inputs = step_inputs(new, starts, caches, scales)
        chosen = run(inputs)[inputs["seqstarts"][1:] - 1].argmax(-1)
        starts = [s + len(x) for s, x in zip(starts, new, strict=True)]
        new = list(chosen.split(1))
        for row, token in zip(made, chosen.tolist(), strict=True):
            row.append(token)
    return made


def flat(inputs: dict[str, Any]) -> dict[str, Tensor]:
    feeds = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    lists = {name: x for name, x in inputs.items() if isinstance(x, list)}
    return feeds | {f"{name}_{i}": x for name, xs in lists.items() for i, x in enumerate(xs)}


@pytest.mark.parametrize("quant_bit", [0, 4], ids=["float", "int4"])
def test_64_greedy_tokens_are_those_of_pytorch(bundled: tuple[Any, Any], quant_bit: int) -> None:
    model, tokenizer = bundled
    step = kvonnx.DecoderStep(model, quant_bit=quant_bit)
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in PROMPTS]
    axes = {name: {0: "T"} for name in ("token_ids", "position_ids")}
    axes |= {name: {0: "ends"} for name in ("seqstarts", "kvstarts")}
    axes |= {name: {0: "B"} for name in ("cachestarts", "start_pos")}
    slots = [{3: "M"}] * NUM_LAYERS
    exported = kvonnx.export(
        step,
        step_inputs(prompts, [0, 0], *step.empty_caches(64)),
        dynamic={**axes, "caches": slots, "scales": slots if quant_bit else []},
        output_names=["logits"],
    )
    session = kvonnx.Session(exported, backend="onnxruntime")
    with torch.no_grad():
        expected = greedy(lambda x: step(**x), step, prompts)
    made = greedy(lambda x: session.run(flat(x))["logits"], step, prompts)
    assert made == expected
    assert greedy(lambda x: session.run(flat(x))["logits"], step, prompts[:1]) == expected[:1]
    if quant_bit == 0:
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        for prompt, row in zip(prompts, made, strict=True):
            whole = model.generate(prompt.unsqueeze(0), **options)
            assert whole[0, len(prompt) :].tolist() == row


def test_a_model_of_another_kind_is_named() -> None:
    with pytest.raises(ArgumentError, match="model must be a Llama-like"):
        kvonnx.DecoderStep(torch.nn.Linear(1, 1))
