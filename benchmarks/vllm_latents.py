"""One layer of latent attention (MLA) in vLLM's pages, with DeepSeek V2-Lite's sizes.

A step is vLLM's kernel without AMX, or ``ops.attend`` over pages of kvloom's, for queries that were
multiplied by the weight. A prompt is expansion and attention of either.
"""

import time
from collections.abc import Callable

import torch
from rounds import in_turn, timed, turns_for
from torch import Tensor
from vllm import _custom_ops as kernels
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

from kvloom import ops
from kvloom.caches.tensors.absorption import LatentSizes
from kvloom.core.specs import QuantSpec
from kvloom.integrations.vllm import layer
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.latent.step import attend_expanded, expanded_in
from kvloom.integrations.vllm.pages import PageFormat

HEADS = 16
SIZES = LatentSizes(rank=512, nope=128, rope=64, v=128)
RANK, NOPE, ROPE, V = SIZES
SCALE = (NOPE + ROPE) ** -0.5
CASES = ((1, 1, 512), (1, 1, 4096), (8, 1, 4096), (1, 2048, 2048))
"""Sequences, new tokens and stored ones of each."""
KINDS = {"bfloat16": None, "int8": QuantSpec(8), "int4": QuantSpec(4, full_range=True)}
THEIR_PAGE, PAGE = 16, 128


def bytes_of_tokens() -> dict[str, int]:
    """Bytes of a latent with its rope key, of each kind."""
    return {
        name: PageFormat.latents(RANK, ROPE, torch.bfloat16, quant).content_bytes
        for name, quant in KINDS.items()
    }


def one_layer(case: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each contender in each round, each time over memory that no cache holds."""
    sequences, new, stored = case
    latents, rope = (torch.randn(sequences * stored, 1, n).bfloat16() for n in (RANK, ROPE))
    weight = (torch.randn(HEADS * (NOPE + V), RANK) * RANK**-0.5).bfloat16()
    width = RANK + ROPE if new == 1 else NOPE + ROPE
    query = torch.randn(sequences * new, HEADS, width).bfloat16()
    turns = 2 if new > 1 else turns_for(2 * sequences * stored * (RANK + ROPE), rounds)
    calls: dict[str, list[Callable[[], object]]] = {name: [] for name in ("vLLM bfloat16", *KINDS)}
    for _ in range(turns):
        calls["vLLM bfloat16"].append(theirs(case, query, latents, rope, weight))
        for name, quant in KINDS.items():
            calls[name].append(ours(case, query, latents, rope, weight, quant))
    clock, times = time.thread_time, {}
    for name, runs in calls.items():
        run = timed(lambda turn, runs=runs: runs[turn](), turns, is_short=new == 1, clock=clock)
        times[name] = lambda run=run: run() * 1e6
    return in_turn(times, rounds, 2)


def theirs(
    case: tuple[int, int, int], query: Tensor, latents: Tensor, rope: Tensor, weight: Tensor
) -> Callable[[], object]:
    """vLLM's own attention over pages of its own."""
    sequences, new, stored = case
    if new > 1:
        backend = CPUSDPAMLAPrefillBackend.__new__(CPUSDPAMLAPrefillBackend)
        backend.scale, starts = SCALE, torch.tensor([0, new], dtype=torch.int32)

        def prompt() -> object:
            heads = (latents.squeeze(1) @ weight.T).unflatten(-1, (HEADS, NOPE + V))
            key = torch.cat((heads[..., :NOPE], rope.expand(-1, HEADS, -1)), -1)
            return backend._ragged_sdpa(query, key, heads[..., NOPE:], starts, starts, True, False)

        return prompt
    table, slots = blocks_of(sequences, stored, THEIR_PAGE)
    pages = torch.zeros(table.numel(), THEIR_PAGE, RANK + ROPE, dtype=torch.bfloat16)
    pages.flatten(0, 1)[slots] = torch.cat((latents, rope), -1).squeeze(1)
    lengths = torch.full((sequences,), stored, dtype=torch.int32)

    def step() -> object:
        out = torch.zeros(sequences, HEADS, RANK, dtype=query.dtype)
        return kernels.mla_decode_kvcache_cpu(out, query, pages, SCALE, table, lengths)

    return step


def ours(
    case: tuple[int, int, int],
    query: Tensor,
    latents: Tensor,
    rope: Tensor,
    weight: Tensor,
    quant: QuantSpec | None,
) -> Callable[[], object]:
    """The same over pages of kvloom's."""
    sequences, new, stored = case
    table, slots = blocks_of(sequences, stored, PAGE)
    format = PageFormat.latents(RANK, ROPE, torch.bfloat16, quant)
    view = format.view(torch.zeros(table.numel(), PAGE, format.content_bytes, dtype=torch.uint8))
    layer.store_in_pages(latents, rope, slots, view, full_range=quant is not None and quant.full_range)
    scores, starts = ops.Scores(scale=SCALE), torch.arange(sequences + 1, dtype=torch.int32) * new
    lengths = torch.full((sequences,), stored, dtype=torch.int32)
    step = VllmStep.of(starts, lengths, table, PAGE, num_tokens=len(query), max_length=stored)
    if new == 1:
        return lambda: layer.attend_latents(query, view, step, scores)
    request = expanded_in(step.batch.index, 0, stored, slice(0, new))
    return lambda: attend_expanded(query, view, request, lambda x: x @ weight.T, scores)


def blocks_of(sequences: int, stored: int, size: int) -> tuple[Tensor, Tensor]:
    """A block table in no order, and the slots of all tokens in it."""
    table = torch.randperm(sequences * (stored // size)).int().view(sequences, -1)
    at = torch.arange(stored)
    return table, (table.long()[:, at // size] * size + at % size).flatten()
