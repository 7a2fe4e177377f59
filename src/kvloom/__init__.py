"""kvloom: a KV cache for transformer inference. One storage for every published layout and operator standard.

Names load on first use, so that ``import kvloom`` is instant and imports no torch. Those for models of
Hugging Face, such as ``enable`` and ``KVCache``, need transformers.
"""

from importlib import import_module
from typing import Any

from kvloom.moved import find_moved

_HOME = {
    "Batch": "kvloom.ops",
    "Cache": "kvloom.caches",
    "CacheIndex": "kvloom.core.indexing",
    "CacheLayout": "kvloom.core.layouts",
    "KVCache": "kvloom.integrations.transformers",
    "KVError": "kvloom.errors",
    "KVPool": "kvloom.integrations.transformers",
    "KVSpec": "kvloom.core.specs",
    "KVTensors": "kvloom.layouts",
    "KVView": "kvloom.core.views",
    "Placement": "kvloom.layouts",
    "QuantSpec": "kvloom.core.specs",
    "Scores": "kvloom.ops",
    "continuous_batching": "kvloom.integrations.transformers",
    "convert": "kvloom.layouts",
    "debug": "kvloom.core.checks",
    "disable": "kvloom.integrations.transformers",
    "enable": "kvloom.integrations.transformers",
    "load_model": "kvloom.integrations.transformers",
    "ops": "kvloom",
    "plan": "kvloom.planning.plan",
    "plan_bits": "kvloom.measuring.planned_bits",
    "quality": "kvloom.measuring.quality",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 (all keys are strings)

find_moved()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("kvloom")
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    if _HOME[name] == "kvloom":
        return import_module(f"kvloom.{name}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
