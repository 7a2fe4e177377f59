"""Tokens of one layer in vLLM's pages, rotated codes and the newest ones unquantized; without vLLM.

Shapes: T tokens of one request, H key/value heads, Hq query heads, D head dim.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.transform import Transform, stored_by
from kvloom.core.specs import QuantSpec
from kvloom.integrations.vllm import layer
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.layer import Newest, Paged
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.ops import KeyOffset, KeySmoothing
from kvloom.quant.affine import dequantize, quantize

HEADS, QUERIES, DIM, TOKENS, RECENT = 2, 4, 64, 150, 16
CAUSAL = ops.Scores()
ROTATED = Transform(key=DIM)


def smoothing() -> KeySmoothing:
    """An offset of two pairs that turn, and gains."""
    generator = torch.Generator().manual_seed(1)
    gain = torch.exp2(torch.randint(-3, 4, (HEADS, DIM), generator=generator).float())
    mean = 5 * torch.randn(HEADS, 2, 2, generator=generator)
    channels = torch.tensor([[3, 35], [8, 40]]).expand(HEADS, -1, -1)
    frequencies = torch.tensor([0.5, 0.01], dtype=torch.float64).expand(HEADS, -1)
    return KeySmoothing(gain, KeyOffset(mean, channels, frequencies, DIM))


SMOOTHED = Transform(key=DIM, smoothing=smoothing())
INT4 = QuantSpec(4, full_range=True)


def memory_of(blocks: int, size: int, quant: QuantSpec | None) -> Tensor:
    """Pages that hold what others left, NaN among floats."""
    content = PageFormat.heads(DIM, torch.float32, quant).content_bytes
    return torch.full((blocks, HEADS, size, content), 0xFF, dtype=torch.uint8)


def step_in(blocks: list[int], size: int, new: int, stored: int = TOKENS) -> VllmStep:
    """Of one request, whose last ``new`` tokens attend."""
    table, starts = torch.tensor([blocks], dtype=torch.int32), torch.tensor([0, new], dtype=torch.int32)
    lengths = torch.tensor([stored], dtype=torch.int32)
    return VllmStep.of(starts, lengths, table, size, num_tokens=new, max_length=stored)


def slots_in(blocks: list[int], size: int) -> Tensor:
    at = torch.arange(TOKENS)
    return torch.tensor(blocks)[at // size] * size + at % size


class Layer:
    """A request of ``TOKENS`` in pages of codes, and in others unquantized."""

    codes, exact = [2, 0, 4, 3, 1], [5, 1, 3, 2, 7, 4, 0, 8, 9, 6]

    def __init__(self, transform: Transform | None = ROTATED) -> None:
        generator = torch.Generator().manual_seed(0)
        self.key, self.value = torch.randn(2, TOKENS, HEADS, DIM, generator=generator)
        self.key[..., 3] *= 20  # a channel that rotation spreads
        self.query = torch.randn(TOKENS, QUERIES, DIM, generator=generator)
        self.query[..., 3] /= 20
        self.transform = transform
        self.view = Paged(PageFormat.heads(DIM, torch.float32, INT4)).view(memory_of(5, 32, INT4))
        self.newest = Paged(PageFormat.heads(DIM, torch.float32, None)).view(memory_of(10, 16, None))
        self.positions = torch.arange(TOKENS) if transform is not None and transform.needs_positions else None
        slots = slots_in(self.codes, 32)
        for part in (slice(0, 70), slice(70, TOKENS)):  # as vLLM cuts a prompt, and pads what it has
            at = None if self.positions is None else self.positions[part]
            padded = torch.cat([slots[part], torch.full((2,), -1)])
            kept = (torch.cat([x[part], torch.zeros(2, HEADS, DIM)]) for x in (self.key, self.value))
            layer.store_in_pages(*kept, padded, self.view, transform, at, full_range=INT4.full_range)
        layer.store_in_pages(self.key, self.value, slots_in(self.exact, 16), self.newest)

    def attend(self, new: int = TOKENS, scores: ops.Scores = CAUSAL, recent: int | None = RECENT) -> Tensor:
        """``[new, Hq, D]`` of the last ``new`` tokens."""
        out = torch.full((new + 3, QUERIES, DIM), torch.nan)  # vLLM pads
        query = torch.cat([self.query[-new:], torch.zeros(3, QUERIES, DIM)])
        step = step_in(self.codes, 32, new)
        newest = None
        if recent is not None:
            newest = Newest(self.newest, recent), step_in(self.exact, 16, new)
        layer.attend_to_pages(query, self.view, step, scores, out, self.transform, newest)
        assert out[new:].isnan().all() and not out[:new].isnan().any()
        return out[:new]

    def expected(self, recent: int, window: int = TOKENS, sinks: Tensor | None = None) -> Tensor:
        """``[T, Hq, D]``: tokens further back than ``recent`` as their codes say."""
        slots = slots_in(self.codes, 32)
        key, value = ops.load(
            slots, self.view, dtype=torch.float32, **stored_by(self.transform, self.positions)
        )
        behind = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        outs = []
        for head in range(QUERIES):
            own = head * HEADS // QUERIES
            query = self.query[:, head] * DIM**-0.5
            scores = (query @ self.key[:, own].T).where(behind < recent, query @ key[:, own].T)
            scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(TOKENS, 1)], 1)
            weights = scores.softmax(1)[:, :TOKENS]
            near = weights.where(behind < recent, 0)
            outs.append(near @ self.value[:, own] + (weights - near) @ value[:, own])
        return torch.stack(outs, 1)


@pytest.mark.parametrize("transform", [ROTATED, SMOOTHED], ids=["rotated", "smoothed"])
def test_the_newest_tokens_are_read_as_they_were(transform: Transform) -> None:
    one = Layer(transform)
    torch.testing.assert_close(one.attend(), one.expected(RECENT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [None, ROTATED, Transform(key=DIM, value=DIM), SMOOTHED],
    ids=["plain", "rotated", "both", "smoothed"],
)
def test_without_a_residual_window_all_are_codes(transform: Transform | None) -> None:
    one = Layer(transform)
    found = one.attend(recent=None)
    if transform is None or transform == ROTATED:
        torch.testing.assert_close(found, one.expected(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, one.expected(0), atol=1e-4, rtol=1e-4)


def test_the_last_tokens_alone_attend_as_in_a_whole_prompt() -> None:
    one = Layer()
    torch.testing.assert_close(one.attend(5), one.attend()[-5:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [RECENT // 2, 3 * RECENT])
@pytest.mark.parametrize("transform", [ROTATED, SMOOTHED], ids=["rotated", "smoothed"])
def test_a_layer_with_a_window_reads_no_further(window: int, transform: Transform) -> None:
    one, sinks = Layer(transform), torch.linspace(-1, 1, QUERIES)
    scores = replace(CAUSAL, window=window, sinks=sinks)
    found = one.attend(scores=scores, recent=min(window, RECENT))
    expected = one.expected(min(window, RECENT), window, sinks)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_codes_are_in_full_range() -> None:
    one = Layer(None)
    codes, scales = quantize(one.key, 4, 64, torch.float16, full_range=True)
    key, _ = ops.load(slots_in(one.codes, 32), one.view, dtype=torch.float32)
    assert torch.equal(key, dequantize(codes, scales, 4, torch.float32))


def test_rotated_keys_with_a_large_channel_lose_less() -> None:
    exact, errors = Layer().expected(TOKENS), {}
    for transform in (None, ROTATED):
        errors[transform] = (Layer(transform).attend(recent=None) - exact).norm()
    assert errors[ROTATED] < 0.7 * errors[None]


def test_pages_that_vllm_replaces_are_viewed_anew() -> None:
    kept = Paged(PageFormat.heads(DIM, torch.float32, INT4))
    first, second = memory_of(1, 32, INT4), memory_of(2, 32, INT4)
    assert kept.view(first) is kept.view(first)
    assert kept.view(second).tensors[0].data_ptr() != kept.view(first).tensors[0].data_ptr()
