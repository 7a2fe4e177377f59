"""The residual window in vLLM: the newest tokens of a layer unquantized, in a KV cache group of their own.

Beside each layer whose pages are codes stands another for vLLM, of a sliding window and float pages. So
vLLM gives out and frees these pages, finds prefixes in them and preempts their requests as those of any model
with windows: a prefix is found if the tokens in front of its end are there unquantized, too.
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
from kvloom.integrations.vllm.builder import Step, step_of
from kvloom.integrations.vllm.layer import Newest, Paged
from kvloom.integrations.vllm.pages import PageFormat

SUFFIX: Final = ".residual"
"""Behind the name of a layer, in that of its residual window."""


class ResidualBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the ``Step`` of each forward for the pages of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step, of vLLM's ``CommonAttentionMetadata``."""
        return step_of(common_attn_metadata, self.kv_cache_spec.block_size)


class ResidualBackend(CPUAttentionBackend):  # type: ignore[misc]
    """What vLLM asks of such pages."""

    @staticmethod
    def get_builder_cls() -> type[ResidualBuilder]:
        """The class that builds the attention metadata of a step."""
        return ResidualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*args: Any) -> list[Any]:
        """Any: blocks are not split."""
        return [MultipleOf(1)]


class ResidualCache(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """The residual window of a layer, as vLLM knows it.

    Args:
        heads: Key/value heads of this rank.
        format: How it keeps tokens, unquantized.
        window: Newest tokens that each token reads.
        code_bytes: Of a token of a head in the layer whose window it is.
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
        """Whose builder makes metadata."""
        return ResidualBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> SlidingWindowSpec:
        """What vLLM allocates: as many tokens as fit into a page of the codes, which vLLM has of one size.

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
        """Store new tokens ``[T, H, D]`` in this step's slots; ``name`` is its own."""
        if self.kv_cache.numel():
            layer.store(key, value, get_forward_context().slot_mapping[name], self._paged.view(self.kv_cache))

    def newest(self, name: str) -> tuple[Newest, Step]:
        """The pages, and where tokens lie in them in this step; ``name`` is its own."""
        step: Step = get_forward_context().attn_metadata[name]
        return Newest(self._paged.view(self.kv_cache), self.window), step


def beside(impl: Any, layers: dict[str, Any], window: int, format: PageFormat) -> str:
    """Make the residual window of a layer known to vLLM.

    Args:
        impl: Of the layer, which attends in it.
        layers: vLLM's ``static_forward_context``.
        window: Newest tokens that each token reads.
        format: Of the codes in its pages.

    Returns:
        The name of the residual window in ``layers``: that of another layer, whose keys and values this one
        reads, where it has none of its own.
    """
    owner: str | None = getattr(impl, "kv_sharing_target_layer_name", None)
    if owner is not None:
        return owner + SUFFIX
    name = next(name for name, x in layers.items() if getattr(x, "impl", None) is impl) + SUFFIX
    layers[name] = ResidualCache(impl.num_kv_heads, format.unquantized, window, format.content_bytes)
    return name
