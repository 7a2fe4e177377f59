"""Catalog of named layouts: axes, owner and document."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES, CacheLayout
from kvloom.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """Named axis orders of keys and of values.

    Attributes:
        name: Name, as for ``find_layout``.
        key: Axes of keys, or of both if they have the axis ``2``. ``x`` as the size of a chunk is the number
            of elements in ``piece_bytes``.
        value: Axes of values; ``""`` for those of keys.
        owner: Project that defined it.
        document: Address of the owner's description.
        piece_bytes: Bytes of a contiguous chunk of a head vector, for ``x``.
        itemsizes: Bytes of an element for which the owner has this layout; any if empty.
    """

    name: str
    key: str
    value: str = ""
    owner: str = ""
    document: str = ""
    piece_bytes: int = 0
    itemsizes: tuple[int, ...] = ()

    @property
    def is_joint(self) -> bool:
        """Whether one tensor holds keys and values."""
        return "2" in CacheLayout(self.key.replace("x", "1")).names

    @property
    def axes(self) -> str:
        """Axes of keys and, if they differ, of values after a ``|``."""
        return f"{self.key} | {self.value}" if self.value else self.key

    def of(self, side: str, itemsize: int) -> CacheLayout:
        """Layout of ``side`` (``"key"``, ``"value"`` or, for both, ``"cache"``) for a dtype.

        Args:
            side: Side of the tensor.
            itemsize: Bytes of an element.

        Raises:
            ArgumentError: the owner lays elements of that size out otherwise.
        """
        if self.itemsizes and itemsize not in self.itemsizes:
            sizes = " or ".join(map(str, self.itemsizes))
            raise ArgumentError(
                f"{side} in layout {self.name!r} must have {sizes} bytes an element, got {itemsize}"
            )
        axes = self.value if side == "value" and self.value else self.key
        return _with_pieces(axes, self.piece_bytes // itemsize)


@lru_cache(maxsize=256)
def _with_pieces(axes: str, elements: int) -> CacheLayout:
    return CacheLayout(axes.replace("x", str(max(elements, 1))))


_PMX: Final = "OpenPPL PMX"
_STATIC: Final = "KeyValueCache, cache_layout"
_DYNAMIC: Final = "dynamic_batching.KeyValueCache, cache_layout"
_FUSED: Final = "dynamic_batching.MultiHeadCacheAttention of 2023-09-01, cache_layout"

LAYOUTS: Final = {
    layout.name: layout
    for layout in (
        NamedLayout("pmx_static_0", "B L 2 S H D", "", _PMX, f"{_STATIC} 0"),
        NamedLayout("pmx_static_1", "L B 2 H S D", "", _PMX, f"{_STATIC} 1"),
        NamedLayout("pmx_dynamic_0", "T L 2 H D", "", _PMX, f"{_DYNAMIC} 0"),
        NamedLayout("pmx_dynamic_1", "L T 2 H D", "", _PMX, f"{_DYNAMIC} 1"),
        NamedLayout("pmx_dynamic_2", "L 2 T H D", "", _PMX, f"{_DYNAMIC} 2"),
        NamedLayout("pmx_dynamic_3", "L 2 H T D", "", _PMX, f"{_DYNAMIC} 3"),
        NamedLayout("pmx_attention_2", "L H T 2 D", "", _PMX, f"{_FUSED} 2"),
        NamedLayout("pmx_attention_3", "2 L H T D", "", _PMX, f"{_FUSED} 3"),
        NamedLayout("hugging_face", "B H S D", "", "transformers", "Cache: keys and values of a layer"),
        NamedLayout(
            "vllm",
            "2 B S H D",
            "",
            "vLLM",
            "reshape_and_cache_flash, FlashAttention's pages in older versions",
        ),
        NamedLayout("vllm_gpu", "B S H 2 D", "", "vLLM 0.32", "pages on GPUs, KVCacheLayout LBNHC (NHD)"),
        NamedLayout("vllm_gpu_hnd", "B H S 2 D", "", "vLLM 0.32", "pages on GPUs, KVCacheLayout LBHNC (HND)"),
        NamedLayout("vllm_cpu", "B H D S", "B H S D", "vLLM 0.32", "pages on CPUs, kernels vec and vec16"),
        NamedLayout(
            "vllm_cpu_amx",
            "B H S/16 D/2 S%16 D%2",
            "B H D/16 S/2 D%16 S%2",
            "vLLM 0.32",
            "pages on CPUs, kernel amx",
            itemsizes=(1, 2),
        ),
        NamedLayout(
            "vllm_paged",
            "B H D/x S D%x",
            "B H D S",
            "vLLM",
            "reshape_and_cache: key_cache, value_cache",
            piece_bytes=16,
        ),
        NamedLayout("flashinfer", "B 2 S H D", "", "FlashInfer", "KV-Cache Layout: paged, NHD"),
        NamedLayout("flashinfer_hnd", "B 2 H S D", "", "FlashInfer", "KV-Cache Layout: paged, HND"),
        NamedLayout(
            "flashinfer_mla",
            "B S (H D)",
            "",
            "FlashInfer",
            "MLA Page Layout: ckv_cache as keys, kpe_cache as values",
        ),
        NamedLayout("sglang", "T H D", "", "SGLang", "MHATokenToKVPool: k_buffer, v_buffer of a layer"),
        NamedLayout("lmcache", "2 L T (H D)", "", "LMCache", "MemoryFormat.KV_2LTD"),
        NamedLayout("llama_cpp", "T (H D)", "", "llama.cpp", "states with flash attention"),
        NamedLayout("llama_cpp_no_flash", "T (H D)", "(H D) T", "llama.cpp", "without flash attention"),
        NamedLayout("mlx", "B H S D", "", "MLX", "mlx-lm 0.32: KVCache, keys and values of a layer"),
        NamedLayout("openvino", "B H S D", "", "OpenVINO", "2026.4: states of exported transformers"),
        NamedLayout(
            "openvino_paged",
            "B H S D",
            "",
            "OpenVINO",
            "2026.4: PagedAttention on CPUs, key_cache and value_cache of a layer",
        ),
        NamedLayout(
            "jax_ragged", "B S H 2 D", "", "JAX", "ragged_paged_attention: kv_pages, keys in even heads"
        ),
        NamedLayout("onnx_gqa", "B H S D", "", "ONNX Runtime", "GroupQueryAttention: past and present"),
        NamedLayout("executorch", "B S H D", "", "ExecuTorch", "sdpa_with_kv_cache: k_cache, v_cache"),
        NamedLayout("onnx", "B S (H D)", "", "ONNX", "Attention-24, TensorScatter-24: 3-D inputs"),
        NamedLayout("ascend", "B S H D", "", "CANN", "ScatterPaKvCache, cache_mode Norm"),
        NamedLayout("ascend_nhsd", "B H S D", "", "CANN", "ScatterPaKvCache, scatter_mode NHSD"),
        NamedLayout(
            "ascend_nz", "B (H D/x) S D%x", "", "CANN", "ScatterPaKvCache, cache_mode PA_NZ", piece_bytes=32
        ),
        NamedLayout(
            "kvloom_native", NATIVE_KEYS.axes, NATIVE_VALUES.axes, "kvloom", "codes, docs/decisions/0010"
        ),
    )
}
"""Layouts by name."""
RETIRED: Final = {
    "vllm_hnd": (
        "was '2 B H S D', which vLLM's pages on CPUs are not: 'vllm_cpu' and 'vllm_cpu_amx' are those of "
        "vLLM 0.32, by the kernel, and 'vllm_gpu_hnd' is its HND on GPUs; '2 B H S D' means what it did"
    ),
}
"""Names that are refused, and what to say instead."""


def find_layout(name: str, layout: NamedLayout | CacheLayout | str) -> NamedLayout:
    """Find the layout with this name, or with these axes.

    Args:
        name: Name of the argument in errors.
        layout: A name of ``LAYOUTS``, or axes: ``"2 B S H D"``, or those of keys and values apart,
            ``"B H D/8 S D%8 | B H D S"``.

    Raises:
        ArgumentError: it is neither, or a name that had axes that its owner does not have.
        ConfigError: the axes are no layout.
    """
    if isinstance(layout, NamedLayout):
        return layout
    text = layout.axes if isinstance(layout, CacheLayout) else layout
    if isinstance(text, str) and text in RETIRED:
        raise ArgumentError(f"{name} must be a layout that some engine has: {text!r} {RETIRED[text]}")
    if not isinstance(text, str) or (" " not in text.strip() and text not in LAYOUTS):
        raise ArgumentError(
            f"{name} must be axes such as '2 B S H D' or one of {', '.join(LAYOUTS)}, got {text!r}"
        )
    if text in LAYOUTS:
        return LAYOUTS[text]
    key, _, value = (part.strip() for part in text.partition("|"))
    layouts = [CacheLayout(axes) for axes in (key, value) if axes]
    if len(layouts) > 1 and any("2" in each.names for each in layouts):
        raise ArgumentError(f"{name} must not have the axis 2 where values have axes of their own: {text!r}")
    return NamedLayout(text, key, value)
