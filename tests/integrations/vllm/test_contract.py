"""Each part of vLLM that the integration enters is there and is called as vLLM calls its own.

The version is the one that is installed: ``make test-vllm``, and ``make test-vllm-python`` for the next.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import Parameter
from typing import Any

import pytest
from integrations.vllm.engines import needs_vllm

from kvloom.integrations import vllm

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")

OURS = vllm.__name__ + "."
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    MODULES = [import_module(OURS + module.name) for module in pkgutil.iter_modules(vllm.__path__)]
CLASSES = [
    found
    for module in MODULES
    for found in vars(module).values()
    if isinstance(found, type)
    and found.__module__ == module.__name__
    and any(base.__module__.startswith("vllm.") for base in found.__mro__)
]


def overrides() -> Iterator[Any]:
    """Functions of ours in the place of one of vLLM's, and that one."""
    for found in CLASSES:
        for name in dir(found):
            owners = [base for base in found.__mro__ if name in vars(base)]
            theirs = next((base for base in owners if base.__module__.startswith("vllm.")), None)
            if theirs is None or not owners[0].__module__.startswith(OURS):
                continue
            pair = [inspect.getattr_static(base, name) for base in (owners[0], theirs)]
            pair = [getattr(x, "__func__", x) for x in pair]
            if all(map(inspect.isfunction, pair)):
                yield pytest.param(*pair, id=f"{found.__name__}.{name}")


def why_not_accepted(ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
    """A call that ``theirs`` takes and ``ours`` does not, ``None`` if there is none."""
    if theirs.__name__ == "__init__":  # vLLM gives all by position or all by name, and subclasses differ
        return None
    mine, asked = inspect.signature(ours), inspect.signature(theirs).parameters.values()
    positional = [
        x.name for x in asked if x.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = [x.name for x in asked if x.kind == Parameter.KEYWORD_ONLY]
    try:
        mine.bind(*positional, **dict.fromkeys(named))
    except TypeError as error:
        return f"{theirs.__qualname__}({', '.join(positional + named)}): {error}"
    return None


@pytest.mark.parametrize(("ours", "theirs"), [*overrides()])
def test_an_override_takes_what_vllm_gives(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    assert why_not_accepted(ours, theirs) is None


def test_what_an_override_does_not_take_is_seen() -> None:
    assert why_not_accepted(lambda a, b: None, lambda a, b, c=False: None) is not None
    assert why_not_accepted(lambda a, *more: None, lambda a, b, c=False: None) is None


def test_nothing_that_vllm_wants_of_a_class_is_missing() -> None:
    missing = {found.__name__: set(getattr(found, "__abstractmethods__", ())) for found in CLASSES}
    assert CLASSES and not any(missing.values()), missing


def test_the_methods_of_the_platform_that_are_wrapped_are_called_so() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    chosen = inspect.signature(CpuPlatform.get_attn_backend_cls).parameters
    assert list(chosen) == ["selected_backend", "attn_selector_config", "num_heads"]
    assert list(inspect.signature(CpuPlatform.check_and_update_config).parameters) == ["vllm_config"]
    assert {"use_mla", "kv_cache_dtype"} <= set(AttentionSelectorConfig._fields)


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("avx512", [False, True])
def test_no_processor_is_refused_pages_of_kvloom(
    amx: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    vllm.register()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    for kind in ("auto", "int8_per_token_head", "int4_per_token_head"):
        for is_latent in (False, True):
            asked = AttentionSelectorConfig(
                64, torch.float32, kind, 128, use_mla=is_latent, attn_type=AttentionType.DECODER
            )
            path = CpuPlatform.get_attn_backend_cls(None, attn_selector_config=asked, num_heads=4)
            own = AttentionBackendEnum.AMX_MLA if amx else AttentionBackendEnum.CPU_MLA
            assert path == (own if is_latent else AttentionBackendEnum.CPU_ATTN).get_path()
            assert path.startswith("kvloom.")
