"""The problem of the attention benchmarks: the same numbers for all contenders, and tolerances.

B sequences, Hq query heads, H key/value heads, Q new tokens, S stored ones (the new ones last), D head dim.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rounds import needs_compiled_backend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvloom import Batch, CacheIndex, KVSpec, QuantSpec, ops
from kvloom.caches.format import PAGE_LAYOUTS
from kvloom.caches.rows.pages import Storage
from kvloom.ops.impl import cpu

LAYER = QUERY_HEADS, HEADS, HEAD_DIM = 32, 8, 128
"""A layer of Llama-3-8B."""

PAGE = 16
"""Tokens in a page of ours."""

KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "int8 g64": (torch.bfloat16, QuantSpec(8, 64)),
    "int4 g64": (torch.bfloat16, QuantSpec(4, 64)),
    "int8 g8": (torch.bfloat16, QuantSpec(8, 8)),
}
"""Contents of a cache, by name: dtype of the query and of unquantized tokens, and kvloom's codes."""

TOLERANCE = {
    "float32": 1e-4,
    "bfloat16": 0.02,
    "float16": 0.005,
    "int8 g64": 0.06,
    "int4 g64": 0.5,
    "int8 g8": 0.06,
}
"""Largest ``difference`` of two answers. For codes it is their loss: every library has groups of its own, and
the means that attention takes of random numbers are small."""

Run = Callable[[int], Tensor]
"""Function from the number of a copy to ``[B, Hq, Q, D]``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of the last tokens, in float32.

    Attributes:
        kind: Key of ``KINDS``.
        query: ``[B, Hq, Q, D]``.
        keys: ``[B, H, S, D]``, as ``values``. Of several new tokens each sees those up to itself.
        copies: Number of copies of keys and values that each contender holds.
    """

    kind: str
    query: Tensor
    keys: Tensor
    values: Tensor
    copies: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the query."""
        return KINDS[self.kind][0]

    def memories(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Copies of keys and values."""
        return [
            (self.keys.to(dtype, copy=True), self.values.to(dtype, copy=True)) for _ in range(self.copies)
        ]


def arguments(description: str | None, rounds: int = 21) -> argparse.ArgumentParser:
    """Arguments of every attention benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few tokens, few rounds")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--layout", default="auto", choices=PAGE_LAYOUTS, help="of our pages")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    return parser


def arguments_against_peers(description: str | None) -> argparse.Namespace:
    """Arguments of a benchmark that times peers too: ``arguments``, and ``--threads`` for torch."""
    parser = arguments(description)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    needs_compiled_backend()
    return args


def frame(figure: str, layout: str, rounds: int) -> dict[str, Any]:
    """Fields that the result of every attention benchmark has."""
    return {
        "figure": figure,
        "isa": cpu.ISA,
        "threads": torch.get_num_threads(),
        "layout": layout,
        "rounds": rounds,
        "query_heads": QUERY_HEADS,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "page": PAGE,
    }


Measured = tuple[dict[str, Any], dict[str, str]]
"""A row of a table, and why some peers are not in it."""


def against_peers(
    figure: str, layout: str, rounds: int, peers: list[str], measured: Iterable[Measured]
) -> dict[str, Any]:
    """The result of a benchmark that times ``peers`` too."""
    rows, missing = [], {}
    for row, reasons in measured:
        rows.append(row)
        missing |= reasons
    return {
        **frame(figure, layout, rounds),
        "peers": peers,
        "tolerance": TOLERANCE,
        "missing": [f"{name}: {reason}" for name, reason in missing.items()],
        "rows": rows,
    }


def stored_bytes(kind: str, tokens: int) -> int:
    """Bytes of keys and values of one layer, scales included."""
    dtype, quant = KINDS[kind]
    return 2 * KVSpec(1, HEADS, HEAD_DIM, dtype, "T H D", quant).nbytes(tokens)


def random_problem(
    kind: str,
    heads: tuple[int, int, int] = LAYER,
    *,
    rows: int = 1,
    new: int = 1,
    stored: int,
    copies: int,
) -> Problem:
    """Normal numbers; ``heads`` are those of the query, of keys and values, and their dim."""
    rng = torch.Generator().manual_seed(stored)
    query_heads, kv_heads, dim = heads
    query = torch.randn(rows, query_heads, new, dim, generator=rng)
    keys, values = (torch.randn(rows, kv_heads, stored, dim, generator=rng) for _ in range(2))
    return Problem(kind, query, keys, values, copies)


def ours(problem: Problem, layout: str, page: int = PAGE) -> Run:
    """``ops.attend`` over random pages of a pool that has some to spare, in one of ``PAGE_LAYOUTS``."""
    rows, heads, stored, dim = problem.keys.shape
    dtype, quant = KINDS[problem.kind]
    spec = KVSpec(1, heads, dim, dtype, quant=quant)
    num_pages = -(-stored // page)
    pool = rows * num_pages + 16
    pages = torch.randperm(pool)[: rows * num_pages].view(rows, -1) * page
    slots = (pages[:, :, None] + torch.arange(page)).view(rows, -1)[:, :stored].flatten()
    key, value = (x.transpose(1, 2).reshape(-1, heads, dim) for x in (problem.keys, problem.values))
    views = []
    for _ in range(problem.copies):
        storage = Storage(spec, spec, page, torch.device("cpu"), layout)
        storage.reserve(1, pool)
        ops.store(key, value, slots, storage.view)
        views.append(storage.view)
    starts = torch.arange(rows + 1)
    batch = Batch(CacheIndex.pages(pages, page), starts * problem.query.shape[2], starts * stored)
    query_heads, new = problem.query.shape[1:3]
    query = problem.query.transpose(1, 2).reshape(-1, query_heads, dim).to(problem.dtype)
    return lambda i: ops.attend(query, views[i], batch).view(rows, new, query_heads, dim).transpose(1, 2)


def our_answer(problem: Problem, attend: Run) -> Tensor:
    """Result of ``attend``, compared with plain torch in float32; ends the program if it differs."""
    answer = attend(0).clone()
    causal = problem.query.shape[2] > 1
    exact = scaled_dot_product_attention(
        problem.query, problem.keys, problem.values, is_causal=causal, enable_gqa=True
    )
    off = difference(answer, exact)
    if off > TOLERANCE[problem.kind]:
        sys.exit(f"attend over {problem.kind} differs from plain torch by {off:.2g}")
    return answer


def difference(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, by that of ``expected``."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
