"""Recurrent states of vLLM's in a store, beside the pages of attention.

With prefix caching vLLM keeps the states behind some of the blocks of a text: where a step ended. They have
blocks of their own, which it offers to a connector in the step that computes them. A run has the states of
all layers behind one text, as what a single layer keeps of its last token.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.entries import FLOATS, Entry, SideFormat
from kvloom.errors import UnsupportedError
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.tier import Piece

_KEPT: Final = "float32"
"""The dtype of a run, in which states of any dtype lie as bytes."""


@dataclass(frozen=True, slots=True)
class StateGroups:
    """Where an engine keeps its recurrent states.

    Attributes:
        numbers: Of the groups of recurrent layers, among all of vLLM's.
        layers: Names of the layers of each of these groups.
        block_size: Tokens of a block.
        nbytes: Of all states behind one text.
        content: What decides their bytes, besides the model.
    """

    numbers: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    block_size: int
    nbytes: int
    content: str

    def fingerprint(self, pages: Fingerprint) -> Fingerprint:
        """Whose states these are, behind pages of a fingerprint."""
        side = SideFormat(-(-self.nbytes // FLOATS[_KEPT]), _KEPT)
        content = f"states of {self.content} behind {pages.digest.hex()}"
        layers = (Entry(1, side, None),)
        return replace(pages, attention=content, rotation="none", layers=layers, recent=0, smoothing="")

    def pages(self, blocks: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Of all groups' blocks those of attention."""
        return tuple(ids for number, ids in enumerate(blocks) if number not in self.numbers)

    def behind(self, blocks: Sequence[list[int]], end: int) -> tuple[int, ...]:
        """The block of each group that has, or is to have, the states behind the first ``end`` tokens.

        Args:
            blocks: Of all groups.
            end: A multiple of ``block_size``.
        """
        return tuple(blocks[number][end // self.block_size - 1] for number in self.numbers)

    def whole(self, offers: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, ...]]:
        """The blocks of states that every group offers, by the tokens before them.

        Args:
            offers: Number of a group, block, tokens, as vLLM has them.
        """
        found: dict[int, dict[int, int]] = {}
        for number, block, end in offers:
            found.setdefault(end, {})[number] = block
        return {
            end: tuple(own[number] for number in self.numbers)
            for end, own in sorted(found.items())
            if own.keys() == set(self.numbers)
        }


class States:
    """The states of all recurrent layers, in the memory of one engine.

    Args:
        fingerprint: Whose they are.
        layers: Of each group, of each layer, its tensors ``[blocks, ...]``.
    """

    def __init__(self, fingerprint: Fingerprint, layers: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        self.fingerprint, self._layers = fingerprint, layers
        self.nbytes = fingerprint.layers[0].nbytes

    def pack(self, blocks: Sequence[int]) -> bytearray:
        """A copy of the states that lie in a block of each group."""
        # A page of a store is padded to 8 bytes.
        packed = bytearray(-(-self.nbytes // 8) * 8)
        self._move(torch.frombuffer(packed, dtype=torch.uint8), blocks, is_read=False)
        return packed

    def unpack(self, piece: Piece, blocks: Sequence[int]) -> None:
        """Write what was read to a block of each group."""
        data = torch.frombuffer(piece.data, dtype=torch.uint8, offset=piece.start)
        self._move(data, blocks, is_read=True)

    def _move(self, data: Tensor, blocks: Sequence[int], is_read: bool) -> None:
        at = 0
        for group, block in zip(self._layers, blocks, strict=True):
            for state in (state for layer in group for state in layer):
                here = state[block]
                part = data[at : at + here.nbytes]
                if is_read:  # a copy, since a part may begin where its dtype may not
                    here.copy_(part.clone().view(here.dtype).view(here.shape))
                else:
                    part.copy_(here.contiguous().view(-1).view(torch.uint8))
                at += here.nbytes


def state_groups(config: Any, groups: Sequence[Any]) -> StateGroups | None:
    """Where an engine keeps recurrent states; ``None`` if it has none.

    Args:
        config: vLLM's configuration.
        groups: vLLM's groups of layers.

    Raises:
        UnsupportedError: it does not keep the states behind blocks, or not all in one place.
    """
    from vllm import __version__
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [[spec_of(group, name) for name in group.layer_names] for group in groups]
    numbers = tuple(number for number, own in enumerate(specs) if isinstance(own[0], MambaSpec))
    if not numbers:
        return None
    flat = [spec for number in numbers for spec in specs[number]]
    size, step = flat[0].block_size, config.scheduler_config.max_num_batched_tokens
    if not config.cache_config.enable_prefix_caching:
        raise UnsupportedError(
            "enable_prefix_caching must be True for a store of recurrent states, got False: without it vLLM "
            "keeps none behind blocks"
        )
    if any(spec.num_prefill_checkpoint_blocks for spec in flat) and step > size:
        raise UnsupportedError(
            f"max_num_batched_tokens must be at most {size}, a block, for a store of states of Mamba2, got "
            f"{step}: vLLM's kernels for a CPU have none within a step"
        )
    for name, value, wanted in (
        ("tensor_parallel_size", config.parallel_config.tensor_parallel_size, 1),
        ("speculative_config", config.speculative_config, None),
    ):
        if value != wanted:
            raise UnsupportedError(f"{name} must be {wanted} for a store of recurrent states, got {value}")
    kinds = [f"{list(spec.shapes)} {list(spec.dtypes)} {spec.mamba_type}" for spec in flat]
    order = "channels first" if is_conv_state_dim_first() else "channels last"
    names = tuple(tuple(groups[number].layer_names) for number in numbers)
    return StateGroups(
        numbers,
        names,
        size,
        sum(spec.state_content_size_bytes for spec in flat),
        f"vLLM {__version__} on {platform.machine()}, {order}: {names} {kinds}",
    )


def spec_of(group: Any, name: str) -> Any:
    """How vLLM keeps what a layer of a group has of its tokens."""
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)
