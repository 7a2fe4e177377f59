"""Digest of the weights in a model's folder as transformers loads them, with few of them in memory."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import PretrainedConfig

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.pool.identity import digest_of_sums, weight_sum

_IN_TURN: Final = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable by which transformers reads each weight when it is needed, and not many in advance."""
_SUM: Final = "_kvloom_sum"


def folder_digest(kind: Any, config: PretrainedConfig, dtype: torch.dtype, files: list[Path]) -> str:
    """``weights_digest`` of the ``state_dict()`` of a model that transformers loads.

    transformers' loader handles weights that have another name, parts or another dtype in a file, tied
    weights, and weights that are no part of the model. Each weight is replaced by an empty one as soon as it
    is loaded.

    Args:
        kind: The model's class, a subclass of ``PreTrainedModel``.
        config: Its configuration.
        dtype: Dtype that it computes in.
        files: Safetensors files.

    Raises:
        UnsupportedError: the loader fails, a weight is in no file, or in two files.
    """
    with ExitStack() as stack:
        saved: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            if twice := saved.keys() & set(opened.keys()):
                raise UnsupportedError(
                    f"each weight must be in one file for a store, got {min(twice)} in two files"
                )
            saved |= {name: opened.get_slice(name) for name in opened.keys()}
        loaded = _load(kind, config, dtype, saved)
    sums: dict[str, bytes] = {}
    for name, weight in loaded.items():
        if not hasattr(weight, _SUM):
            raise UnsupportedError(
                f"model must have all weights of its configuration in safetensors for a store, got none for "
                f"{name}"
            )
        sums[name] = getattr(weight, _SUM)
    return digest_of_sums(sums)


def _load(kind: Any, config: Any, dtype: torch.dtype, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The ``state_dict()`` of a model with empty weights; loaded weights have a sum."""
    with _sums_of_weights(), _weights_in_turn():
        try:
            model = kind.from_pretrained(None, config=config, dtype=dtype, state_dict=saved)
        # Raised for weights of another shape, or by a transformers that needs all weights in memory.
        except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"model must be one that transformers loads from its safetensors for a store, got {error!r}"
            ) from error
    found: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return found


@contextmanager
def _sums_of_weights() -> Iterator[None]:
    """Context in which modules of this thread get empty weights; loaded weights have a sum, others none."""
    thread = threading.get_ident()

    def replace(module: Any, name: str, weight: Tensor | None) -> Any:
        if weight is None or weight.is_meta or threading.get_ident() != thread:
            return None
        is_loaded = getattr(weight, "_is_hf_initialized", False)
        if not is_loaded and not isinstance(weight, Parameter):
            return None  # a buffer that the model computes
        empty = torch.empty_like(weight, device="meta")
        if isinstance(weight, Parameter):
            empty = Parameter(empty, requires_grad=weight.requires_grad)
        empty.__dict__.update(weight.__dict__)
        if is_loaded:
            setattr(empty, _SUM, weight_sum(name, weight))
        return empty

    hooks = [
        register_module_parameter_registration_hook(replace),
        register_module_buffer_registration_hook(replace),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _weights_in_turn() -> Iterator[None]:
    before = os.environ.get(_IN_TURN)
    os.environ[_IN_TURN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_IN_TURN]
        else:
            os.environ[_IN_TURN] = before
