"""Caches for operator tests: poisoned storage, a view on it, and a dict that knows what it should hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from core.addresses import address_table, extents
from oracles import full_range, two_bits
from oracles.bits import assert_same_bits, generator, poison
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView

JOINT_AXES = ("L 2 T H D", "T L 2 H D", "L 2 H T D", "L H T 2 D", "2 L H T D", "B L 2 S H D", "L B 2 H S D",
              "2 B S H D", "2 B H S D", "B 2 S H D", "B 2 H S D", "2 B (H D/4) S D%4")  # fmt: skip
SPLIT_AXES = ("B S H D", "B H S D", "B H D/4 S D%4", "B (H D/4) S D%4", "B H S/2 D S%2", "T H D", "B S (H D)",
              "L B H S D", "T/3 D/2 H T%3 D%2", "B (D H) S")  # fmt: skip
ALL_AXES = JOINT_AXES + SPLIT_AXES


@dataclass(frozen=True)
class Kind:
    """What a cache holds: values of ``dtype``, or codes of ``bits`` with a scale for each ``group``.

    With ``full_range`` codes of 4 and 2 bits are stored so.
    """

    dtype: torch.dtype
    bits: int = 0
    group: int = 4
    scale_dtype: torch.dtype = torch.float16
    full_range: bool = False

    def __str__(self) -> str:
        if not self.bits:
            return str(self.dtype).removeprefix("torch.")
        range = "full-" if self.full_range else ""
        return f"int{self.bits}-{range}{str(self.scale_dtype).removeprefix('torch.')}"


INT8 = Kind(torch.int8, 8)
INT4 = Kind(torch.uint8, 4, 2, torch.float32)
FULL4 = Kind(torch.uint8, 4, 2, torch.float32, full_range=True)
INT2 = Kind(torch.bits2x4, 2, 8, torch.float32)
FULL2 = Kind(torch.bits2x4, 2, 8, torch.float32, full_range=True)
PLAIN = Kind(torch.float32)


@dataclass
class Pool:
    """Raw tensors by name, each part of a larger ``base`` in which every byte is poison at first.

    ``rows[part, slot]`` is what the pool should hold there: ``part`` is key, value, key_scale or value_scale.
    """

    axes: str
    sizes: dict[str, int]
    kind: Kind
    layer: int
    head_dims: dict[str, int]
    bases: dict[str, Tensor] = field(default_factory=dict)
    raw: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return self.sizes["T"] if "T" in self.axes else self.sizes["B"] * self.sizes["S"]

    @property
    def joint(self) -> bool:
        return "2" in CacheLayout(self.axes).names

    def view(self) -> KVView:
        """The library's view of the raw tensors."""
        how = {"layer": self.layer, "heads": self.sizes["H"]}
        if self.joint:
            return KVView.joint(CacheLayout(self.axes), self.raw["cache"], self.raw.get("scale"), **how)
        return KVView.split(CacheLayout(self.axes), *map(self.raw.get, PARTS), **how)

    def where(self, part: str) -> tuple[str, Tensor]:
        """Name of the base tensor that holds ``part``, and the offsets ``[slots, H, width]`` in it."""
        side = int(self.joint and part.startswith("value"))
        name = ("scale" if part.endswith("scale") else "cache") if self.joint else part
        axes = scale_axes(self.axes) if part.endswith("scale") else self.axes
        within = address_table(axes, {**self.sizes, "D": self.width(part)}, self.layer, side)
        return name, place_in_base(self.bases[name], self.raw[name])[within]

    def width(self, part: str) -> int:
        """Stored elements of a head vector."""
        head_dim = self.head_dims[part.removesuffix("_scale")]
        if part.endswith("scale"):
            return head_dim // self.kind.group
        return head_dim * (self.kind.bits or 8) // 8

    def remember(self, part: str, slot: int, row: Tensor) -> None:
        """``row``, ``[H, D]`` new keys or values, belongs into ``slot``: quantized as the document says."""
        if not self.kind.bits:
            self.rows[part, slot] = row.to(self.kind.dtype)
            return
        codes = torch.empty(len(row), self.width(part), dtype=self.kind.dtype)
        scales = torch.empty(len(row), self.width(f"{part}_scale"), dtype=self.kind.scale_dtype)
        for h, vector in enumerate(row):
            if self.kind.bits == 2:
                two_bits.store_vector(vector, codes, scales, h, self.kind.group, self.kind.full_range)
            elif self.kind.full_range:
                full_range.store_vector(vector, codes, scales, h, self.kind.group)
            else:
                pmx_golden.store_vector(vector, codes, scales, (h,), self.kind.bits, self.kind.group)
        self.rows[part, slot], self.rows[f"{part}_scale", slot] = codes, scales

    def recall(self, part: str, slot: int, dtype: torch.dtype) -> Tensor:
        """What a load of ``slot`` should give, ``[H, D]``."""
        if not self.kind.bits:
            return self.rows[part, slot].to(dtype)
        codes, scales = self.rows[part, slot], self.rows[f"{part}_scale", slot]
        vectors = [
            two_bits.load_vector(codes, scales, h, self.kind.group, dtype)
            if self.kind.bits == 2
            else pmx_golden.load_vector(codes, scales, (h,), self.kind.bits, self.kind.group, dtype)
            for h in range(len(codes))
        ]
        return torch.stack(vectors)

    def parts(self) -> list[str]:
        """The parts that this pool has."""
        found = PARTS if self.kind.bits else PARTS[:2]
        return [part for part in found if self.joint or not self.raw or part in self.raw]

    def check(self) -> None:
        """Every byte of storage: what was remembered where it belongs, and poison everywhere else."""
        expected = {name: as_integers(base).clone().flatten() for name, base in self.first.items()}
        for part in self.parts():
            name, offsets = self.where(part)
            for slot in range(self.num_slots):
                row = self.rows.get((part, slot))
                if row is not None:
                    expected[name][offsets[slot]] = as_integers(row)
        for name, base in self.bases.items():
            assert_same_bits(as_integers(base).flatten(), expected[name], name)


PARTS = ("key", "value", "key_scale", "value_scale")


def make_pool(
    axes: str,
    kind: Kind,
    *,
    heads: int = 2,
    head_dim: int | None = None,
    value_dim: int | None = None,
    blocks: int = 3,
    block_size: int = 4,
    strided: bool = False,
    seed: int = 0,
) -> Pool:
    """A pool of random bytes; ``strided`` puts each raw tensor with gaps into a larger one.

    Without a head dim vectors take at least the 4 stored elements that some layouts split them by.
    """
    head_dim = head_dim or small_head_dim(kind)
    sizes = {"L": 2, "B": blocks, "S": block_size, "T": blocks * block_size, "H": heads}
    head_dims = {"key": head_dim, "value": value_dim or head_dim}
    pool = Pool(axes, sizes, kind, int("L" in axes), head_dims)
    rng = generator(seed)
    for part in pool.parts():
        name = {"key": "cache", "key_scale": "scale"}.get(part) if pool.joint else part
        if name is None:
            continue
        is_scale = part.endswith("scale")
        shape = extents(scale_axes(axes) if is_scale else axes, {**sizes, "D": pool.width(part)})
        base = poison(
            [n + 1 for n in shape] if strided else shape, kind.scale_dtype if is_scale else kind.dtype, rng
        )
        pool.bases[name], pool.first[name] = base, base.clone()
        pool.raw[name] = base[tuple(slice(-n, None) for n in shape)]
    return pool


def small_head_dim(kind: Kind) -> int:
    """8, or the 16 numbers in 4 bytes of 2-bit codes."""
    return 16 if kind.bits == 2 else 8


def scale_axes(axes: str) -> str:
    """Axes of the scales: D whole."""
    return re.sub(r"D%\d+", "D", re.sub(r" ?D/\d+", "", axes))


def as_integers(x: Tensor) -> Tensor:
    """``x`` as integers of its own width, so that equal means equal bits."""
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def place_in_base(base: Tensor, part: Tensor) -> Tensor:
    """Offset in ``base`` of each element of its part, in row-major order of the part."""
    every = torch.arange(base.numel()).view(base.shape)
    offset = part.storage_offset() - base.storage_offset()
    return every.as_strided(part.shape, part.stride(), offset).flatten()


def new_tokens(count: int, pool: Pool, dtype: torch.dtype, seed: int, part: str = "key") -> Tensor:
    """``[count, H, D]``: random bits where they are copied, else values of many magnitudes."""
    rng = generator(seed)
    shape = (count, pool.sizes["H"], pool.head_dims[part])
    if not pool.kind.bits and dtype == pool.kind.dtype:
        return poison(shape, dtype, rng)
    magnitude = 10.0 ** (torch.rand(*shape[:2], 1, generator=rng) * 4 - 2)
    return (torch.randn(shape, generator=rng) * magnitude).to(dtype)
