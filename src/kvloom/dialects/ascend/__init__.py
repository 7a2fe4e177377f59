"""Ascend's paged-cache operators on any device: ScatterPaKvCache in all its scenarios, and its inverse.

``torch_npu`` in this package has the same operators under torch_npu's names, argument order and defaults.
"""

from kvloom.dialects.ascend.formats import nd_to_nz, nz_to_nd
from kvloom.dialects.ascend.gather import gather_pa_kv_cache
from kvloom.dialects.ascend.runs import plan_slots, run_lengths, slot_mapping
from kvloom.dialects.ascend.scatter import scatter_pa_kv_cache

__all__ = [
    "gather_pa_kv_cache",
    "nd_to_nz",
    "nz_to_nd",
    "plan_slots",
    "run_lengths",
    "scatter_pa_kv_cache",
    "slot_mapping",
]
