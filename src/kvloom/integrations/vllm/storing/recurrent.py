"""vLLM's recurrent states in a store, beside the pages of attention.

With prefix caching vLLM keeps the states after some blocks of a text, where a step ended. States have their
own blocks, which vLLM offers to a connector in the step that computes them. A stored segment has the states
of all layers after one text, in the form of one layer's entry of the last token.
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
from kvloom.store.tiers.tier import ReadPages
from kvloom.store.transfer import tensor_of

_KEPT: Final = "float32"
"""Dtype of a stored segment, which holds states of any dtype as bytes."""


@dataclass(frozen=True, slots=True)
class StateGroups:
    """Groups of layers in which an engine keeps its recurrent states.

    Attributes:
        numbers: Numbers of these groups among all of vLLM's groups.
        layers: Names of the layers of each group.
        block_size: Tokens of a block.
        nbytes: Bytes of all states after one text.
        content: Text with everything besides the model that decides their bytes.
    """

    numbers: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    block_size: int
    nbytes: int
    content: str

    def fingerprint(self, pages: Fingerprint) -> Fingerprint:
        """Fingerprint of the states, given that of the pages."""
        side = SideFormat(-(-self.nbytes // FLOATS[_KEPT]), _KEPT)
        content = f"states of {self.content} behind {pages.digest.hex()}"
        layers = (Entry(1, side, None),)
        return replace(pages, attention=content, rotation="none", layers=layers, recent=0, smoothing="")

    def pages(self, blocks: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Blocks of the attention groups, of the blocks of all groups."""
        return tuple(ids for number, ids in enumerate(blocks) if number not in self.numbers)

    def behind(self, blocks: Sequence[list[int]], end: int) -> tuple[int, ...]:
        """The block in each group for the states after the first ``end`` tokens.

        Args:
            blocks: Blocks of all groups.
            end: Number of tokens, a multiple of ``block_size``.
        """
        return tuple(blocks[number][end // self.block_size - 1] for number in self.numbers)

    def whole(self, offers: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, ...]]:
        """Blocks of states that all groups offer, by the number of tokens before the states.

        Args:
            offers: Number of a group, block and number of tokens, as vLLM has them.
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
        fingerprint: Fingerprint of the states.
        layers: Tensors ``[blocks, ...]`` of each layer of each group.
    """

    def __init__(self, fingerprint: Fingerprint, layers: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        self.fingerprint, self._layers = fingerprint, layers
        self.nbytes = fingerprint.layers[0].nbytes

    def pack(self, blocks: Sequence[int]) -> bytearray:
        """A copy of the states in the given block of each group."""
        # A store pads its pages to 8 bytes.
        packed = bytearray(-(-self.nbytes // 8) * 8)
        self._move(torch.frombuffer(packed, dtype=torch.uint8), blocks, is_read=False)
        return packed

    def unpack(self, piece: ReadPages, blocks: Sequence[int]) -> None:
        """Write a piece to the given block of each group."""
        self._move(tensor_of(piece.data), blocks, is_read=True)

    def _move(self, data: Tensor, blocks: Sequence[int], is_read: bool) -> None:
        at = 0
        for group, block in zip(self._layers, blocks, strict=True):
            for state in (state for layer in group for state in layer):
                here = state[block]
                part = data[at : at + here.nbytes]
                if is_read:  # cloned, since a part may not be aligned for its dtype
                    here.copy_(part.clone().view(here.dtype).view(here.shape))
                else:
                    part.copy_(here.contiguous().view(-1).view(torch.uint8))
                at += here.nbytes


def state_groups(config: Any, groups: Sequence[Any]) -> StateGroups | None:
    """Groups of an engine's recurrent states; ``None`` if it has no states.

    Args:
        config: vLLM's configuration.
        groups: vLLM's groups of layers.

    Raises:
        UnsupportedError: vLLM does not keep the states after blocks, or keeps them on several ranks.
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
            "keeps no states at the ends of blocks"
        )
    if any(spec.num_prefill_checkpoint_blocks for spec in flat) and step > size:
        raise UnsupportedError(
            f"max_num_batched_tokens must be at most the {size} tokens of a block for a store of states of "
            f"Mamba2, got {step}: vLLM's kernels for a CPU keep no states in the middle of a step"
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
    """vLLM's cache spec of a layer in a group."""
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)
