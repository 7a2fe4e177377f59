"""Axis orders of a cache tensor; the only permutation code in the library.

Shapes: L layers, 2 key|value, T token slots, B blocks (a page, or a batch row), S slots in a block, H heads,
D head dim. T is B and S in one axis: a single block of T slots.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvloom.errors import ArgumentError, ConfigError, ShapeError


class Term(NamedTuple):
    """Axis, or the outer (``/``) or inner (``%``) part of an axis split into chunks of ``chunk``."""

    axis: str
    part: str
    chunk: int

    def size(self, sizes: dict[str, int]) -> int:
        """Extent of this part when the whole axes have ``sizes``."""
        if self.part == "%":
            return self.chunk
        whole = sizes[self.axis]
        if self.part == "/" and whole % self.chunk:
            raise ShapeError(f"axis {self.axis} must be a multiple of {self.chunk}, got {whole}")
        return whole // self.chunk


_Order: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Term of each canonical axis that a layout has, and the canonical axes that it does not have."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A named order of the axes of a cache tensor, for example ``CacheLayout("L 2 T H D")``.

    Axes are in the order of the tensor's dimensions, separated by spaces. ``D/16`` and ``D%16`` are the outer
    and inner part of an axis that is split into chunks of 16; ``(H D/16)`` is one dimension that holds two
    axes, the second varying faster. ``L`` and ``2`` may be left out: the tensor then holds one layer, or keys
    (or values) only.

    Raises:
        ConfigError: ``axes`` does not name H, D and either T or B and S once each.
    """

    axes: str
    dims: tuple[tuple[Term, ...], ...] = field(init=False, repr=False, compare=False)
    """Terms of each dimension of the tensor."""
    names: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names of the axes of this layout."""
    _order: _Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read = _read if torch.compiler.is_compiling() else _read_once
        for name, value in zip(("dims", "names", "_order"), read(self.axes), strict=True):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self.axes

    @classmethod
    def of(cls, operator: str, cache_layout: int) -> "CacheLayout":
        """Layout that ``operator``'s document calls ``cache_layout``.

        Args:
            operator: A key of ``OPERATOR_LAYOUTS``, for example ``"pmx.dynamic_batching.KeyValueCache"``.
            cache_layout: The number.

        Raises:
            ArgumentError: unknown operator or number.
        """
        table = OPERATOR_LAYOUTS.get(operator)
        if table is None:
            raise ArgumentError(f"operator must be one of {sorted(OPERATOR_LAYOUTS)}, got {operator!r}")
        known = not isinstance(cache_layout, bool) and isinstance(cache_layout, int)
        if not known or not 0 <= cache_layout < len(table):
            raise ArgumentError(
                f"cache_layout must be in [0, {len(table)}) for {operator}, got {cache_layout!r}"
            )
        return table[cache_layout]

    def shape(self, **sizes: int) -> tuple[int, ...]:
        """Shape of a tensor in this layout; ``sizes`` gives every axis but ``2``: ``T=64, H=8, D=128``."""
        known = {"2": 2, **sizes}
        missing = sorted(x for x in self.names if x not in known)
        if missing:
            raise ArgumentError(f"sizes must give {missing} for layout {self.axes!r}, got {sorted(sizes)}")
        shape = []
        for dim in self.dims:
            extent = 1
            for term in dim:
                extent *= term.size(known)
            shape.append(extent)
        return tuple(shape)

    def chunk(self, axis: str) -> int:
        """Number of elements in a chunk of ``axis``, which must divide its extent; 1 if it is not split."""
        return next((t.chunk for dim in self.dims for t in dim if t.axis == axis), 1)

    def canonical(self, x: Tensor, *, name: str = "cache", heads: int | None = None) -> Tensor:
        """View ``x`` as ``[L, 2, B, S/s, s, H, D/d, d]`` without copying; writes go through.

        An axis that the layout does not have has extent 1. An axis that it does not split has s = 1 or d = D.

        Args:
            x: A tensor in this layout, any strides.
            name: Name of ``x`` in errors.
            heads: Extent of H; needed only where H shares a dimension with D.

        Raises:
            ShapeError: ``x`` has another rank, its ``2`` axis is not 2, or a chunk does not divide.
        """
        if x.ndim != len(self.dims):
            raise ShapeError(f"{name} must have the axes [{self.axes}], got shape {list(x.shape)}")
        if heads is not None and heads < 1:
            raise ArgumentError(f"heads must be at least 1, got {heads}")
        known = {"2": 2} if heads is None else {"2": 2, "H": heads}
        num_terms = 0
        for dim, extent in zip(self.dims, x.shape, strict=True):
            parts = _split_extent(dim, extent, known, name, self.axes)
            if len(dim) > 1:
                x = x.unflatten(num_terms, parts)
            num_terms += len(dim)
        order, lacking = self._order
        x = x.permute(order)
        for i in lacking:
            x = x.unsqueeze(i)
        return x

    def for_scale(self) -> "CacheLayout":
        """Layout of the scales of a cache in this layout: the same axes, D not split."""
        dims = []
        for dim in self.dims:
            parts = [
                _spell(t._replace(part="", chunk=1) if t.axis == "D" else t) for t in dim if _is_in_scale(t)
            ]
            if parts:
                dims.append(parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
        return CacheLayout(" ".join(dims))


def as_layout(name: str, layout: CacheLayout | str) -> CacheLayout:
    """``layout`` itself, or the layout with these axes; errors call it ``name``.

    Raises:
        ConfigError: ``layout`` is neither a layout nor the axes of one.
    """
    if isinstance(layout, CacheLayout):
        return layout
    if not isinstance(layout, str):
        raise ConfigError(f"{name} must be a CacheLayout or its axes, got {layout!r}")
    try:
        return CacheLayout(layout)
    except ConfigError as error:
        raise ConfigError(f"{name}'s {error}") from None


# Terms for each canonical axis, of which the first match wins. An unsplit S is its outer part, an unsplit D
# its inner part, so that a chunk is contiguous.
_CANONICAL_TERMS: Final = (
    (("L", ""),),
    (("2", ""),),
    (("B", ""),),
    (("S", "/"), ("S", ""), ("T", "/"), ("T", "")),
    (("S", "%"), ("T", "%")),
    (("H", ""),),
    (("D", "/"),),
    (("D", "%"), ("D", "")),
)


def _split_extent(
    dim: tuple[Term, ...], extent: int, known: dict[str, int], name: str, axes: str
) -> list[int]:
    """Extents of the terms that share one dimension; at most one of them may be unknown."""
    extents = [t.chunk if t.part == "%" else known.get(t.axis, -1) if not t.part else -1 for t in dim]
    unknown = [i for i, e in enumerate(extents) if e < 0]
    product = 1
    for e in extents:
        product *= max(e, 1)
    if len(unknown) > 1:
        raise ArgumentError(f"heads must be given to take {name} [{axes}] apart, got None")
    if extent != product if not unknown else extent % product:
        wanted = f"{product}" if not unknown else f"a multiple of {product}"
        terms = " ".join(map(_spell, dim))
        raise ShapeError(f"{name} must have {wanted} for axis {terms!r} of [{axes}], got {extent}")
    for i in unknown:
        extents[i] = extent // product
    return extents


def _spell(term: Term) -> str:
    return f"{term.axis}{term.part}{term.chunk if term.part else ''}"


def _is_in_scale(term: Term) -> bool:
    return not (term.axis == "D" and term.part == "/")


def _read(axes: str) -> tuple[tuple[tuple[Term, ...], ...], frozenset[str], _Order]:
    """Parse axes: terms of each dimension, names of axes, and canonical order."""
    dims = _parse(axes)
    terms = [term for dim in dims for term in dim]
    place = {(term.axis, term.part): i for i, term in enumerate(terms)}
    found = [next((place[c] for c in wanted if c in place), None) for wanted in _CANONICAL_TERMS]
    order = tuple(at for at in found if at is not None)
    return dims, frozenset(t.axis for t in terms), (order, tuple(i for i, x in enumerate(found) if x is None))


_read_once: Final = lru_cache(maxsize=256)(_read)
"""Cached ``_read``, since views are made often. Not for tracing: a graph must not depend on the cache."""


def _parse(axes: str) -> tuple[tuple[Term, ...], ...]:
    dims = []
    for dim in re.findall(r"\([^()]*\)|\S+", axes):
        terms = []
        words = (dim[1:-1] if dim[0] == "(" and dim[-1] == ")" else dim).split()
        if not words:
            raise ConfigError(f"axes must name an axis in every bracket, got {axes!r}")
        for word in words:
            match = re.fullmatch(r"([L2BSTHD])(?:([/%])([1-9]\d*))?", word)
            if match is None:
                raise ConfigError(f"axes must be made of L 2 B S T H D, got {word!r} in {axes!r}")
            terms.append(Term(match[1], match[2] or "", int(match[3] or 1)))
        dims.append(tuple(terms))
    _check_axes([t for dim in dims for t in dim], axes)
    return tuple(dims)


def _check_axes(terms: list[Term], axes: str) -> None:
    seen: dict[str, list[Term]] = {}
    for term in terms:
        seen.setdefault(term.axis, []).append(term)
    for axis, parts in seen.items():
        whole = [t.part for t in parts] == [""]
        split = sorted(t.part for t in parts) == ["%", "/"] and len({t.chunk for t in parts}) == 1
        if not (whole or (split and axis in "STD")):
            raise ConfigError(f"axes must name {axis} once, or as {axis}/n and {axis}%n, got {axes!r}")
    required = {"T", "H", "D"} if "T" in seen else {"B", "S", "H", "D"}
    if seen.keys() - {"L", "2"} != required:
        raise ConfigError(f"axes must name H, D and either T or B and S, got {axes!r}")


def _table(*axes: str) -> tuple[CacheLayout, ...]:
    return tuple(map(CacheLayout, axes))


PMX_STATIC: Final = _table("B L 2 S H D", "L B 2 H S D")
PMX_DYNAMIC: Final = _table("T L 2 H D", "L T 2 H D", "L 2 T H D", "L 2 H T D")
PMX_ATTENTION: Final = _table("T L 2 H D", "L T 2 H D", "L H T 2 D", "2 L H T D")

OPERATOR_LAYOUTS: Final = {
    "pmx.KeyValueCache": PMX_STATIC,
    "pmx.dynamic_batching.KeyValueCache": PMX_DYNAMIC,
    "pmx.dynamic_batching.MultiHeadCacheAttention": PMX_ATTENTION,
    # The later upstream documents, in which the fused operator has the numbers of the unfused one.
    "opmx.KeyValueCache": PMX_STATIC,
    "opmx.dynamic_batching.KeyValueCache": PMX_DYNAMIC,
    "opmx.dynamic_batching.MultiHeadCacheAttention": PMX_DYNAMIC,
}
"""Layouts by the integers of each operator document: ``OPERATOR_LAYOUTS[operator][cache_layout]``."""

HUGGING_FACE: Final = CacheLayout("B H S D")
FLASHINFER_NHD: Final = CacheLayout("B 2 S H D")
FLASHINFER_HND: Final = CacheLayout("B 2 H S D")
# Codes in the order of integer dot products, in contiguous blocks of 16 tokens: for keys four adjacent bytes
# of each token, for values the same byte of four tokens.
NATIVE_KEYS: Final = CacheLayout("B H S/16 D/4 S%16 D%4")
NATIVE_VALUES: Final = CacheLayout("B H S/4 D/1 S%4 D%1")
ASCEND_NORM: Final = CacheLayout("B S H D")


def ascend_fractal_nz(chunk: int, *, merged: bool = True) -> CacheLayout:
    """Ascend's FRACTAL_NZ: ``[blocks, H * D / chunk, S, chunk]``, or 5-D with H and D/chunk apart.

    Args:
        chunk: Elements in 32 bytes: 8 for 4-byte, 16 for 2-byte, 32 for 1-byte dtypes. D must be a multiple
            of it.
        merged: The 4-D form, in which H and D/chunk share a dimension.
    """
    return CacheLayout(f"B (H D/{chunk}) S D%{chunk}" if merged else f"B H D/{chunk} S D%{chunk}")
