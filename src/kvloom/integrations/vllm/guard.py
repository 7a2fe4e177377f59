"""Guards for vLLM's CPU attention, which refuse kinds of pages that it would fill with wrong numbers."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvloom import ops
from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import why_not_registered
from kvloom.integrations.vllm.options import CODES

KINDS: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype`` that vLLM's CPU kernels support."""


def refuse_unknown(kind: str, kinds: Sequence[str]) -> None:
    """Refuse a kind of pages that a layer's kernels do not support.

    Args:
        kind: The value of ``--kv-cache-dtype``.
        kinds: Supported values, besides the name of the dtype that the layer computes in.

    Raises:
        UnsupportedError: ``kind`` is not supported.
    """
    own = dtype_name(torch.get_default_dtype())
    if kind not in (*kinds, own):
        why = why_not_registered()
        raise UnsupportedError(
            f"kv_cache_dtype must be {', '.join(kinds)} or the model's {own} on a CPU, got {kind!r}"
            + (f" (kvloom is not active: {why})" if why else "")
        )


def why_no_pages(config: Any) -> str | None:
    """Why no layer of an engine can have pages of kvloom; ``None`` if there is no such reason.

    Args:
        config: vLLM's configuration.
    """
    if ops.cpu_kernels() is None:
        return f"kvloom must have compiled kernels: {ops.why_unavailable('cpu')}"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(config.parallel_config, name)) > 1:
            return f"{name} must be 1 for pages of kvloom, got {size}"
    return None


class GuardedImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer.

    Raises:
        UnsupportedError: the kind of its pages is none of ``kinds``.
    """

    kinds: Sequence[str] = KINDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unknown(self.kv_cache_dtype, self.kinds)


class GuardedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """``CPUAttentionBackend`` whose layers refuse pages that its kernels do not support."""

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether a layer may be made with such pages on this processor; called by vLLM since 0.33.

        True for kvloom's two kinds on any processor: the layer then supports them, or raises.
        """
        return kv_cache_dtype in CODES or bool(super().supports_kv_cache_dtype(kv_cache_dtype))

    @staticmethod
    def get_impl_cls() -> type[GuardedImpl]:
        """The class that attends in a layer."""
        return GuardedImpl
