"""Probe whether kvloom's kernels for float pages are faster than vLLM's on this machine; takes a second.

Shapes: R requests, H key/value heads, Hq query heads, D head dim.
"""

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Final

import torch
from vllm import _custom_ops as kernels
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvloom import ops
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.pages import PageFormat

CASES: Final = ((4, 1, 1024), (1, 256, 256))
"""Requests, and new and stored tokens of each: a decode step, and a prompt."""

_PAGE, _ROUNDS = 128, 7


@cache
def is_faster(heads: int, queries: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether kvloom's kernels are faster both in decoding and for prompts; measured once.

    Args:
        heads: H.
        queries: Number of query heads of each key/value head.
        head_dim: D.
        dtype: Dtype of the pages and queries.
    """
    return all(ours < theirs for ours, theirs in probe(heads, queries, head_dim, dtype))


def probe(heads: int, queries: int, head_dim: int, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Median seconds of a call by kvloom and by vLLM, for each of ``CASES``."""
    measured = []
    for case in CASES:
        calls = _calls(*case, heads, queries * heads, head_dim, dtype)
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(_ROUNDS + 1):
            for call, taken in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                if turn:  # the first one warms up
                    taken.append(time.perf_counter() - start)
        ours, theirs = map(median, times)
        measured.append((ours, theirs))
    return measured


def _calls(
    requests: int, new: int, stored: int, heads: int, query_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Functions that compute the same attention by kvloom and by vLLM, over pages of zeros."""
    num_pages = -(-stored // _PAGE)
    query = torch.randn(requests * new, query_heads, head_dim).to(dtype)
    out = torch.empty_like(query)
    memory = torch.zeros(requests * num_pages, heads, _PAGE, 2 * head_dim, dtype=dtype)
    table = torch.arange(requests * num_pages, dtype=torch.int32).view(requests, -1)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    lengths = torch.full((requests,), stored, dtype=torch.int32)
    step = VllmStep.of(starts, lengths, table, _PAGE, num_tokens=len(query), max_length=stored)
    kv = PageFormat.heads(head_dim, dtype, None).view(memory)
    keys, values = memory.view(len(memory), heads, 2 * _PAGE, head_dim).chunk(2, dim=2)
    plan = kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=requests, num_heads=query_heads, num_kv_heads=heads, head_dim=head_dim, seq_lens=lengths,
        dtype=dtype, query_start_loc=starts, causal=True, sliding_window_size=-1,
        isa=_get_attn_isa(dtype, _PAGE, head_dim), enable_kv_split=True,
    )  # fmt: skip

    def theirs() -> object:
        return kernels.cpu_attention_with_kv_cache(
            query=query, key_cache=keys, value_cache=values, output=out, query_start_loc=starts,
            seq_lens=lengths, scale=head_dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=table, softcap=0.0, scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    return lambda: ops.attend(query, kv, step.batch, out=out), theirs
