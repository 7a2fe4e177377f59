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

from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.views import KVView
from kvloom.errors import UnsupportedError
from kvloom.store.fingerprint import Fingerprint, LayerFormat
from kvloom.store.format import page_bytes
from kvloom.store.tiers.tier import ReadPages
from kvloom.store.transfer import pack_slots, unpack_slots

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


def attention_text(groups: Sequence[Group]) -> str:
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
        group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._layers = [(view, group_of[number]) for number, view in sorted(layers.items())]
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
        slots = self._slots(blocks, torch.arange(pages.start * self.page_size, pages.stop * self.page_size))
        layers = [(view, slots[group]) for view, group in self._layers]
        return pack_slots(layers, self._mine, self.page_size, len(pages))

    def unpack(self, piece: ReadPages, blocks: BlockIds, end: int) -> None:
        """Write a piece to the blocks of a request; tokens of null blocks are skipped.

        Args:
            piece: Pages with the heads of this rank.
            blocks: Blocks of the request.
            end: Position before which tokens are written.
        """
        segment, run = piece.segment, piece.run
        first = run.first + segment.pages.start * run.page_size  # position of the first token in the piece
        positions = torch.arange(segment.start, min(segment.end, end))
        moves = []
        for group, slots in zip(self._groups, self._slots(blocks, positions), strict=True):
            here = slots // group.block_size != NULL_BLOCK
            moves.append(((positions - first)[here], slots[here]))
        layers = [(moves[group][0], view, moves[group][1]) for view, group in self._layers]
        unpack_slots(piece, self._mine, layers)

    def _slots(self, blocks: BlockIds, positions: Tensor) -> list[Tensor]:
        """Slots of the tokens, one tensor per group."""
        found = []
        for group, ids in zip(self._groups, blocks, strict=True):
            block = torch.tensor(ids, dtype=torch.int64)[positions // group.block_size]
            found.append(block * group.block_size + positions % group.block_size)
        return found
