"""vLLM's attention, without the pages that it accepts on a CPU and fills with wrong numbers."""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvloom.errors import UnsupportedError
from kvloom.integrations.vllm import why_not_registered


class GuardedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """``CPUAttentionBackend`` that refuses pages with scales of each token and head.

    vLLM's CPU kernels know no such scales, and nothing in vLLM asks before they run.
    """

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """``spec``, if vLLM's kernels serve it; called for every layer when the engine starts.

        Raises:
            UnsupportedError: they do not.
        """
        if spec.kv_quant_mode.is_per_token_head:
            name = spec.kv_quant_mode.name.lower()
            why = why_not_registered() or "of kinds with such scales kvloom has int8 and int4"
            raise UnsupportedError(f"vLLM's CPU attention would fill {name} pages with wrong numbers: {why}")
        return super().customize_spec(spec)
