"""Backends of vLLM's latent attention (MLA) on a CPU: kvloom's attention for kvloom's pages, else vLLM's.

vLLM has two backends, with AMX and without. Each class here is a subclass of vLLM's class, and behaves like
it for layers whose pages are not kvloom's. vLLM's layer multiplies queries and results by the weight.

Shapes: T new tokens of all requests, H query heads, B blocks, S tokens of a block, C elements of a token;
``rank`` elements of a latent, ``rope`` of a rope key, ``nope`` of a query without positions, ``v`` of a value
"""

from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl, AMXMLAMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

import kvloom
from kvloom import ops
from kvloom.caches.tensors.absorption import LatentSizes
from kvloom.caches.tensors.transform import Transform
from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import layer as paged
from kvloom.integrations.vllm import residual
from kvloom.integrations.vllm.backend import BITS
from kvloom.integrations.vllm.guard import refuse_unknown, why_no_pages
from kvloom.integrations.vllm.latent.step import LatentStep, attend_expanded, latent_step_of
from kvloom.integrations.vllm.options import CODES, Options
from kvloom.integrations.vllm.pages import BITS_OF_ROPE_KEYS, PageFormat
from kvloom.quant.rotation import block_of

# A child of vLLM's logger, which has handlers.
_logger = init_logger("vllm.kvloom")


class LatentImpl:
    """Attention of one layer: stores its latents and attends.

    Raises:
        UnsupportedError: the kind of its pages is unknown, or kvloom does not support the layer.
    """

    kinds: Final = ("auto", *CODES)
    kv_cache_dtype: str
    head_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    kv_b_proj: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unknown(self.kv_cache_dtype, self.kinds)
        config = get_current_vllm_config()
        options = Options.of(config.additional_config)
        bits = CODES.get(self.kv_cache_dtype)
        LatentBackend.is_kvloom = self.is_kvloom = bits is not None or options.float is True
        if not self.is_kvloom:
            return
        _refuse(config)
        self.uses_amx_bmm = False  # these packed weights are only for vLLM's expansion
        self.supports_quant_query_input = False
        self.dtype = torch.get_default_dtype()  # dtype in which vLLM makes the model
        self.sizes = LatentSizes(
            self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        )
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        quant = None if bits is None else options.quant(bits, rank)
        if bits == BITS_OF_ROPE_KEYS:
            options.quant(bits, rope)  # raises for a group that does not divide ``rope``
        kind = None if bits is None else replace(options.kind(bits, rank), smooth="none")
        self.recent = 0 if kind is None else kind.recent or 0
        self._full_range = quant is not None and quant.full_range
        self._transform = Transform(key=block_of(rank)) if kind and kind.rotates("keys") else None
        self._format = PageFormat.latents(rank, rope, self.dtype, quant)
        self._paged = paged.Paged(self._format)
        self._scores = ops.Scores(scale=self.scale)
        self._layers = config.compilation_config.static_forward_context
        self._residual: str | None = None
        LatentBackend.content[self.head_size, self.kv_cache_dtype] = self._format.content_bytes
        _logger.info_once(
            "kvloom %s attends to latents of %s, kernels: %s.",
            kvloom.__version__, kind or dtype_name(self.dtype), ops.cpu_kernels(),
        )  # fmt: skip

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Register pages for a residual window, before vLLM asks for the pages of all layers."""
        if not self.is_kvloom:
            super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        elif self.recent and self._residual is None:
            self._residual = residual.beside(self, self._layers, self.recent, self._format)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *more: Any,
    ) -> None:
        """Store new tokens.

        Args:
            kv_c_normed: Latents ``[T, rank]``, possibly padded at the end.
            k_pe: Rope keys ``[T, 1, rope]``.
            kv_cache: ``[B, S, C]``.
            slot_mapping: ``[T]`` int64; -1 skips a token.
            kv_cache_dtype: Kind of the layer's pages.
            k_scale: Scale of vLLM's own codes.
            more: Further arguments for vLLM's own codes since 0.33.
        """
        if not self.is_kvloom:
            super().do_kv_cache_update(  # type: ignore[misc]
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *more
            )
            return
        if not kv_cache.numel():  # vLLM warms up, and these tokens are never read
            return
        self._view = self._paged.view(kv_cache)
        latents, slots = kv_c_normed.unsqueeze(1), slot_mapping.flatten()
        paged.store_in_pages(latents, k_pe, slots, self._view, self._transform, full_range=self._full_range)
        if self._residual is not None:
            self._layers[self._residual].store(latents, k_pe, self._residual)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to latents in place.

        Args:
            q: ``[T, H, rank + rope]``, or its two parts, of the requests that attend to latents; already
                multiplied by the weight of keys.
            kv_c_and_k_pe_cache: The pages, as vLLM casts them.
            attn_metadata: The ``LatentStep``.
            layer: vLLM's layer.

        Returns:
            ``[T, H, rank]``, and ``None``.
        """
        if not self.is_kvloom:
            found: tuple[Tensor, Tensor | None] = super().forward_mqa(  # type: ignore[misc]
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return found
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        newest = None
        if self._residual is not None:
            newest = self._layers[self._residual].newest(self._residual)
        step = attn_metadata.decode
        out = paged.attend_latents(query, self._view, step, self._scores, self._transform, newest)
        return out, None

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend to keys and values that are made of stored latents.

        Args:
            q: ``[T, H, nope + rope]`` of the requests whose latents are expanded.
            kv_c_normed: New latents, which are already stored.
            k_pe: New rope keys, likewise.
            kv_c_and_k_pe_cache: The pages, as vLLM casts them.
            attn_metadata: The ``LatentStep``.
            k_scale: Scale of vLLM's own codes.
            output: ``[T, H * v]``, written.
            output_scale: ``None``.
        """
        if not self.is_kvloom:
            super().forward_mha(  # type: ignore[misc]
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
            )
            return
        if output_scale is not None:
            raise UnsupportedError("output must have the model's dtype, got a fused quantization of it")
        for request in attn_metadata.prefill:
            out = attend_expanded(
                q[request.rows], self._view, request, self._expand, self._scores, self._transform
            )
            output[request.rows] = out.flatten(1)

    def _expand(self, latents: Tensor) -> Tensor:
        expanded: Tensor = self.kv_b_proj(latents)[0]
        return expanded


class LatentBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of the ``LatentStep`` of each forward for the layers of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        layers = vllm_config.compilation_config.static_forward_context
        impl = layers[layer_names[0]].impl
        self._is_kvloom = getattr(impl, "is_kvloom", False)
        if self._is_kvloom:
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
            # With a residual window each query of a request reads other tokens unquantized.
            self._sizes = None if impl.recent else impl.sizes
        else:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> LatentStep | Any:
        """Make the step from vLLM's ``CommonAttentionMetadata``.

        Raises:
            UnsupportedError: attention is not causal.
        """
        if not self._is_kvloom:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return latent_step_of(common_attn_metadata, self.kv_cache_spec.block_size, self._sizes)


class LatentBackend:
    """Mixin of the backends: kinds and sizes of pages."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CODES]
    content: ClassVar[dict[tuple[int, str], int]] = {}
    """Bytes of a token, by the elements of a latent with its rope key and the kind of pages.

    They are those of the engine loaded last in this process; ``customize_spec`` gets no configuration.
    """
    is_kvloom: ClassVar[bool] = False
    """Whether the pages of that engine, all of one kind, are kvloom's."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """``spec`` with room for scales if its pages are quantized."""
        if spec.kv_quant_mode not in BITS or spec.state_content_bytes is not None:
            return super().customize_spec(spec)  # type: ignore[misc]
        content = LatentBackend.content[spec.head_size, spec.cache_dtype_str]
        return replace(spec, state_content_bytes=content)


class _CpuImpl(LatentImpl, CPUMLAImpl):  # type: ignore[misc]
    pass


class _AmxImpl(LatentImpl, AMXMLAImpl):  # type: ignore[misc]
    pass


class _CpuBuilder(LatentBuilder, MLACommonMetadataBuilder):  # type: ignore[misc]
    pass


class _AmxBuilder(LatentBuilder, AMXMLAMetadataBuilder):  # type: ignore[misc]
    pass


class KvloomCpuBackend(LatentBackend, CPUMLABackend):  # type: ignore[misc]
    """vLLM's backend of latent attention without AMX, with kvloom's pages if they are requested."""

    @staticmethod
    def get_impl_cls() -> type[_CpuImpl]:
        """The class that attends in a layer."""
        return _CpuImpl

    @staticmethod
    def get_builder_cls() -> type[_CpuBuilder]:
        """The class that builds the attention metadata of a step."""
        return _CpuBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Multiples of 16 for kvloom's pages, so that blocks are not split; 16 for vLLM's."""
        if LatentBackend.is_kvloom:
            return [MultipleOf(16)]
        return list(CPUMLABackend.get_supported_kernel_block_sizes(kv_cache_spec))

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether blocks may have ``block_size`` tokens; vLLM's blocks have 16."""
        if LatentBackend.is_kvloom and block_size is not None:
            return block_size % 16 == 0
        return bool(super().supports_block_size(block_size))


class KvloomAmxBackend(LatentBackend, AMXMLABackend):  # type: ignore[misc]
    """vLLM's backend of latent attention with AMX, as ``KvloomCpuBackend``."""

    @staticmethod
    def get_impl_cls() -> type[_AmxImpl]:
        """The class that attends in a layer."""
        return _AmxImpl

    @staticmethod
    def get_builder_cls() -> type[_AmxBuilder]:
        """The class that builds the attention metadata of a step."""
        return _AmxBuilder


def _refuse(config: Any) -> None:
    """Refuse options that kvloom does not support in layers of latent attention.

    Raises:
        UnsupportedError: the engine has such an option.
    """
    if (refused := why_no_pages(config)) is not None:
        raise UnsupportedError(refused)
    if skipped := config.cache_config.kv_cache_dtype_skip_layers:
        raise UnsupportedError(
            f"kv_cache_dtype_skip_layers must be empty with latent attention (MLA), got {skipped}"
        )
