"""Generation loops over a cache: against computing everything anew, compiled, and with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.bits import generator
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvloom.caches import Cache, SlidingWindowLayer, StaticLayer

VOCAB, WIDTH, HEADS, DIM, LAYERS = 50, 24, 3, 8, 2


class TinyModel(torch.nn.Module):
    """Attention layers with positions in the keys; ``window`` limits what a token sees."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        rng = generator(0)
        self.window = window
        self.embed = torch.randn(VOCAB, WIDTH, generator=rng)
        self.places = torch.randn(64, WIDTH, generator=rng)
        self.weights = torch.randn(LAYERS, 4, WIDTH, WIDTH, generator=rng) / WIDTH**0.5

    def forward(self, ids: Tensor, cache: Cache, padding_mask: Tensor | None = None) -> Tensor:
        """Logits ``[B, Q, VOCAB]``."""
        q_pos = cache.cache_position(ids.shape[1])
        x = self.embed[ids] + self.places[q_pos]
        for i, weights in enumerate(self.weights):
            query, key, value = ((x @ w).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w in weights[:3])
            columns, offset = cache.get_mask_sizes(ids.shape[1], i)
            keys, values = cache.update(key, value, i)
            k_pos = torch.arange(columns) + offset
            seen = k_pos <= q_pos[:, None]
            if self.window is not None:
                seen = seen & (k_pos > q_pos[:, None] - self.window)
            if padding_mask is not None:
                seen = seen & padding_mask[:, None, None, offset : offset + columns].bool()
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen)
            x = x + out.transpose(1, 2).flatten(2) @ weights[3]
        return x @ self.embed.T


def greedy(model: TinyModel, ids: Tensor, cache: Cache, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens of prompt and answer, and the logits that each of them but the first prompt gave."""
    logits = [model(ids, cache)]
    for _ in range(steps):
        ids = torch.cat([ids, logits[-1][:, -1:].argmax(-1)], 1)
        logits.append(model(ids[:, -1:], cache))
    return ids, torch.cat(logits, 1)


@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding", "recent"])
def test_steps_give_the_logits_of_computing_everything_anew(kind: str) -> None:
    window = 5 if kind == "sliding" else None
    cache = {
        "dynamic": Cache.dynamic,
        "static": lambda: Cache.static(30),
        "sliding": lambda: Cache(SlidingWindowLayer(5) for _ in range(LAYERS)),
        "recent": lambda: Cache.quantized("int8:g8", recent=40),
    }[kind]()
    model = TinyModel(window)
    prompt = torch.randint(0, VOCAB, (2, 9), generator=generator(1))
    ids, logits = greedy(model, prompt, cache, 12)
    torch.testing.assert_close(logits, model(ids, Cache.dynamic()), rtol=1e-4, atol=1e-4)


def test_quantized_steps_stay_close() -> None:
    model, prompt = TinyModel(), torch.randint(0, VOCAB, (2, 9), generator=generator(1))
    ids, logits = greedy(model, prompt, Cache.quantized("int8:g8", recent=4), 12)
    expected = model(ids, Cache.dynamic())
    assert 0 < (logits - expected).norm() / expected.norm() < 0.02


def test_padding_stays_hidden() -> None:
    """A padded row gives the logits of a row whose padding is another token."""
    model = TinyModel()
    ids = torch.tensor([[7, 7, 3, 4], [8, 9, 3, 4]])
    prompt_mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    cache = Cache.dynamic()
    for new in (ids, torch.tensor([[5], [5]]), torch.tensor([[6], [6]])):
        mask = cache.attention_mask(prompt_mask, new.shape[1])
        logits = model(new, cache, mask)[:, -1]
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.compile
def test_static_steps_compile_once() -> None:
    model, steps = TinyModel(), 8
    cache = Cache.static(20, LAYERS)
    for layer in cache.layers:
        assert isinstance(layer, StaticLayer)
        layer.allocate(2, HEADS, DIM, DIM, torch.float32)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda ids: model(ids, cache), backend=counter, fullgraph=True)
    prompt = torch.randint(0, VOCAB, (2, 6), generator=generator(1))
    with torch.no_grad():
        logits = [model(prompt, cache)]
        ids = prompt
        for _ in range(steps):
            ids = torch.cat([ids, logits[-1][:, -1:].argmax(-1)], 1)
            logits.append(step(ids[:, -1:].clone(memory_format=torch.contiguous_format)))
        expected = model(ids, Cache.dynamic())
    assert counter.frame_count == 1
    assert int(cache.get_seq_length()) == 6 + steps
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)
    cache.crop(6)
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        again = step(ids[[1, 0], 6:7].contiguous())
    assert counter.frame_count == 1
    torch.testing.assert_close(again, logits[1][[1, 0]])


class ForTransformers:
    """What the models of transformers ask of a cache, over one of ours."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.is_compileable = False
        self.is_sliding = self.is_linear = self.is_dummy = [False] * len(cache)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **_: Any
    ) -> tuple[Tensor, Tensor]:
        return self.cache.update(key, value, layer_idx, args[0] if args else None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.cache.get_seq_length(layer_idx))

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.cache.get_mask_sizes(count, layer_idx)


@pytest.mark.parametrize("kind", ["dynamic", "quantized"])
def test_published_loop_gives_the_tokens_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    cache = (
        Cache.dynamic(LAYERS)
        if kind == "dynamic"
        else Cache.quantized("int8:g8", recent=64, num_layers=LAYERS)
    )
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        inputs, generated = {"input_ids": ids, "attention_mask": cache.attention_mask(mask, 5)}, ids
        for _ in range(10):
            position = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)[
                :, -inputs["input_ids"].shape[1] :
            ]
            outputs = model(
                **inputs, position_ids=position, past_key_values=ForTransformers(cache), use_cache=True
            )
            new = outputs.logits[:, -1:].argmax(-1)
            generated = torch.cat([generated, new], 1)
            inputs = {"input_ids": new, "attention_mask": cache.attention_mask(mask, 1)}
        position = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        last = model(
            generated, attention_mask=inputs["attention_mask"], position_ids=position, use_cache=False
        )
        expected = model(
            generated[:, :-1], attention_mask=inputs["attention_mask"][:, :-1],
            position_ids=position[:, :-1], use_cache=False,
        ).logits  # fmt: skip
    assert cache.get_seq_length() == 14
    assert torch.equal(expected[:, 4:].argmax(-1), generated[:, 5:])
    torch.testing.assert_close(outputs.logits[:, -1], last.logits[:, -2], rtol=1e-4, atol=1e-4)
