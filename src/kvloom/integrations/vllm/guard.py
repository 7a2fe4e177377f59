"""vLLM's attention on a CPU, without the kinds of pages that it accepts and fills with wrong numbers."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import why_not_registered
from kvloom.integrations.vllm.options import CODES

KINDS: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of ``--kv-cache-dtype`` that vLLM's CPU kernels know."""


def refuse_unknown(kind: str, kinds: Sequence[str]) -> None:
    """Refuse pages of a layer that is being made, which its kernels would take for others.

    Args:
        kind: The value of ``--kv-cache-dtype``.
        kinds: Those that are supported, besides the name of the dtype that the layer computes in.

    Raises:
        UnsupportedError: ``kind`` is another.
    """
    own = dtype_name(torch.get_default_dtype())
    if kind not in (*kinds, own):
        why = why_not_registered()
        raise UnsupportedError(
            f"kv_cache_dtype must be {', '.join(kinds)} or the model's {own} on a CPU, got {kind!r}"
            + (f" (kvloom is not active: {why})" if why else "")
        )


class GuardedImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends in one layer.

    Raises:
        UnsupportedError: its pages are none of ``kinds``.
    """

    kinds: Sequence[str] = KINDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unknown(self.kv_cache_dtype, self.kinds)


class GuardedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """``CPUAttentionBackend`` whose layers refuse pages that its kernels do not know."""

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether a layer may be made with such pages, on this processor.

        So it may with kvloom's two kinds on any: the layer has them, or says why not. vLLM asks from 0.33 on.
        """
        return kv_cache_dtype in CODES or bool(super().supports_kv_cache_dtype(kv_cache_dtype))

    @staticmethod
    def get_impl_cls() -> type[GuardedImpl]:
        """The class that attends in a layer."""
        return GuardedImpl
