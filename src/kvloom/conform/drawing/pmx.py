"""Legal calls of the PMX operators."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.conform.describe import Call
from kvloom.conform.draw import Draw, ints, starts
from kvloom.conform.oracles.pmx import DYNAMIC_AXES, FUSED_AXES, STATIC_AXES

NO_PAGE = (-1, 2**63 - 1)
DEFAULTS = {
    "num_layer": 1,
    "layer_idx": 0,
    "quant_bit": 0,
    "quant_group": 8,
    "num_repeat": 1,
    "cache_layout": 0,
    "cache_mode": 0,
    "is_alibi": 0,
}


@dataclass(frozen=True)
class _Numbers:
    """Dtypes, codes and kind of numbers of a call."""

    inputs: torch.dtype
    cache: torch.dtype
    scale: torch.dtype | None
    bits: int
    group: int
    kind: str

    @property
    def text(self) -> str:
        stored = f"int{self.bits} groups of {self.group}" if self.bits else str(self.cache)[6:]
        return f"{str(self.inputs)[6:]} into {stored}, {self.kind}"

    @property
    def attributes(self) -> Call:
        return {"quant_bit": self.bits, "quant_group": self.group}

    def new(self, draw: Draw, shape: list[int]) -> Tensor:
        if self.kind == "small numbers":
            return draw.calm(shape, self.inputs)
        if self.kind == "ties":
            return draw.ties(shape, self.inputs, self.group, self.bits)
        if self.bits == 0:
            return draw.numbers(shape, self.inputs, edges=self.kind == "edge values")
        x = draw.numbers(shape, self.inputs).clamp(-1000, 1000)
        if self.kind == "edge values":  # only those whose codes are defined
            groups = x.view(-1, self.group)
            small = torch.finfo(self.inputs).smallest_normal / 4
            for i in range(0, len(groups), 3):
                groups[i] = draw.one([0.0, -0.0, small, 1e-5, 1000.0])
        return x

    def stored(self, draw: Draw, axes: str, sizes: dict[str, int]) -> tuple[Tensor, Tensor | None]:
        lead = [sizes[axis] for axis in axes[:-1]]
        if not self.bits:
            return draw.poison([*lead, sizes["D"]], self.cache), None
        cache = draw.poison([*lead, sizes["D"] * self.bits // 8], self.cache)
        assert self.scale is not None  # noqa: S101
        return cache, draw.between(1 / 1024, 1 / 64, [*lead, sizes["D"] // self.group], self.scale)


def _numbers(draw: Draw, fused: bool = False) -> _Numbers:
    inputs = draw.one([torch.float32, torch.float16])
    bits = draw.one([0, 8, 8, 4, 4])
    group = draw.one([2, 4, 8])
    if bits:
        kind = "small numbers" if fused else draw.one(["normal numbers", "ties", "edge values"])
        cache = torch.int8 if bits == 8 else torch.uint8
        return _Numbers(inputs, cache, draw.one([torch.float32, torch.float16]), bits, group, kind)
    if not fused and draw.integer(0, 5) == 0:
        return _Numbers(torch.int8, torch.int8, None, 0, 8, "codes")
    kind = "small numbers" if fused else draw.one(["normal numbers", "edge values"])
    return _Numbers(inputs, draw.one([inputs, torch.float32, torch.float16]), None, 0, 8, kind)


def draw_static(draw: Draw) -> tuple[str, Call]:
    """``KeyValueCache``."""
    how, layout = _numbers(draw), draw.one([0, 1])
    sizes = {
        "B": draw.integer(1, 3),
        "L": draw.integer(1, 2),
        "K": 2,
        "S": draw.integer(3, 5),
        "H": draw.integer(1, 2),
        "D": 8,
    }
    batch, count = draw.integer(1, sizes["B"]), draw.integer(1, 3)
    start = draw.one([0, 0, sizes["S"] - count, draw.integer(0, sizes["S"] - count)])
    cache, scale = how.stored(draw, STATIC_AXES[layout], sizes)
    new = [how.new(draw, [batch, count, sizes["H"], 8]) for _ in "kv"]
    about = f"layout {layout}, {how.text}, {count} tokens at {start}"
    if draw.integer(0, 3) == 0:
        new, about = [draw.strided(x) for x in new], f"{about}, strided inputs"
    return _said(draw, about, {
        "current_key": new[0],
        "current_value": new[1],
        "start_pos": start,
        "cache": cache,
        "scale": scale,
        "num_layer": sizes["L"],
        "layer_idx": draw.integer(0, sizes["L"] - 1),
        **how.attributes,
        "num_repeat": draw.one([1, 1, 2]),
        "cache_layout": layout,
    })  # fmt: skip


def draw_dynamic(draw: Draw) -> tuple[str, Call]:
    """``dynamic_batching.KeyValueCache``."""
    how, layout = _numbers(draw), draw.one([0, 1, 2, 3])
    about, call = _ragged(draw, how, DYNAMIC_AXES[layout], 8)
    call["num_repeat"] = draw.one([1, 1, 2])
    return _said(draw, f"layout {layout}, {about}", {**call, "cache_layout": layout})


def draw_fused(spec: str, draw: Draw) -> tuple[str, Call]:
    """``dynamic_batching.MultiHeadCacheAttention`` of the document ``spec``."""
    how, layout = _numbers(draw, fused=True), draw.one([0, 1, 2, 3])
    about, call = _ragged(draw, how, FUSED_AXES[spec][layout], 8, tokens=spec == "pmx")
    if how.bits == 0:  # attention must read numbers
        call["cache"] = draw.calm(list(call["cache"].shape), call["cache"].dtype)
    heads = call["current_key"].shape[1]
    per_head = draw.one([1, 2])
    count, stored = int(call["seqstarts"][-1]), int(call["kvstarts"][-1])
    mask = None
    if draw.integer(0, 2) == 0 and count and stored:
        lead = [heads * per_head] if draw.integer(0, 1) else []
        wider = draw.one([0, 0, 3]) if spec == "opmx" else 0
        mask = draw.calm([*lead, count, stored + wider], how.inputs)
    lengths = (call["seqstarts"][1:] - call["seqstarts"][:-1]).tolist()
    decoding = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
    extra: Call = {"is_alibi": draw.one([0, 0, 1])} if spec == "opmx" else {}
    if spec == "pmx":
        del call["page_size"]
    about = f"layout {layout}, {about}, {per_head} query heads to one"
    return _said(draw, about, {
        "query": draw.calm([count, heads * per_head, 8], how.inputs),
        **call,
        "decoding_batches": decoding,
        "attn_mask": mask,
        "num_heads": heads * per_head,
        "head_dim": 8,
        "is_causal": draw.one([0, 1, 1]),
        "num_kv_heads": heads,
        "cache_layout": layout,
        **extra,
    })  # fmt: skip


def _said(draw: Draw, about: str, call: Call) -> tuple[str, Call]:
    """The call; one in five omits the attributes with default values."""
    if draw.integer(0, 4):
        return about, call
    left_out = {name for name, default in DEFAULTS.items() if name in call and call[name] == default}
    if "num_heads" in call and call["num_heads"] == call["num_kv_heads"]:
        left_out.add("num_kv_heads")
    return f"{about}, defaults left out", {name: x for name, x in call.items() if name not in left_out}


def _ragged(draw: Draw, how: _Numbers, axes: str, dim: int, tokens: bool = False) -> tuple[str, Call]:
    batch, heads, layers = draw.integer(1, 3), draw.integer(1, 2), draw.integer(1, 2)
    count = [draw.one([0, 1, 1, 2, 3]) if batch > 1 else draw.integer(1, 4) for _ in range(batch)]
    page, mode = draw.one([2, 4]), draw.one([0, 1])
    past = [draw.one([0, 1, page - 1, page, page + 1]) for _ in range(batch)]
    total = [a + b for a, b in zip(count, past, strict=True)]
    if mode == 0:
        shared = _shared(draw, count, lambda reader, writer: 0 < past[reader] <= total[writer])
        table, slots, kind = _offsets(draw, count, past, shared)
    elif tokens:
        shared = _shared(draw, count, lambda reader, writer: past[reader] > 0)
        table, slots, kind = _token_table(draw, count, past, shared)
    else:
        shared = _shared(draw, count, lambda reader, writer: past[reader] >= page)
        table, slots, kind = _page_table(draw, past, total, page, shared)
    sizes = {"T": slots, "L": layers, "K": 2, "H": heads, "D": dim}
    cache, scale = how.stored(draw, axes, sizes)
    new = [how.new(draw, [sum(count), heads, dim]) for _ in "kv"]
    about = f"{kind}, {how.text}, new {count} behind {past}"
    if shared is not None:
        about = f"{about}, entry {shared[0]} reads what entry {shared[1]} writes"
    if draw.integer(0, 4) == 0:
        new, about = [draw.strided(x) for x in new], f"{about}, strided inputs"
    return about, {
        "current_key": new[0],
        "current_value": new[1],
        "seqstarts": ints(starts(count)),
        "kvstarts": ints(starts(total)),
        "cachestarts": table,
        "start_pos": ints(past),
        "max_seqlen": max(count),
        "max_kvlen": max(total),
        "cache": cache,
        "scale": scale,
        "num_layer": layers,
        "layer_idx": draw.integer(0, layers - 1),
        **how.attributes,
        "cache_mode": mode,
        "page_size": page,
    }


Shared = tuple[int, int] | None
"""Entry whose history another entry of the call writes, and that other entry."""


def _shared(draw: Draw, count: list[int], can: Callable[[int, int], bool]) -> Shared:
    """Choose a pair, mostly a reader before its writer, if any pair ``can``."""
    entries = range(len(count))
    pairs = [(a, b) for b in entries if count[b] for a in entries if a != b and can(a, b)]
    ahead = [pair for pair in pairs if pair[0] < pair[1]]
    wanted = draw.one([[], ahead, ahead, pairs])
    return draw.one(wanted) if wanted else None


def _offsets(draw: Draw, count: list[int], past: list[int], shared: Shared) -> tuple[Tensor, int, str]:
    """Entries in any order, with gaps; one may continue after the tokens of another."""
    where, at = [0] * len(count), draw.integer(0, 2)
    reader, writer = shared or (-1, -1)
    for b in draw.distinct(len(count), len(count)):
        if b == reader:
            continue
        where[b] = at
        at += past[b] + count[b]
        if b == writer:
            where[reader] = at - past[reader]
            at += count[reader]
        at += draw.integer(0, 2)
    return ints(where), at + 1, "offsets"


def _token_table(draw: Draw, count: list[int], past: list[int], shared: Shared) -> tuple[Tensor, int, str]:
    """A slot for each token."""
    first = starts([a + b for a, b in zip(count, past, strict=True)])
    slots = first[-1] + 3
    table = draw.distinct(first[-1], slots)
    if shared is not None:
        reader, writer = shared
        seen, written = draw.integer(0, past[reader] - 1), draw.integer(0, count[writer] - 1)
        table[first[reader] + seen] = table[first[writer] + past[writer] + written]
    return ints(table), slots, "token table"


def _page_table(
    draw: Draw, past: list[int], total: list[int], page: int, shared: Shared
) -> tuple[Tensor, int, str]:
    """Pages that start at any slot, or at multiples of their size."""
    need = [-(-length // page) for length in total]
    gap = draw.one([0, 2])
    firsts, slots = [], 0
    for _ in range(sum(need) + 1):
        slots += draw.integer(0, gap)
        firsts.append(slots)
        slots += page
    free = iter(draw.distinct(sum(need), len(firsts)))
    pages = [[firsts[next(free)] for _ in range(n)] for n in need]
    if shared is not None:
        reader, writer = shared
        pages[reader][0] = pages[writer][past[writer] // page]
    width = max(need) + draw.integer(0, 1)
    rows = [row + [draw.one(NO_PAGE)] * (width - len(row)) for row in pages]
    return ints(rows).reshape(len(rows), width), slots, f"pages of {page}{' at any slot' if gap else ''}"
