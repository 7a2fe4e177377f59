"""Guards for vLLM's multi-head latent attention on a CPU, which supports only the model's dtype."""

from typing import Any

from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvloom.integrations.vllm.guard import refuse_unknown


class _Guarded:
    """Attention of one layer.

    Raises:
        UnsupportedError: its pages are of another kind.
    """

    kv_cache_dtype: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unknown(self.kv_cache_dtype, ("auto",))


class _CpuImpl(_Guarded, CPUMLAImpl):  # type: ignore[misc]
    pass


class _AmxImpl(_Guarded, AMXMLAImpl):  # type: ignore[misc]
    pass


class GuardedCpuBackend(CPUMLABackend):  # type: ignore[misc]
    """vLLM's backend of latent attention without AMX, guarded."""

    @staticmethod
    def get_impl_cls() -> type[_CpuImpl]:
        """The class that attends in a layer."""
        return _CpuImpl


class GuardedAmxBackend(AMXMLABackend):  # type: ignore[misc]
    """vLLM's backend of latent attention with AMX, guarded."""

    @staticmethod
    def get_impl_cls() -> type[_AmxImpl]:
        """The class that attends in a layer."""
        return _AmxImpl
