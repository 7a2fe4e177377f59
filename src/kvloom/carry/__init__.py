"""Caches of other engines, read and written.

Names load on first use, since ``kvloom --help`` needs no torch.
"""

from typing import TYPE_CHECKING

from kvloom.lazy_names import getattr_of

if TYPE_CHECKING:
    from kvloom.carry.array_file import read_array_file, write_array_file
    from kvloom.carry.arrays import read_arrays, write_arrays
    from kvloom.carry.carried import CarriedCache, CarriedLayer, CarriedSide
    from kvloom.carry.describing import describe, format_of
    from kvloom.carry.first_layer import FirstLayerReport, check_first_layer, expect_first_layer
    from kvloom.carry.geometry import CacheGeometry, LayerGeometry
    from kvloom.carry.llama.reading import read_llama
    from kvloom.carry.llama.writing import llama_state, write_llama
    from kvloom.carry.mlx.reading import read_mlx
    from kvloom.carry.mlx.writing import write_mlx
    from kvloom.carry.own.kv_cache import from_cache, to_cache
    from kvloom.carry.own.model_geometry import geometry_of
    from kvloom.carry.own.pool import from_pool, to_pool

_HOME = {
    "CacheGeometry": "geometry",
    "CarriedCache": "carried",
    "CarriedLayer": "carried",
    "CarriedSide": "carried",
    "FirstLayerReport": "first_layer",
    "LayerGeometry": "geometry",
    "check_first_layer": "first_layer",
    "describe": "describing",
    "expect_first_layer": "first_layer",
    "format_of": "describing",
    "from_cache": "own.kv_cache",
    "from_pool": "own.pool",
    "geometry_of": "own.model_geometry",
    "llama_state": "llama.writing",
    "read_array_file": "array_file",
    "read_arrays": "arrays",
    "read_llama": "llama.reading",
    "read_mlx": "mlx.reading",
    "to_cache": "own.kv_cache",
    "to_pool": "own.pool",
    "write_array_file": "array_file",
    "write_arrays": "arrays",
    "write_llama": "llama.writing",
    "write_mlx": "mlx.writing",
}

__all__ = [
    "CacheGeometry",
    "CarriedCache",
    "CarriedLayer",
    "CarriedSide",
    "FirstLayerReport",
    "LayerGeometry",
    "check_first_layer",
    "describe",
    "expect_first_layer",
    "format_of",
    "from_cache",
    "from_pool",
    "geometry_of",
    "llama_state",
    "read_array_file",
    "read_arrays",
    "read_llama",
    "read_mlx",
    "to_cache",
    "to_pool",
    "write_array_file",
    "write_arrays",
    "write_llama",
    "write_mlx",
]

__getattr__ = getattr_of(__name__, _HOME)
