"""Latent attention (MLA) over vLLM's pages: attended to where they lie, and expanded; without vLLM.

Shapes: T new tokens, H heads, ``rank`` elements of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.tensors.absorption import LatentSizes, is_faster_expanded
from kvloom.caches.tensors.transform import Transform, stored_by
from kvloom.core.specs import QuantSpec
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import layer
from kvloom.integrations.vllm.latent.step import LatentStep, attend_expanded, latent_step_of
from kvloom.integrations.vllm.layer import Newest
from kvloom.integrations.vllm.pages import PageFormat

SIZES, HEADS, BLOCK = LatentSizes(rank=64, nope=24, rope=16, v=20), 3, 32
RANK, NOPE, ROPE, V = SIZES
SCORES = ops.Scores(scale=(NOPE + ROPE) ** -0.5)
KINDS = {
    "float": (None, None),
    "int8": (QuantSpec(8), None),
    "int4": (QuantSpec(4, full_range=True), Transform(key=RANK)),
}
LENGTHS = [40, 90, 75, 33]
"""Stored tokens of each request, the new ones included."""


@dataclass
class Common:
    """What is read of vLLM's ``CommonAttentionMetadata``."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table_tensor: Tensor
    causal: bool = True

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_actual_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())


def common(new: list[int], lengths: list[int] | None = None, size: int = BLOCK) -> Common:
    """Requests in blocks of their own, in no order, with garbage behind their last."""
    lengths = LENGTHS[: len(new)] if lengths is None else lengths
    width = -(-max(lengths) // size)
    order = torch.randperm(len(new) * width, generator=torch.Generator().manual_seed(3))
    table = torch.full((len(new), width + 2), 10**6, dtype=torch.int32)
    table[:, :width] = order.view(len(new), width)
    starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
    return Common(starts, torch.tensor(lengths, dtype=torch.int32), table)


class Requests:
    """Requests of ``LENGTHS`` in pages of a kind; the latest ``new`` tokens of each are queries."""

    def __init__(self, kind: str, new: list[int]) -> None:
        self.quant, self.transform = KINDS[kind]
        generator = torch.Generator().manual_seed(0)
        self.new, self.lengths = new, LENGTHS[: len(new)]
        self.common = common(new)
        self.latents = [torch.randn(n, RANK, generator=generator) for n in self.lengths]
        self.rope = [torch.randn(n, ROPE, generator=generator) for n in self.lengths]
        self.query = torch.randn(sum(new), HEADS, NOPE + ROPE, generator=generator)
        self.weight = torch.randn(HEADS, NOPE + V, RANK, generator=generator) * RANK**-0.5
        self.view = self._stored(PageFormat.latents(RANK, ROPE, torch.float32, self.quant), self.transform)

    def _stored(self, format: PageFormat, transform: Transform | None, size: int = BLOCK) -> ops.KVView:
        blocks = -(-max(self.lengths) // size) * len(self.lengths)
        pages = torch.full((blocks, size, format.content_bytes), 0xFF, dtype=torch.uint8)
        view, table = format.view(pages), common(self.new, self.lengths, size).block_table_tensor
        for row, latents, rope in zip(table.long(), self.latents, self.rope, strict=True):
            at = torch.arange(len(latents))
            full_range = format.key.quant is not None and format.key.quant.full_range
            kept = latents.unsqueeze(1), rope.unsqueeze(1)
            layer.store_in_pages(
                *kept, row[at // size] * size + at % size, view, transform, full_range=full_range
            )
        return view

    def step(self, sizes: LatentSizes | None = SIZES) -> LatentStep:
        return latent_step_of(self.common, BLOCK, sizes)

    def absorbed(self, step: LatentStep, recent: int = 0) -> Tensor:
        """``[T, H, v]`` of the requests that attend to latents."""
        assert step.decode is not None
        query, newest = self.query[: step.num_decode_tokens], None
        latent = torch.einsum("thn,hnr->thr", query[..., :NOPE], self.weight[:, :NOPE])
        if recent:
            view = self._stored(PageFormat.latents(RANK, ROPE, torch.float32, None), None, 16)
            own = latent_step_of(common(self.new, self.lengths, 16), 16, None)
            assert own.decode is not None
            newest = Newest(view, recent), own.decode
        whole = torch.cat((latent, query[..., NOPE:]), -1)
        out = layer.attend_latents(whole, self.view, step.decode, SCORES, self.transform, newest)
        return torch.einsum("thr,hvr->thv", out, self.weight[:, NOPE:])

    def expanded(self, step: LatentStep) -> Tensor:
        """``[T, H, v]`` of the others."""
        query = self.query[step.num_decode_tokens :]
        outs = [
            attend_expanded(query[x.rows], self.view, x, self.expand, SCORES, self.transform)
            for x in step.prefill
        ]
        return torch.cat(outs)

    def expand(self, latents: Tensor) -> Tensor:
        return latents @ self.weight.flatten(0, 1).T

    def expected(self, recent: int = 0) -> Tensor:
        """``[T, H, v]`` in float64, over what is stored, of the newest of each query over what was before."""
        slots = [torch.arange(n) for n in self.lengths]
        outs, first = [], 0
        for b, at in enumerate(slots):
            row = self.common.block_table_tensor[b].long()
            of_codes = row[at // BLOCK] * BLOCK + at % BLOCK
            codes = ops.load(of_codes, self.view, dtype=torch.float32, **stored_by(self.transform))
            query = self.query[first : first + self.new[b]].double()
            behind = (at[-self.new[b] :, None] - at)[:, None]
            kept, was = (
                self._keys(x.squeeze(1).double(), y.squeeze(1).double())
                for x, y in (codes, (self.latents[b].unsqueeze(1), self.rope[b].unsqueeze(1)))
            )
            is_new = behind < recent
            scores = torch.where(is_new, *(torch.einsum("thd,nhd->thn", query, x[0]) for x in (was, kept)))
            weights = (scores * (NOPE + ROPE) ** -0.5).masked_fill(behind < 0, -torch.inf).softmax(-1)
            near = weights.where(is_new, 0)
            outs.append(
                sum(torch.einsum("thn,nhv->thv", w, x[1]) for w, x in ((near, was), (weights - near, kept)))
            )
            first += self.new[b]
        return torch.cat(outs).float()

    def _keys(self, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.einsum("nr,hdr->nhd", latents, self.weight.double())
        return torch.cat((whole[..., :NOPE], rope.unsqueeze(1).expand(-1, HEADS, -1)), -1), whole[..., NOPE:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [[1, 1, 1, 1], [1, 5, 75, 33], [40, 90], [2, 60]], ids=str)
def test_both_ways_are_attention_to_what_is_stored(kind: str, new: list[int]) -> None:
    requests = Requests(kind, new)
    step = requests.step()
    expected, found = requests.expected(), []
    if step.num_decodes:
        found.append(requests.absorbed(step))
    if step.num_prefills:
        found.append(requests.expanded(step))
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=2e-5)
    whole = requests.step(None)
    assert whole.num_decode_tokens == sum(new) and not whole.prefill
    torch.testing.assert_close(requests.absorbed(whole), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("recent", [8, 64])
def test_the_newest_latents_are_read_as_they_were(recent: int) -> None:
    requests = Requests("int4", [1, 5, 75, 33])
    found = requests.absorbed(requests.step(None), recent)
    torch.testing.assert_close(found, requests.expected(recent), atol=2e-5, rtol=2e-5)
    assert (found - requests.expected()).abs().max() > 1e-2  # or the test would not see it


def test_eight_bits_are_near_by_their_scales() -> None:
    """Codes are off by half a scale: scores by |q| of that, weights by e to twice as much, values by it."""
    requests = Requests("int8", [1, 1, 1, 1])
    absorbed, weight = requests.absorbed(requests.step()), requests.weight
    exact = Requests("float", [1, 1, 1, 1])
    query = exact.query
    latent = torch.einsum("thn,hnr->thr", query[..., :NOPE], weight[:, :NOPE])
    largest = max(x.abs().max() for x in (*exact.latents, *exact.rope))
    half = largest / 127 / 2 * (1 + 2**-10)  # scales are rounded to float16
    off = (latent.abs().sum(-1) + query[..., NOPE:].abs().sum(-1)).max() * half * SCORES.scale
    values = max(torch.einsum("nr,hvr->nhv", x, weight[:, NOPE:]).abs().max() for x in exact.latents)
    bound = torch.expm1(2 * off) * values + weight[:, NOPE:].abs().sum(-1).max() * half
    difference = (absorbed - exact.absorbed(exact.step())).abs().max()
    assert 0 < difference < bound


@pytest.mark.parametrize(
    ("new", "lengths", "expected"),
    [
        ([1, 1], [1, 9], 2),
        ([1, 7], [4, 7], 1),
        ([7, 9, 1], [7, 9, 5], 3),
        ([1, 200, 50], [9, 300, 50], 1),
        ([3, 200, 50], [90, 2000, 50], 1),
        ([3, 20, 50], [90, 2000, 50], 2),
    ],
    ids=str,
)
def test_the_last_requests_are_expanded_where_that_is_faster(
    new: list[int], lengths: list[int], expected: int
) -> None:
    step = latent_step_of(common(new, lengths), BLOCK, SIZES)
    assert (step.num_decodes, step.num_prefills) == (expected, len(new) - expected)
    assert step.num_decode_tokens == sum(new[:expected]) and step.num_actual_tokens == sum(new)
    assert (step.decode is None) == (expected == 0)
    assert [x.rows.stop - x.rows.start for x in step.prefill] == new[expected:]
    assert [len(x.slots) for x in step.prefill] == lengths[expected:]


def test_v2_lite_expands_from_171_queries_on() -> None:
    lite = LatentSizes(rank=512, nope=128, rope=64, v=128)
    assert [is_faster_expanded(n, 4096, lite) for n in (1, 170, 171, 4096)] == [False, False, True, True]
    assert not is_faster_expanded(1, 1, lite)


def test_attention_in_both_directions_is_refused() -> None:
    both = common([2])
    both.causal = False
    with pytest.raises(UnsupportedError, match="pages of kvloom must be causal, got causal=False"):
        latent_step_of(both, BLOCK, SIZES)
