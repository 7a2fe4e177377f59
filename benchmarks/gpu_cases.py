"""Cases of ``gpu.py``: decode steps, appends, prompts and chunks of one layer, and peers doing the same."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvloom import Batch, CacheIndex, CacheLayout, KVSpec, KVView, QuantSpec, ops
from kvloom.caches.tensors.residual import Unquantized, attend_beside, scores_of_newest
from kvloom.caches.tensors.transform import Transform
from kvloom.ops import Counts, Scores

HEADS, HEAD_DIM, PAGE = 8, 128, 16
MODELS = {"Llama-3-8B": 4, "Llama-3-70B": 8}
"""Query heads for each of 8 key/value heads."""
RANK, ROPE = 512, 64
LATENTS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}
"""Query heads over latents and rope keys of these sizes."""
KINDS = {"bf16": None, "int8 g64": QuantSpec(8, 64), "int4 g64": QuantSpec(4, 64)}
BESIDE, RECENT = "int4 g64, recent=64", 64
"""A prompt over int4 as it is if nothing else is said: rotated keys, and a residual window."""
MOST_TOKENS = 1 << 20
"""Tokens of all sequences of a decode step: 4 GiB of bfloat16."""

CHUNK = 512
"""New tokens of a chunk, behind those that a case has stored."""

COLD = 256 << 20
"""Bytes between two uses of the same memory, several times what a cache of the device holds."""

Call = Callable[[int], object]


class Case(NamedTuple):
    """A figure: ``what`` is decode, append, prefill, chunk or latents, which are decoded."""

    what: str
    model: str
    kind: str
    batch: int
    context: int


class Work(NamedTuple):
    """Calls that do the same, the bytes and operations they take, and over how many memories they turn.

    Prompts are in no graph: which kernel is best follows from sizes, which a graph may be replayed without.
    ``written`` is the memory into which call 0 writes.
    """

    contenders: dict[str, Call]
    num_bytes: int
    flops: int
    turns: int
    in_graph: bool = True
    written: Sequence[Tensor] = ()


def cases(*, quick: bool) -> list[Case]:
    """Every figure, or a few small ones."""
    if quick:
        return (
            [
                Case(what, "Llama-3-8B", kind, 2, 512)
                for what in ("decode", "append", "prefill", "chunk")
                for kind in KINDS
            ]
            + [Case("chunk", "Llama-3-8B", BESIDE, 2, 512)]
            + [Case("latents", model, "bf16", 2, 512) for model in LATENTS]
        )
    decode = [
        Case("decode", model, kind, batch, context)
        for model in MODELS
        for kind in KINDS
        for batch in (1, 8, 64, 256)
        for context in (512, 4096, 32768)
        if batch * context <= MOST_TOKENS
    ]
    append = [Case("append", "Llama-3-8B", kind, batch, 1) for kind in KINDS for batch in (1, 64, 256, 8192)]
    prefill = [
        Case("prefill", model, kind, batch, context)
        for model in MODELS
        for kind in (*KINDS, BESIDE)
        for batch, context in ((1, 2048), (1, 8192), (4, 4096))
    ]
    chunk = [
        Case("chunk", "Llama-3-8B", kind, batch, context)
        for kind in (*KINDS, BESIDE)
        for batch, context in ((1, 8192), (1, 32768))
    ]
    latents = [
        Case("latents", model, kind, batch, 8192)
        for model in LATENTS
        for kind in ("bf16", "int8 g64")
        for batch in (1, 64)
    ]
    return decode + append + prefill + chunk + latents


def prepare(case: Case, *, peers: bool = True, cold: int = COLD) -> Work:
    """Caches full of random numbers, of ``cold`` bytes or of one layer, and the calls."""
    match case.what:
        case "append":
            return _append(case, cold)
        case "latents":
            return _latents(case, cold)
        case _:
            return _attention(case, peers, cold)


def _caches(case: Case, tokens: int, cold: int) -> tuple[list[KVView], int]:
    """Caches of ``cold`` bytes, at least one, and the bytes that the tokens take in one."""
    quant = KINDS["int4 g64" if case.kind == BESIDE else case.kind]
    spec = KVSpec(1, HEADS, HEAD_DIM, torch.bfloat16, "2 B H S D", quant)
    pool = -(-tokens // PAGE) * PAGE
    stored = spec.nbytes(pool, PAGE)
    views = []
    for _ in range(max(1, cold // stored)):
        views.append(KVView.joint(spec.axes, *_filled(spec, pool)))
    return views, stored


def _filled(spec: KVSpec, pool: int) -> tuple[Tensor, Tensor | None]:
    """A cache of random numbers, and its scales."""
    cache, scale = spec.empty(pool, PAGE, device="cuda")
    if scale is None:
        cache.normal_()
    else:
        cache.view(torch.int8).random_(-128, 128)
        scale.uniform_(0.001, 0.02)
    return cache, scale


def _append(case: Case, cold: int) -> Work:
    tokens = case.batch
    views, stored = _caches(case, max(tokens, 4096), cold)
    key, value = torch.randn(2, tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(views[0].num_slots, device="cuda")[:tokens]
    written = stored * tokens // views[0].num_slots
    return Work(
        {"kvloom": lambda i: ops.store(key, value, slots, views[i])},
        key.nbytes + value.nbytes + written,
        0,
        len(views),
        written=[x for x in views[0].tensors if x is not None],
    )


def _attention(case: Case, peers: bool, cold: int) -> Work:
    rows, ratio = case.batch, MODELS[case.model]
    new = {"decode": 1, "prefill": case.context}.get(case.what, CHUNK)
    context = case.context + (CHUNK if case.what == "chunk" else 0)
    views, stored = _caches(case, rows * context, cold)
    query = torch.randn(rows * new, HEADS * ratio, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    pages, batch = _batch(rows, new, context)
    contenders: dict[str, Call] = {"kvloom": lambda i: ops.attend(query, views[i], batch)}
    if case.kind == BESIDE:
        contenders = _beside(case, query, views, batch)
    elif new > 1:
        contenders["in_place"] = lambda i: ops.attend(query, views[i], batch, backend="triton")
    if peers and (case.kind == "bf16" or new > 1):
        contenders |= _dense_peers(case, query, new, context, len(views))
    if peers and case.kind == "bf16" and case.what != "chunk":
        contenders |= _paged_peers(case, query, new, views, pages)
    pairs = rows * (new * (context - new) + new * (new + 1) // 2)
    flops = 4 * pairs * HEADS * ratio * HEAD_DIM
    return Work(contenders, stored + 2 * query.nbytes, flops, len(views), in_graph=new == 1)


def _beside(case: Case, query: Tensor, views: list[KVView], batch: Batch) -> dict[str, Call]:
    """Attention to codes of rotated keys, and to unquantized tokens beside them in the same slots."""
    exact = _caches(case._replace(kind="bf16"), views[0].num_slots, 0)[0][0]
    scores, rotated = Scores(), Transform(HEAD_DIM)

    def attend(batch: Batch) -> Call:
        newest = Unquantized(exact, batch, scores_of_newest(scores, RECENT))
        return lambda i: attend_beside(query, newest, views[i], batch, scores, rotated, skip=RECENT)

    return {"kvloom": attend(batch), "in_place": attend(replace(batch, counts=None))}


def _batch(rows: int, new: int, context: int) -> tuple[Tensor, Batch]:
    """Pages at random, and the batch."""
    pages = torch.randperm(rows * context // PAGE, device="cuda").view(rows, -1)
    starts = torch.arange(rows + 1, device="cuda")
    counts = Counts((new,) * rows, (context,) * rows) if new > 1 else None
    index = CacheIndex.pages(pages * PAGE, PAGE)
    return pages, Batch(index, starts * new, starts * context, counts=counts)


def _latents(case: Case, cold: int) -> Work:
    """A decode step over latents and rope keys of one head."""
    rows, context, heads = case.batch, case.context, LATENTS[case.model]
    axes, tokens = CacheLayout("B S H D"), case.batch * case.context
    latent, rope = (KVSpec(1, 1, dim, torch.bfloat16, axes, KINDS[case.kind]) for dim in (RANK, ROPE))
    stored = sum(spec.nbytes(tokens, PAGE) for spec in (latent, rope))
    views = []
    for _ in range(max(1, cold // stored)):
        (key, key_scale), (value, value_scale) = _filled(latent, tokens), _filled(rope, tokens)
        views.append(KVView.split(axes, key, value, key_scale, value_scale))
    query = torch.randn(rows, heads, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
    _, batch = _batch(rows, 1, context)
    read = stored + query.nbytes + query.nbytes * RANK // (RANK + ROPE)
    contenders = {"kvloom": lambda i: ops.attend(query, views[i], batch, is_latent=True)}
    return Work(contenders, read, 2 * tokens * heads * (2 * RANK + ROPE), len(views))


def _dense_peers(case: Case, query: Tensor, new: int, context: int, turns: int) -> dict[str, Call]:
    """torch's attention over contiguous keys and values in bfloat16, in the same number of memories."""
    shape = (case.batch, HEADS, context, HEAD_DIM)
    if 2 * turns * math.prod(shape) * 2 > 48 << 30:
        return {}
    keys, values = torch.randn(2, turns, *shape, dtype=torch.bfloat16, device="cuda")
    q = query.view(case.batch, new, -1, HEAD_DIM).transpose(1, 2)
    rows = q.reshape(case.batch, HEADS, -1, HEAD_DIM) if new == 1 else q
    how: dict[str, Any] = {}
    if new > 1:
        how = {"attn_mask": causal_lower_right(new, context), "enable_gqa": True}
    return {"sdpa": lambda i: scaled_dot_product_attention(rows, keys[i], values[i], **how)}


def _paged_peers(case: Case, query: Tensor, new: int, views: list[KVView], pages: Tensor) -> dict[str, Call]:
    """Attention of others over the same pages."""
    peers: dict[str, Call] = {}
    if case.model == "Llama-3-8B" and (case.batch, case.context) in ((64, 4096), (1, 8192)):
        peers["flex_attention"] = _flex(case, query, new, views, pages)
    if find_spec("flashinfer") is not None:
        peers["flashinfer"] = _flashinfer(case, query, new, views, pages)
    return peers


def _sides(kv: KVView) -> tuple[Tensor, ...]:
    """Keys and values ``[pages, H, PAGE, D]``."""
    return tuple(side.cache[:, :, 0, :, 0].transpose(1, 2) for side in kv.sides)


def _flex(case: Case, query: Tensor, new: int, views: list[KVView], pages: Tensor) -> Call:
    """FlexAttention over a pool: one long row of keys, of which a mask shows each sequence its pages."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    pool = views[0].num_slots
    owner = torch.full((pool // PAGE,), -1, device="cuda")
    place = torch.zeros(pool // PAGE, dtype=torch.int64, device="cuda")
    owner[pages.flatten()] = torch.arange(case.batch, device="cuda").repeat_interleave(pages.shape[1])
    place[pages.flatten()] = torch.arange(pages.shape[1], device="cuda").repeat(case.batch)
    first = case.context - new

    def is_seen(b: Tensor, h: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        page = slot // PAGE
        return (owner[page] == b) & (place[page] * PAGE + slot % PAGE <= first + q)

    mask = create_block_mask(is_seen, case.batch, None, new, pool, device="cuda")
    attention: Any = torch.compile(flex_attention)
    q = query.view(case.batch, new, -1, HEAD_DIM).transpose(1, 2)

    rows = [[x.transpose(0, 1).reshape(1, HEADS, pool, HEAD_DIM) for x in _sides(view)] for view in views]

    def call(i: int) -> Tensor:
        keys, values = (x.expand(case.batch, -1, -1, -1) for x in rows[i])
        out: Tensor = attention(q, keys, values, block_mask=mask, enable_gqa=True)
        return out

    return call


def _flashinfer(case: Case, query: Tensor, new: int, views: list[KVView], pages: Tensor) -> Call:
    """FlashInfer's paged attention, planned beforehand."""
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    table = (starts * pages.shape[1], pages.flatten().int(), torch.full_like(starts[1:], PAGE))
    shape = (query.shape[1], HEADS, HEAD_DIM)
    if new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(*table, *shape, PAGE, q_data_type=query.dtype, kv_data_type=query.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts * new, *table, *shape, PAGE, causal=True, q_data_type=query.dtype)

    def call(i: int) -> object:
        return wrapper.run(query, _sides(views[i]))

    return call
