"""kvloom: a KV cache for transformer inference. One storage for every published layout and operator standard.

Names load on first use, so that ``import kvloom`` is instant and imports no torch. Those for models of
Hugging Face, such as ``enable`` and ``KVCache``, need transformers.
"""

from importlib import import_module
from typing import Any

from kvloom.lazy_names import getattr_of
from kvloom.moved import find_moved

_HOME = {
    "Batch": "ops",
    "Cache": "caches",
    "CacheIndex": "core.indexing",
    "CacheLayout": "core.layouts",
    "KVCache": "integrations.transformers",
    "KVError": "errors",
    "KVPool": "integrations.transformers",
    "KVSpec": "core.specs",
    "KVTensors": "layouts",
    "KVView": "core.views",
    "Placement": "layouts",
    "QuantSpec": "core.specs",
    "Scores": "ops",
    "continuous_batching": "integrations.transformers",
    "convert": "layouts",
    "debug": "core.checks",
    "disable": "integrations.transformers",
    "enable": "integrations.transformers",
    "load_model": "integrations.transformers",
    "plan": "planning.plan",
    "plan_bits": "measuring.planned_bits",
    "quality": "measuring.quality",
}

__all__ = [*_HOME, "__version__", "ops"]  # noqa: PLE0604 (all keys are strings)

find_moved()
_load = getattr_of(__name__, _HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("kvloom")
    return import_module("kvloom.ops") if name == "ops" else _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
