"""Caches of other engines, read and written.

Names load on first use, since ``kvloom --help`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.carry.carried import CarriedCache, CarriedLayer, CarriedSide
    from kvloom.carry.geometry import CacheGeometry, LayerGeometry
    from kvloom.carry.llama.reading import read_llama
    from kvloom.carry.llama.writing import llama_state, write_llama

_HOME = {
    "CacheGeometry": "geometry",
    "CarriedCache": "carried",
    "CarriedLayer": "carried",
    "CarriedSide": "carried",
    "LayerGeometry": "geometry",
    "llama_state": "llama.writing",
    "read_llama": "llama.reading",
    "write_llama": "llama.writing",
}

__all__ = [
    "CacheGeometry",
    "CarriedCache",
    "CarriedLayer",
    "CarriedSide",
    "LayerGeometry",
    "llama_state",
    "read_llama",
    "write_llama",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom.carry' has no attribute {name!r}")
    return getattr(import_module(f"kvloom.carry.{_HOME[name]}"), name)
