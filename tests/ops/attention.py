"""Attention once more: a float64 loop that defines it, plain torch to measure against, and filled caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from ops.pools import PLAIN, Kind, as_integers, make_pool, small_head_dim
from oracles.bits import generator
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import KVView
from kvloom.ops import Batch, PositionalBias, Scores


@dataclass
class Case:
    """A filled cache and the queries over it. Sequence b has ``stored[b]`` tokens, ``new[b]`` of them new."""

    query: Tensor
    kv: KVView
    new: list[int]
    stored: list[int]
    slots: list[list[int]]
    page_size: int = 1
    decoding_batches: int = 0
    first_visible: list[int] | None = None
    loaded: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def batch(self, spelling: str = "pages", dtype: torch.dtype = torch.int64, padding: int = -1) -> Batch:
        """The batch with its slots spelled in one of five ways."""
        return Batch(
            index_of(spelling, self.slots, self.page_size, dtype, padding),
            starts_of(self.new, dtype),
            starts_of(self.stored, dtype),
            self.decoding_batches,
            None if self.first_visible is None else torch.tensor(self.first_visible, dtype=dtype),
        )

    def sees(self, scores: Scores, b: int, position: int, j: int) -> bool:
        """Whether the query at ``position`` of sequence b sees key j."""
        if j > position and (
            scores.alibi_slopes is not None or (scores.is_causal and b >= self.decoding_batches)
        ):
            return False
        if self.first_visible is not None and j < self.first_visible[b]:
            return False
        return scores.window is None or j > position - scores.window

    def value_width(self) -> int:
        """Elements of a value."""
        return ops.load(torch.tensor([], dtype=torch.int64), self.kv, dtype=self.query.dtype)[1].shape[-1]

    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence, as attention receives them."""
        if not self.loaded:
            for slots in self.slots:
                tokens = torch.tensor(slots, dtype=torch.int64)
                self.loaded.append(ops.load(tokens, self.kv, dtype=self.query.dtype))
        return self.loaded


def starts_of(counts: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Where each run begins, and the end of the last."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.tensor(starts, dtype=dtype)


def index_of(
    spelling: str, slots: list[list[int]], page_size: int, dtype: torch.dtype = torch.int64, padding: int = -1
) -> CacheIndex:
    """``slots[b][t]`` as offset, pages, blocks, single-slot pages or tokens; the slots must allow it."""
    if spelling == "offset":
        return CacheIndex.offset(torch.tensor([row[0] if row else padding for row in slots], dtype=dtype))
    if spelling == "tokens":
        table = torch.tensor([slot for row in slots for slot in row], dtype=dtype)
        return CacheIndex.tokens(table, starts_of(map(len, slots), dtype))
    size = 1 if spelling == "slots" else page_size
    pages = [[slot // size if spelling == "blocks" else slot for slot in row[::size]] for row in slots]
    width = max((len(row) for row in pages), default=0) + 1
    table = torch.tensor([[*row, *[padding] * (width - len(row))] for row in pages], dtype=dtype)
    table = table.view(len(slots), width)
    return CacheIndex.blocks(table, size) if spelling == "blocks" else CacheIndex.pages(table, size)


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def make_case(
    new: list[int],
    stored: list[int],
    *,
    axes: str = "2 B S H D",
    kind: Kind = PLAIN,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    ratio: int = 2,
    head_dim: int | None = None,
    value_dim: int | None = None,
    page_size: int = 2,
    block_size: int = 4,
    contiguous: bool = False,
    poison: float = math.nan,
    seed: int = 0,
    fill: Callable[[tuple[int, ...], int], Tensor] = normal,
) -> Case:
    """A cache full of ``poison``, and sequences of ``fill`` values stored in it, page by page at random."""
    num_pages = [-(-n // page_size) for n in stored]
    slots_needed = (sum(num_pages) + 3) * page_size
    blocks = -(-slots_needed // block_size)
    head_dim = head_dim or small_head_dim(kind)
    value_dim = value_dim or head_dim
    widths = {"heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    pool = make_pool(axes, kind, blocks=blocks, block_size=block_size, **widths)
    for base in pool.bases.values():
        if base.is_floating_point():
            base.fill_(poison)
        else:
            as_integers(base).fill_(0x80 if base.dtype == torch.int8 else 0x88)
    order = torch.arange(sum(num_pages)) + 1
    if not contiguous:
        order = (torch.randperm(sum(num_pages) + 2, generator=generator(seed + 1)))[: sum(num_pages)]
    pages = iter((order * page_size).tolist())
    slots = []
    for count, tokens in zip(num_pages, stored, strict=True):
        row = [page + i for page in [next(pages) for _ in range(count)] for i in range(page_size)]
        slots.append(row[:tokens])
    kv = pool.view()
    for b, row in enumerate(slots):
        key = fill((len(row), kv_heads, head_dim), 10 * seed + 100 * b + 1).to(dtype)
        value = fill((len(row), kv_heads, value_dim), 10 * seed + 100 * b + 2).to(dtype)
        ops.store(key, value, torch.tensor(row, dtype=torch.int64), kv, full_range=kind.full_range)
    query = fill((sum(new), kv_heads * ratio, head_dim), 10 * seed + 3).to(dtype)
    return Case(query, kv, new, stored, slots, page_size)


def exact(case: Case, scores: Scores) -> Tensor:
    """The definition in float64, one score at a time."""
    rows = []
    first_row = first_column = 0
    for b, (key, value) in enumerate(case.keys_and_values()):
        ratio = case.query.shape[1] // key.shape[1]
        keys, values = key.double().tolist(), value.double()
        for i in range(case.new[b]):
            position = case.stored[b] - case.new[b] + i
            row = first_row + i
            for g, query in enumerate(case.query[row].double().tolist()):
                logits = [
                    _logit(
                        scores,
                        query,
                        keys[j][g // ratio],
                        g,
                        row,
                        first_column + j,
                        j - position,
                        positional_bias(scores, b, row, g, g // ratio, j),
                    )
                    if case.sees(scores, b, position, j)
                    else -math.inf
                    for j in range(case.stored[b])
                ]
                sink = -math.inf if scores.sinks is None else float(scores.sinks[g])
                weights = _softmax(logits, sink)
                mixed = torch.zeros(values.shape[2], dtype=torch.float64)
                for j, weight in enumerate(weights):
                    if weight:
                        mixed += weight * values[j, g // ratio]
                rows.append(mixed)
        first_row += case.new[b]
        first_column += case.stored[b]
    shape = (first_row, case.query.shape[1], case.value_width())
    return torch.stack(rows).view(shape) if rows else torch.zeros(shape, dtype=torch.float64)


def positional_bias(scores: Scores, b: int, row: int, g: int, h: int, j: int) -> float:
    """Of the product of query row ``row`` and head g with token j of sequence b, by key/value head h."""
    bias = scores.positional_bias
    if bias is None:
        return 0.0
    position = j + (0 if bias.first_position is None else int(bias.first_position[b]))
    angles = [frequency * position for frequency in bias.frequencies[h].tolist()]
    waves = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    return sum(a * wave for a, wave in zip(bias.coefficients[row, g].tolist(), waves, strict=True))


def _logit(
    scores: Scores,
    query: list[float],
    key: list[float],
    g: int,
    row: int,
    column: int,
    distance: int,
    bias: float,
) -> float:
    """softcap((q.k + bias) * scale) + mask + alibi."""
    scale = 1 / math.sqrt(len(query)) if scores.scale is None else scores.scale
    logit = (sum(a * b for a, b in zip(query, key, strict=True)) + bias) * scale
    if scores.softcap is not None:
        logit = scores.softcap * math.tanh(logit / scores.softcap)
    if scores.mask is not None:
        logit += float(scores.mask[row, column] if scores.mask.ndim == 2 else scores.mask[g, row, column])
    if scores.alibi_slopes is not None:
        logit += float(scores.alibi_slopes[g]) * distance
    return logit


def _softmax(logits: list[float], sink: float) -> list[float]:
    """Weights of the logits; the sink takes part and has no value."""
    top = max([*logits, sink])
    if top == -math.inf:
        return [0.0] * len(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights) + math.exp(sink - top)
    return [weight / total for weight in weights]


def plain(case: Case, scores: Scores) -> Tensor:
    """The same in plain torch, every step rounded to the dtype of the query."""
    outs = [(x.weights @ x.value).transpose(0, 1) for x in _in_plain_torch(case, scores)]
    return torch.cat(outs) if outs else case.query.new_zeros(0, case.query.shape[1], case.value_width())


def float32_error(case: Case, scores: Scores) -> float:
    """What rounding to float32 justifies, in whatever order sums are taken: the largest over all results.

    Each rounding errs by at most ``unit``, independently of the others, so n of them seldom by more than
    ``sqrt(n)``, and twice that is allowed. A sum of n products passes through values as large as the root of
    their squares, or as the sum. An error of a score moves the result by its weight times the distance of its
    value from the result.
    """
    unit, worst = 2.0**-24, 0.0
    wide = Case(case.query.double(), case.kv, case.new, case.stored, case.slots)
    wide.decoding_batches, wide.first_visible = case.decoding_batches, case.first_visible
    wide.loaded = [(key.double(), value.double()) for key, value in case.keys_and_values()]
    for x in _in_plain_torch(wide, scores):
        if not x.weights.numel():
            continue
        out = x.weights @ x.value
        products = (x.query.square() @ x.key.square().mT).sqrt()
        logits = torch.where(x.weights > 0, x.logits.abs(), 0.0)
        sums = torch.maximum(products, (x.query @ x.key.mT).abs()) + x.waves
        of_score = math.sqrt(x.query.shape[-1]) * x.scale * sums + 2 * logits + 2
        # [Hq, Q, N, Dv] is small in tests
        moved = (x.weights * of_score).unsqueeze(-1) * (x.value.unsqueeze(1) - out.unsqueeze(2))
        passed = torch.maximum((x.weights.square() @ x.value.square()).sqrt(), out.abs())
        of_sum = math.sqrt(x.weights.shape[-1]) * passed + 2 * out.abs()
        error = (moved.square().sum(2) + of_sum.square()).sqrt()
        worst = max(worst, 2 * unit * float(error.max()))
    return worst


def bias_terms(bias: PositionalBias, b: int, first: int, last: int, stored: int, ratio: int) -> Tensor:
    """What makes up the bias of rows ``first:last``, ``[Hq, Q, stored, 2K]`` float64."""
    position = torch.arange(stored, dtype=torch.float64)
    if bias.first_position is not None:
        position += float(bias.first_position[b])
    angle = bias.frequencies.double().unsqueeze(1) * position.unsqueeze(1)
    waves = torch.cat((angle.cos(), angle.sin()), dim=-1).repeat_interleave(ratio, dim=0)
    return bias.coefficients[first:last].double().transpose(0, 1).unsqueeze(2) * waves.unsqueeze(1)


@dataclass
class _Sequence:
    """Attention of one sequence, ``[Hq, Q, ...]``: one head of keys and values for each of the query."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    logits: Tensor
    weights: Tensor
    waves: Tensor | float  # what the terms of a positional bias add up to at most


def _in_plain_torch(case: Case, scores: Scores) -> Iterator[_Sequence]:
    dtype = case.query.dtype
    rows, columns = starts_of(case.new).tolist(), starts_of(case.stored).tolist()
    for b, (key, value) in enumerate(case.keys_and_values()):
        query = case.query[rows[b] : rows[b + 1]].transpose(0, 1)
        ratio = query.shape[0] // key.shape[1]
        key, value = (x.repeat_interleave(ratio, dim=1).transpose(0, 1) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scores.scale is None else scores.scale
        products, waves = query @ key.mT, 0.0
        if scores.positional_bias is not None:
            terms = bias_terms(scores.positional_bias, b, rows[b], rows[b + 1], case.stored[b], ratio)
            products, waves = products + terms.sum(-1).to(dtype), terms.abs().sum(-1)
        logits = products * scale
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        block = (slice(rows[b], rows[b + 1]), slice(columns[b], columns[b + 1]))
        if scores.mask is not None:
            logits = logits + scores.mask[(..., *block)].to(dtype)
        positions = torch.arange(case.new[b]).unsqueeze(1) + case.stored[b] - case.new[b]
        distance = torch.arange(case.stored[b]) - positions
        if scores.alibi_slopes is not None:
            logits = logits + scores.alibi_slopes.to(dtype).view(-1, 1, 1) * distance.to(dtype)
        seen = [
            [case.sees(scores, b, case.stored[b] - case.new[b] + i, j) for j in range(case.stored[b])]
            for i in range(case.new[b])
        ]
        logits = logits.masked_fill(~torch.tensor(seen, dtype=torch.bool).view(distance.shape), -math.inf)
        everything = logits
        if scores.sinks is not None:
            sink = scores.sinks.to(dtype).view(-1, 1, 1).expand(-1, case.new[b], 1)
            everything = torch.cat((logits, sink), dim=-1)
        weights = everything.softmax(-1).nan_to_num(0.0)[..., : case.stored[b]]
        yield _Sequence(query, key, value, scale, logits, weights, waves)
