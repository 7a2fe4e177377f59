"""Copies between vLLM's blocks and the pages of a store, of any page sizes, with unchanged codes.

Layers whose blocks are allocated together are a *group*. Groups may differ in tokens per block. A group with
a window has the null block for tokens before the window.

Shapes: N pages of S tokens, H key/value heads of one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Final

import torch
from torch import Tensor

from kvloom import ops
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import UnsupportedError
from kvloom.store.fingerprint import Fingerprint, LayerFormat
from kvloom.store.format import page_bytes
from kvloom.store.tier import ReadPages
from kvloom.store.transfer import views

NULL_BLOCK: Final = 0

BlockIds = Sequence[Sequence[int]]
"""Ids of a request's blocks in order, one sequence for each group."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are allocated together.

    Attributes:
        layers: Numbers of the layers in the model.
        block_size: Tokens in a block.
        window: Tokens that a token sees, itself included; ``None`` for all.
    """

    layers: tuple[int, ...]
    block_size: int
    window: int | None = None


def page_size(groups: Sequence[Group]) -> int:
    """Least number of tokens that fills whole blocks in every group."""
    return lcm(*(group.block_size for group in groups))


def attention(groups: Sequence[Group]) -> str:
    """Text for the fingerprint: ``"full"``, or the window of each layer, 0 for none."""
    windows = {layer: group.window or 0 for group in groups for layer in group.layers}
    if not any(windows.values()):
        return "full"
    return "windows " + " ".join(str(windows[layer]) for layer in sorted(windows))


def layer_format(
    heads: int, head_dim: int, dtype: torch.dtype, quant: QuantSpec | None, rotation: str = "none"
) -> LayerFormat:
    """Format of a layer's tokens, for all heads of all ranks.

    Args:
        heads: Number of key/value heads.
        head_dim: Elements of a head vector.
        dtype: Dtype that the model computes in.
        quant: Quantization; ``None`` for unquantized tokens.
        rotation: Which of keys and values are rotated before, one of ``ROTATIONS``.
    """
    side = KVSpec(1, heads, head_dim, dtype, quant=quant).side
    return LayerFormat(heads, side, side).rotated_as(rotation)


def heads_of(heads: int, rank: int, ranks: int) -> range:
    """Numbers of the heads of a rank; if there are more ranks than heads, several ranks share a head.

    Args:
        heads: Number of heads of all ranks.
        rank: Number of the rank, from 0.
        ranks: Number of ranks, a divisor or a multiple of ``heads``.
    """
    first = rank * heads // ranks
    return range(first, first + max(1, heads // ranks))


class Blocks:
    """All pages of one rank.

    Args:
        fingerprint: Fingerprint of the model, for all heads of all ranks.
        heads: Numbers of the heads of this rank.
        groups: Groups of all layers, each layer in one group.
        layers: Pages of each layer by its number, H heads each. Other layers have none.

    Raises:
        UnsupportedError: layers differ in heads, so the heads of one rank cannot be read alone.
    """

    def __init__(
        self, fingerprint: Fingerprint, heads: range, groups: Sequence[Group], layers: Mapping[int, KVView]
    ) -> None:
        counts = {layer.heads for layer in fingerprint.layers}
        if len(heads) not in counts and len(counts) > 1:
            raise UnsupportedError(f"layers must have equal heads for a store on several ranks, got {counts}")
        self.page_size = page_size(groups)
        self._groups = groups
        self._views = [layers[number] for number in sorted(layers)]
        group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._group_of = [group_of[number] for number in sorted(layers)]
        mine = fingerprint.layers
        if len(counts) == 1:
            mine = tuple(replace(layer, heads=len(heads)) for layer in fingerprint.layers)
        self._mine = replace(fingerprint, layers=mine)

    @property
    def page_bytes(self) -> int:
        """Bytes of S tokens in the heads of this rank."""
        return self._mine.num_heads * page_bytes(self._mine, self.page_size)

    def has(self, blocks: BlockIds, page: int) -> bool:
        """Whether every layer still has the tokens of a page."""
        first, end = page * self.page_size, (page + 1) * self.page_size
        for group, ids in zip(self._groups, blocks, strict=True):
            own = ids[first // group.block_size : end // group.block_size]
            if len(own) * group.block_size < self.page_size or NULL_BLOCK in own:
                return False
        return True

    def pack(self, blocks: BlockIds, pages: range) -> bytearray:
        """A copy of N pages of a request, heads outermost: N times ``page_bytes``.

        Args:
            blocks: Blocks of the request.
            pages: Numbers of the pages, all of which the blocks must have.
        """
        packed = bytearray(len(pages) * self.page_bytes)
        data = torch.frombuffer(packed, dtype=torch.uint8)
        positions = torch.arange(pages.start * self.page_size, pages.stop * self.page_size)
        slots = self._slots(blocks, positions)
        targets = views(data, self._mine, self.page_size, len(pages))
        for number, (view, target) in enumerate(zip(self._views, targets, strict=True)):
            ops.copy(view, slots[self._group_of[number]], target, torch.arange(len(positions)))
        return packed

    def unpack(self, piece: ReadPages, blocks: BlockIds, end: int) -> None:
        """Write a piece to the blocks of a request; tokens of null blocks are skipped.

        Args:
            piece: Pages with the heads of this rank.
            blocks: Blocks of the request.
            end: Position before which tokens are written.
        """
        segment, run = piece.segment, piece.run
        first = run.first + segment.pages.start * run.page_size  # position of the first token in ``data``
        positions = torch.arange(segment.start, min(segment.end, end))
        data = torch.frombuffer(piece.data, dtype=torch.uint8, offset=piece.start)
        slots = self._slots(blocks, positions)
        sources = views(data, self._mine, run.page_size, len(segment.pages))
        for number, (view, source) in enumerate(zip(self._views, sources, strict=True)):
            group = self._groups[self._group_of[number]]
            target = slots[self._group_of[number]]
            here = target // group.block_size != NULL_BLOCK
            ops.copy(source, (positions - first)[here], view, target[here])

    def _slots(self, blocks: BlockIds, positions: Tensor) -> list[Tensor]:
        """Slots of the tokens, one tensor per group."""
        found = []
        for group, ids in zip(self._groups, blocks, strict=True):
            block = torch.tensor(ids, dtype=torch.int64)[positions // group.block_size]
            found.append(block * group.block_size + positions % group.block_size)
        return found
