"""kvloom: a KV cache for transformer inference. One storage for every published layout and operator standard.

Names load on first use, so that ``import kvloom`` is instant and imports no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Batch": "kvloom.ops",
    "CacheIndex": "kvloom.core.indexing",
    "CacheLayout": "kvloom.core.layouts",
    "KVError": "kvloom.errors",
    "KVSpec": "kvloom.core.specs",
    "KVTensors": "kvloom.layouts",
    "KVView": "kvloom.core.views",
    "Placement": "kvloom.layouts",
    "QuantSpec": "kvloom.core.specs",
    "Scores": "kvloom.ops",
    "convert": "kvloom.layouts",
    "debug": "kvloom.core.checks",
    "ops": "kvloom",
    "plan": "kvloom.planning.plan",
    "plan_bits": "kvloom.measuring.planned_bits",
    "quality": "kvloom.measuring.quality",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604 (all keys are strings)


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
