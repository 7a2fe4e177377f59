"""Settings of torch that decide what a model computes beside the model itself, such as autocast.

They hold for a process or, as autocast does, for a thread. What changes no bit of keys and values, such as
gradients, inference mode and autocast's cache, is not among them, and neither is the number of threads.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from kvloom.integrations.transformers.fingerprint.modes import foreign_modes, replaced_operators

_EXACT: Final = "none", "ieee"
"""Precisions of float32 that are its own: not set, and set to that."""
_BOTH: Final = (True, True)
"""Reductions in lower precision, and split ones, are allowed; ``True`` in versions that know one of them."""
_TINY: Final = 5e-324
_PRODUCTS: Final = {"cpu": "mkldnn", "cuda": "cuda"}


class _Setting(NamedTuple):
    """A setting.

    Attributes:
        name: Name for messages and files.
        read: Function that returns the present value.
        default: Value in a new process, of which nothing is said.
        device: Type of the devices that it is for; empty for all.
    """

    name: str
    read: Callable[[], Any]
    default: Any
    device: str = ""


def _flushes_denormals() -> bool:
    return _TINY * 1.0 == 0.0


def _path_of_einsum() -> Any:
    found = torch.backends.opt_einsum
    return found.strategy if found.enabled else None


def _other_library() -> Any:
    """Library of CUDA's products, if it is not the one that torch chooses."""
    read = (getattr(torch._C, f"_get_blas_{x}_backend", lambda: None) for x in ("preferred", "default"))
    preferred, default = (get() for get in read)
    return None if preferred == default else preferred


def _in_c(name: str, setting: str, default: Any, device: str = "", *args: str) -> _Setting:
    """A setting that a function of torch's compiled part returns; a version without it has the default."""
    return _Setting(name, partial(getattr(torch._C, setting, lambda *_: default), *args), default, device)


def _precision(name: str, default: str, device: str, backend: str, operation: str) -> _Setting:
    return _in_c(name, "_get_fp32_precision_getter", default, device, backend, operation)


_SETTINGS: Final = (
    _Setting("default dtype", torch.get_default_dtype, torch.float32),
    _Setting("modes", foreign_modes, ()),
    _Setting("operators", replaced_operators, ()),
    _Setting("deterministic algorithms", torch.are_deterministic_algorithms_enabled, False),
    *([_Setting("einsum", _path_of_einsum, "auto")] if torch.backends.opt_einsum.is_available() else []),
    _Setting("denormals flushed", _flushes_denormals, False, "cpu"),
    _Setting("mha fastpath", torch.backends.mha.get_fastpath_enabled, True),
    _in_c("sdpa flash", "_get_flash_sdp_enabled", True),
    _in_c("sdpa math", "_get_math_sdp_enabled", True),
    _in_c("sdpa efficient", "_get_mem_efficient_sdp_enabled", True, "cuda"),
    _in_c("sdpa cudnn", "_get_cudnn_sdp_enabled", True, "cuda"),
    _in_c("sdpa overrideable", "_get_overrideable_sdp_enabled", True, "cuda"),
    _in_c("sdpa halves", "_get_math_sdp_allow_fp16_bf16_reduction", False),
    _in_c(
        "sdpa order", "_get_sdp_priority_order", getattr(torch._C, "_get_sdp_priority_order", tuple)(), "cuda"
    ),
    _in_c("mkldnn", "_get_mkldnn_enabled", True, "cpu"),
    _in_c("mkldnn deterministic", "_get_mkldnn_deterministic", False, "cpu"),
    _precision("mkldnn products", "none", "cpu", "mkldnn", "matmul"),
    _precision("mkldnn convolutions", "none", "cpu", "mkldnn", "conv"),
    _in_c("nnpack", "_get_nnpack_enabled", True, "cpu"),
    _precision("cuda products", "none", "cuda", "cuda", "matmul"),
    _precision("cudnn convolutions", "tf32", "cuda", "cuda", "conv"),
    _in_c("cuda float16 accumulation", "_get_cublas_allow_fp16_accumulation", False, "cuda"),
    _in_c("cuda float16 reduction", "_get_cublas_allow_fp16_reduced_precision_reduction", _BOTH, "cuda"),
    _in_c("cuda bfloat16 reduction", "_get_cublas_allow_bf16_reduced_precision_reduction", _BOTH, "cuda"),
    _Setting("cuda library", _other_library, None, "cuda"),
    _in_c("cudnn", "_get_cudnn_enabled", True, "cuda"),
    _in_c("cudnn deterministic", "_get_cudnn_deterministic", False, "cuda"),
    _in_c("cudnn benchmark", "_get_cudnn_benchmark", False, "cuda"),
)


class Context:
    """The settings that decide what is computed on some devices.

    Args:
        devices: Types of the devices.
    """

    def __init__(self, devices: Collection[str]) -> None:
        self._settings = [x for x in _SETTINGS if not x.device or x.device in devices]
        self._readers = [x.read for x in self._settings]
        self._devices = sorted(x for x in devices if torch.amp.is_autocast_available(x))

    def values(self) -> list[Any]:
        """Present values, to be compared with others."""
        found = [read() for read in self._readers]
        return found + [_autocast(device) for device in self._devices]

    def text(self) -> str:
        """Names and values of the settings that differ from those of a new process; empty if none does."""
        pairs = zip(self._settings, self.values(), strict=False)
        said = [f"{x.name} {value}" for x, value in pairs if not _are_alike(value, x.default)]
        casts = [(device, _autocast(device)) for device in self._devices]
        return ", ".join(said + [f"autocast of {device} to {dtype}" for device, dtype in casts if dtype])


def context_of(model: Any) -> Context:
    """The settings that decide what a model computes on its devices."""
    return Context({x.device.type for x in model.parameters()})


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _are_alike(value: Any, default: Any) -> bool:
    if value in _EXACT and default in _EXACT:
        return True
    return bool(value == default or (default == _BOTH and value is True))


def float32_precision(device: str) -> str:
    """Precision of float32 products on devices of a type: ``"ieee"``, ``"tf32"`` or ``"bf16"``."""
    found = next((x.read() for x in _SETTINGS if x.name == f"{_PRODUCTS.get(device)} products"), "none")
    return "ieee" if found in _EXACT else str(found)
