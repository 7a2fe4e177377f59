"""The kernels behind every dialect and cache: store, load, attend, copy, and rotate."""

from kvloom.ops.alibi import alibi_slopes
from kvloom.ops.api import attend, copy, load, store
from kvloom.ops.choice import cpu_kernels, cuda_kernels, why_unavailable
from kvloom.ops.invariance import BatchInvariance
from kvloom.ops.offsets import KeyOffset
from kvloom.ops.parts import AttendedPart, attend_part
from kvloom.ops.rotation import rotate
from kvloom.ops.scores import Batch, Counts, PositionalBias, Scores
from kvloom.ops.smoothing import KeySmoothing

Part = AttendedPart
"""Another name of ``AttendedPart``."""

__all__ = [
    "AttendedPart",
    "Batch",
    "BatchInvariance",
    "Counts",
    "KeyOffset",
    "KeySmoothing",
    "Part",
    "PositionalBias",
    "Scores",
    "alibi_slopes",
    "attend",
    "attend_part",
    "copy",
    "cpu_kernels",
    "cuda_kernels",
    "load",
    "rotate",
    "store",
    "why_unavailable",
]
