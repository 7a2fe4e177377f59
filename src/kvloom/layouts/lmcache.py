"""Layouts of LMCache: nested lists of tensors that an engine registers there, read and made.

LMCache names a layout by the axes of its lists and of the tensors in them: ``NL_X_NB_TWO_BS_NH_HS`` is a list
of NL layers of tensors ``[NB, 2, BS, NH, HS]``. The names are parsed, so that new ones of the same words need
no code here. Read from LMCache 0.5.6 (``EngineKVFormat``; a list of axes is its issue 3560's *ordered
partition of logical axes*).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import Tensor

from kvloom.core.checks import expect_tensor
from kvloom.core.layouts import CacheLayout
from kvloom.errors import ArgumentError, ShapeError
from kvloom.layouts.conversion import Placement, convert
from kvloom.layouts.tensors import KVTensors

NestedTensors: TypeAlias = "Tensor | Sequence[NestedTensors]"
"""Tensor, or nested lists of tensors."""

_LISTS: Final = {"NL": "L", "TWO": "2", "NP": "2"}
"""Axes of lists; planes of a latent are its keys and values."""

_DIMS: Final = {
    "NB": "B",
    "NL": "L",
    "TWO": "2",
    "BS": "S",
    "NBBS": "T",
    "NH": "H",
    "HS": "D",
    "CS": "(2 D)",
    "ONE": "1",
}
"""Axes of dimensions; ``1`` has one element, for no axis or the one head of a latent."""


@dataclass(frozen=True, slots=True)
class LMCacheFormat:
    """Layout of LMCache.

    Attributes:
        name: Name in LMCache's ``EngineKVFormat``.
        lists: Axes of the lists, the outermost first: ``L`` layers, ``2`` keys and values.
        dims: Axes of the dimensions of a tensor, as of ``CacheLayout``; ``1`` for a dimension without.

    Raises:
        ArgumentError: the name has other words, or its axes are no layout.
    """

    name: str
    lists: tuple[str, ...]
    dims: tuple[str, ...]

    @classmethod
    def of(cls, name: str) -> "LMCacheFormat":
        """Parse the layout with this name."""
        if not isinstance(name, str):
            raise ArgumentError(f"format must be a name of LMCache's EngineKVFormat, got {name!r}")
        *lists, inner = (part.split("_") for part in name.split("_X_"))
        outer = tuple(_axis(name, word, _LISTS) for words in lists for word in words)
        dims = tuple(_axis(name, word, _DIMS) for word in inner)
        if "H" not in dims:  # a latent has one head
            dims = tuple("H" if axis == "1" else axis for axis in dims)
        found = cls(name, outer, dims)
        if len({*outer}) != len(outer) or {*outer} & {*found.layout.names}:
            raise ArgumentError(f"format must name each axis once, got {name!r}")
        return found

    @property
    def layout(self) -> CacheLayout:
        """Layout of a tensor without its dimensions of one element."""
        axes = [axis for axis in self.dims if axis != "1"]
        if "H" not in axes and "D" in axes:
            axes[axes.index("D")] = "(H D)"
        return CacheLayout(" ".join(axes))

    @property
    def partition(self) -> list[list[str]]:
        """Logical axes of lists and dimensions, in order: L layers, B pages, N tokens of a page, H heads, C
        elements of a head, KV keys and values."""
        letters = {"2": ["KV"], "S": ["N"], "T": ["B", "N"], "D": ["C"], "(2 D)": ["KV", "C"], "1": []}
        return [letters.get(axis, [axis]) for axis in (*self.lists, *self.dims)]


def from_lmcache(kv_caches: NestedTensors, format: str, *, heads: int | None = None) -> KVTensors:
    """Keys and values from tensors that an engine registers with LMCache; memory is shared.

    Args:
        kv_caches: Lists of tensors, or one, in this format.
        format: A name of LMCache's ``EngineKVFormat``.
        heads: Number of key/value heads, if they have no dimension of their own in the format and it is not a
            latent.

    Raises:
        ArgumentError: there is no such name, the lists are nested otherwise, or latents have three planes.
        ShapeError: a tensor has other dimensions.
    """
    found = LMCacheFormat.of(format)
    tensors = {}
    for place, x in _leaves(kv_caches, found, {}):
        word = "cache" if "2" in found.layout.names else ("key", "value")[place.get("2", 0)]
        front = f"layers.{place['L']}." if "L" in place else ""
        tensors[front + word] = _without_ones(_shown(place), x, found.dims)
    return KVTensors(tensors, found.layout, heads if "H" in found.dims or heads else 1)


def to_lmcache(source: KVTensors, format: str, *, page_size: int | None = None) -> Any:
    """Copy keys and values to new tensors, nested as in LMCache.

    Args:
        source: Tensors to convert, in one shard.
        format: A name of LMCache's ``EngineKVFormat``.
        page_size: Tokens in a page; those of ``source`` if ``None``.

    Returns:
        Lists of contiguous tensors in this format, or one tensor.

    Raises:
        ArgumentError: there is no such name, or the format cannot hold the source without loss.
        ShapeError: the same.
    """
    found = LMCacheFormat.of(format)
    layout, has_values = found.layout, any(view.value is not None for [view, *_] in source.views)
    if source.num_shards > 1:
        raise ArgumentError(f"source must be one shard, got {source.num_shards}")
    if "H" not in found.dims and source.heads != 1:
        raise ArgumentError(f"source must have the one head of a latent for {format}, got {source.heads}")
    if has_values and "2" not in layout.names and "2" not in found.lists:
        raise ArgumentError(f"source must have keys alone for {format}, got keys and values")
    made = convert(source, Placement(layout, None if "T" in layout.names else page_size)).tensors
    is_listed = len(source.views) > 1 and "L" not in layout.names

    def nested(axes: Sequence[str], place: dict[str, int]) -> Any:
        if axes:
            count = len(source.views) if axes[0] == "L" else 1 + has_values
            return [nested(axes[1:], {**place, axes[0]: i}) for i in range(count)]
        word = "cache" if "2" in layout.names else ("key", "value")[place.get("2", 0)]
        return _with_ones(made[f"layers.{place['L']}.{word}" if is_listed else word], found.dims)

    return nested(found.lists, {})


def _axis(name: str, word: str, known: Mapping[str, str]) -> str:
    if word not in known:
        raise ArgumentError(f"format must have one of {', '.join(known)} where {name!r} has {word!r}")
    return known[word]


def _leaves(
    x: NestedTensors, found: LMCacheFormat, place: dict[str, int]
) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Iterate over all tensors, each with its place in the lists."""
    if len(place) == len(found.lists):
        expect_tensor(_shown(place), x)
        yield place, x  # type: ignore[misc]  # it is one
        return
    axis = found.lists[len(place)]
    if isinstance(x, Tensor) or not isinstance(x, Sequence) or not x:
        raise ArgumentError(
            f"{_shown(place)} must be a list that is not empty for {found.name}, got {type(x).__name__}"
        )
    if axis == "2" and len(x) > 2:
        raise ArgumentError(f"{_shown(place)} must be keys and values, or one of them, got {len(x)} of them")
    for i, inner in enumerate(x):
        yield from _leaves(inner, found, {**place, axis: i})


def _shown(place: Mapping[str, int]) -> str:
    return "kv_caches" + "".join(f"[{i}]" for i in place.values())


def _without_ones(name: str, x: Tensor, dims: Sequence[str]) -> Tensor:
    """View without the dimensions that have no axis."""
    ones = [i for i, axis in enumerate(dims) if axis == "1"]
    if x.ndim != len(dims) or any(x.shape[i] != 1 for i in ones):
        raise ShapeError(f"{name} must have the axes [{' '.join(dims)}], got shape {list(x.shape)}")
    return x.squeeze(ones) if ones else x


def _with_ones(x: Tensor, dims: Sequence[str]) -> Tensor:
    for i, axis in enumerate(dims):
        if axis == "1":
            x = x.unsqueeze(i)
    return x
