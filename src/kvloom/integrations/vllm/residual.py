"""The residual window in vLLM: the last tokens of a layer unquantized, in a KV cache group of its own.

For each layer with quantized pages vLLM gets a second layer with a sliding window and float pages. So vLLM
allocates and frees these pages, finds prefixes in them and preempts requests as in any model with windows. A
prefix is found only if the tokens before its end are also there unquantized.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import layer, pages
from kvloom.integrations.vllm.builder import VllmStep, step_of
from kvloom.integrations.vllm.layer import Newest, Paged
from kvloom.integrations.vllm.pages import PageFormat

SUFFIX: Final = ".residual"
"""Suffix of a layer's name that names its residual window."""


class ResidualBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of the ``VllmStep`` of each forward for the pages of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> VllmStep:
        """Make the step from vLLM's ``CommonAttentionMetadata``."""
        return step_of(common_attn_metadata, self.kv_cache_spec.block_size)


class ResidualBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Backend of these pages."""

    @staticmethod
    def get_builder_cls() -> type[ResidualBuilder]:
        """The class that builds the attention metadata of a step."""
        return ResidualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any) -> list[Any]:
        """Any size, since blocks are not split."""
        return [MultipleOf(1)]


class ResidualCache(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """The residual window of a layer, as a layer of vLLM.

    Args:
        heads: Key/value heads of this rank.
        format: Unquantized format of its tokens.
        window: Number of last tokens that each token reads.
        code_bytes: Bytes of a token of a head in the layer with the codes.
    """

    def __init__(self, heads: int, format: PageFormat, window: int, code_bytes: int) -> None:
        super().__init__()
        self.kv_cache = torch.tensor([])
        self.window = window
        self._heads, self._code_bytes = heads, code_bytes
        self._token_bytes = format.content_bytes
        key, value = format.key, format.value
        widths = {"head_size": key.head_dim, "head_size_v": value.head_dim}
        self._shape = {"num_kv_heads": heads, "dtype": key.dtype, **widths}
        self._paged = Paged(format)

    def get_attn_backend(self) -> type[ResidualBackend]:
        """The backend, whose builder makes the step."""
        return ResidualBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> SlidingWindowSpec:
        """Spec of a block: as many tokens as fit into a page of codes, since all pages have one size.

        Raises:
            UnsupportedError: vLLM would keep all tokens of a window.
        """
        if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
            raise UnsupportedError(
                f"kvloom.recent must be 0 with disable_hybrid_kv_cache_manager, got {self.window}"
            )
        cache = vllm_config.cache_config
        page: int = cache.skip_page_size_padded or self._heads * self._code_bytes * cache.block_size
        size = pages.largest_block(cache.block_size, page // (self._heads * self._token_bytes))
        return SlidingWindowSpec(
            block_size=size, sliding_window=self.window, page_size_padded=page, **self._shape
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages ``[B, H, S, C]``."""
        self.kv_cache = kv_cache

    def store(self, key: Tensor, value: Tensor, name: str) -> None:
        """Store new tokens ``[T, H, D]`` in this step's slots; ``name`` is the name of this layer."""
        if self.kv_cache.numel():
            layer.store_in_pages(
                key, value, get_forward_context().slot_mapping[name], self._paged.view(self.kv_cache)
            )

    def newest(self, name: str) -> tuple[Newest, VllmStep]:
        """The pages, and the step for them; ``name`` is the name of this layer."""
        step: VllmStep = get_forward_context().attn_metadata[name]
        return Newest(self._paged.view(self.kv_cache), self.window), step


def beside(impl: Any, layers: dict[str, Any], window: int, format: PageFormat) -> str:
    """Register the residual window of a layer with vLLM.

    Args:
        impl: Attention of the layer.
        layers: vLLM's ``static_forward_context``.
        window: Number of last tokens that each token reads.
        format: Format of the codes in its pages.

    Returns:
        The name of the residual window in ``layers``. A layer that reads the keys and values of another layer
        has that layer's residual window.
    """
    owner: str | None = getattr(impl, "kv_sharing_target_layer_name", None)
    if owner is not None:
        return owner + SUFFIX
    name = next(name for name, x in layers.items() if getattr(x, "impl", None) is impl) + SUFFIX
    layers[name] = ResidualCache(impl.num_kv_heads, format.unquantized, window, format.content_bytes)
    return name
