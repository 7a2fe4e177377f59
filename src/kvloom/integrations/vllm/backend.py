"""The attention backend of vLLM's CPU platform: kvloom's attention for kvloom's pages, else vLLM's.

Each class is a subclass of vLLM's class, and behaves like it for layers whose pages are not kvloom's.

Shapes: T new tokens of all requests, H key/value heads, Hq query heads, B blocks, S tokens of a block,
D head dim, C elements of a token of a head.
"""

from dataclasses import replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

import kvloom
from kvloom import ops
from kvloom.caches.tensors.transform import Transform
from kvloom.core.specs import QuantSpec, dtype_name
from kvloom.core.spelling import Kind
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing
from kvloom.integrations.vllm import layer as paged
from kvloom.integrations.vllm import residual, smoothing
from kvloom.integrations.vllm.builder import step_of
from kvloom.integrations.vllm.guard import KINDS, GuardedBackend, GuardedImpl, why_no_pages
from kvloom.integrations.vllm.options import CODES, Options
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.integrations.vllm.recording import Recording
from kvloom.integrations.vllm.storing.watch import model_of
from kvloom.ops import KeySmoothing
from kvloom.quant.rotation import block_of

BITS: Final = {KVQuantMode[name.upper()]: bits for name, bits in CODES.items()}
"""Bits of the codes for each of vLLM's modes."""

# A child of vLLM's logger, which has handlers.
_logger = init_logger("vllm.kvloom")


class KvloomBackend(GuardedBackend):
    """vLLM's CPU backend with int8 and int4 pages, and kvloom's float pages if they are requested."""

    options: ClassVar[Options] = Options()
    """Options of the engine loaded last in this process; ``customize_spec`` gets no configuration."""

    @staticmethod
    def get_impl_cls() -> type["KvloomImpl"]:
        """The class that attends in a layer."""
        return KvloomImpl

    @staticmethod
    def get_builder_cls() -> type["KvloomBuilder"]:
        """The class that builds the attention metadata of a step."""
        return KvloomBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """``spec`` with room for scales if its pages are quantized.

        Raises:
            UnsupportedError: kvloom does not support such a layer.
        """
        bits = BITS.get(spec.kv_quant_mode)
        if bits is None:
            return super().customize_spec(spec)
        if spec.state_content_bytes is not None:
            return spec
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise UnsupportedError(f"quantized pages must be of decoder attention, got {type(spec).__name__}")
        head_dim = spec.head_size
        if spec.head_size_v != head_dim:
            raise UnsupportedError(
                f"values in quantized pages must have the keys' {head_dim} elements, got {spec.head_size_v}"
            )
        quant = cls.options.quant(bits, head_dim)
        return replace(spec, state_content_bytes=PageFormat.heads(head_dim, spec.dtype, quant).content_bytes)


class KvloomImpl(GuardedImpl):
    """Attention of one layer: stores its tokens and attends."""

    kinds = (*KINDS, *CODES)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._config = config = get_current_vllm_config()
        self._layers = config.compilation_config.static_forward_context
        self.asked = config.cache_config.cache_dtype
        KvloomBackend.options = options = Options.of(config.additional_config)
        self.dtype = torch.get_default_dtype()  # dtype in which vLLM makes the model
        self.smoothed: LayerSmoothing | None = None
        self.is_loaded = False
        self._kind: Kind | None = None
        self._quant: QuantSpec | None = None
        bits = BITS.get(self.kv_quant_mode)
        if bits is not None:
            self._quant = options.quant(bits, self.head_size)
            self._kind = options.kind(bits, self.head_size)
        self.is_kvloom = self._is_served(config, options)
        if not self.is_kvloom:
            return
        self._scores = self._scores_of_model()
        self._format = PageFormat.heads(self.head_size, self.dtype, self._quant)
        self._paged = paged.Paged(self._format)
        is_rotated = self._kind is not None and self._kind.rotates("keys")
        self._transform = Transform(key=block_of(self.head_size)) if is_rotated else None
        self._residual: str | None = None
        kept = str(self._kind) if self._kind else dtype_name(self.dtype)
        _logger.info_once(
            "kvloom %s attends to pages of %s, kernels: %s.", kvloom.__version__, kept, ops.cpu_kernels()
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Register pages for a residual window, before vLLM asks for the pages of all layers.

        After the last layer of a model the smoothing of its keys is calibrated.
        """
        super().process_weights_after_loading(act_dtype)
        if self.is_kvloom and self._kind is not None and self._kind.recent and self._residual is None:
            window = self._kind.recent
            window = min(window, self._scores.window) if self._scores.window else window
            self._residual = residual.beside(self, self._layers, window, self._format)
        self.is_loaded = True
        if self.smoothed is None:
            _smooth(self._config, self._layers)

    @property
    def is_smoothable(self) -> bool:
        """Whether keys of this layer are to be smoothed."""
        return self.is_kvloom and self._kind is not None and self._kind.smooth != "none"

    @property
    def smoothing(self) -> KeySmoothing | None:
        """Smoothing of the keys in its pages, for all heads of all ranks."""
        return self.smoothed.smoothing if self.smoothed is not None and self.is_smoothable else None

    def smooth(self, found: LayerSmoothing) -> None:
        """Set the smoothing of keys, which is used if the layer is smoothable."""
        self.smoothed = found
        if self.smoothing is not None:
            rotated = 0 if self._transform is None else self._transform.key
            self._transform = Transform(rotated, smoothing=smoothing.of_rank(self.smoothing))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store new tokens.

        Args:
            layer: vLLM's layer.
            key: ``[T, H, D]``, possibly padded at the end.
            value: As ``key``.
            kv_cache: ``[B, H, S, C]``.
            slot_mapping: ``[T]`` int64; -1 skips a token.
        """
        if not self.is_kvloom:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        positions = None
        if self._transform is not None and self._transform.needs_positions:
            step = get_attention_context(layer.layer_name)[0]
            if step is None:  # vLLM warms up, and these tokens are never read
                return
            positions = step.positions
        full_range = self._quant is not None and self._quant.full_range
        view = self._paged.view(kv_cache)
        paged.store_in_pages(key, value, slot_mapping, view, self._transform, positions, full_range)
        if self._residual is not None:
            cache = self._layers[self._residual]
            cache.store(key, value, self._residual)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the stored tokens.

        Args:
            layer: vLLM's layer.
            query: ``[T, Hq, D]``, possibly padded at the end, as ``output``.
            key: New keys, which are already stored.
            value: New values, likewise.
            kv_cache: ``[B, H, S, C]``.
            attn_metadata: The ``Step``, ``None`` while vLLM warms up, or a ``Recording``.
            output: ``[T, Hq, D]``, written.
            output_scale: ``None``.
            output_block_scale: ``None``.

        Returns:
            ``output``.
        """
        if isinstance(attn_metadata, Recording):
            owner = self.kv_sharing_target_layer_name or layer.layer_name
            attn_metadata.attend(owner, self._scores_of_model(), query, key, value, output)
            return output
        if not self.is_kvloom or attn_metadata is None:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return output
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output must have the model's dtype, got a fused quantization of it")
        newest = None
        if self._residual is not None:
            newest = self._layers[self._residual].newest(self._residual)
        view = self._paged.view(kv_cache)
        paged.attend_to_pages(query, view, attn_metadata, self._scores, output, self._transform, newest)
        return output

    def _scores_of_model(self) -> ops.Scores:
        return ops.Scores(
            scale=self.scale,
            alibi_slopes=self.alibi_slopes,
            window=self.sliding_window if self.sliding_window > 0 else None,
            softcap=self.logits_soft_cap or None,
            sinks=self.sinks,
        )

    def _is_served(self, config: Any, options: Options) -> bool:
        """Whether the pages of this layer are kvloom's.

        Raises:
            UnsupportedError: they must be, and kvloom does not support an option of the layer.
        """
        is_float = self.kv_quant_mode == KVQuantMode.NONE and self.attn_type == AttentionType.DECODER
        must = self._quant is not None or (is_float and options.float is True)
        if not must and not (is_float and options.float == "auto"):
            return False
        refused = self._why_not(config)
        if must and refused is not None:
            raise UnsupportedError(refused)
        return must or (refused is None and self._is_faster())

    def _is_faster(self) -> bool:
        from kvloom.integrations.vllm import probe

        queries = self.num_heads // self.num_kv_heads
        return probe.is_faster(self.num_kv_heads, queries, self.head_size, self.dtype)

    def _why_not(self, config: Any) -> str | None:
        """Why kvloom does not support this layer; ``None`` if it does."""
        if self.attn_type != AttentionType.DECODER:
            return f"quantized pages must be of decoder attention, got {self.attn_type}"
        if (refused := why_no_pages(config)) is not None:
            return refused
        if config.model_config.rswa_window is not None:
            return "pages of kvloom have no reference sliding window (R-SWA)"
        if config.model_config.is_mm_prefix_lm:
            return "pages of kvloom have no attention in both directions to parts of a prompt"
        return None


class KvloomBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder of the ``Step`` of each forward for the layers of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for name, layer in layers.items():
            _refuse_untold(name, layer, vllm_config.cache_config.kv_cache_dtype_skip_layers)
        self._is_kvloom = any(getattr(layer.impl, "is_kvloom", False) for layer in layers.values())
        if self._is_kvloom:  # vLLM's builder would take codes for fp8
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        else:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Make the step from vLLM's ``CommonAttentionMetadata``.

        Raises:
            UnsupportedError: attention is not causal.
        """
        if not self._is_kvloom:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return step_of(common_attn_metadata, self.kv_cache_spec.block_size)


def _smooth(config: Any, layers: dict[str, Any]) -> None:
    """Calibrate the smoothing of a model's keys, once all of its layers have their weights.

    Args:
        config: vLLM's configuration.
        layers: vLLM's ``static_forward_context``; layers that were calibrated before are skipped.
    """
    impls = {name: x.impl for name, x in layers.items() if isinstance(getattr(x, "impl", None), KvloomImpl)}
    impls = {name: impl for name, impl in impls.items() if impl.smoothed is None}
    if not all(impl.is_loaded for impl in impls.values()):
        return
    if any(impl.is_smoothable for impl in impls.values()):
        owners = {name: impl.kv_sharing_target_layer_name or name for name, impl in impls.items()}
        found = smoothing.calibrate(config, model_of(layers[next(iter(impls))]), owners)
        said = {name: layer for name, layer in found.items() if impls[name].is_smoothable}
        _logger.info_once("kvloom smooths keys: %s.", smoothing.said_of(said))
    else:
        found = dict.fromkeys(impls, LayerSmoothing(None, "not asked for"))
    for name, impl in impls.items():
        impl.smooth(found[name])


def _refuse_untold(name: str, layer: Any, skipped: list[str]) -> None:
    """Refuse a layer to which its model does not pass the requested kind of pages, as in Falcon.

    Raises:
        UnsupportedError: codes were requested, and the layer would have float pages.
    """
    asked = getattr(layer.impl, "asked", "auto")
    if asked not in CODES or layer.kv_cache_dtype != "auto":
        return
    is_skipped = "sliding_window" in skipped and layer.sliding_window is not None
    if not is_skipped and str(extract_layer_index(name)) not in skipped:
        raise UnsupportedError(
            f"kv_cache_dtype must be auto for a model with layers that always have float pages, such as "
            f"{name}, got {asked!r}"
        )
