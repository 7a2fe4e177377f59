"""The four kernels behind every dialect and cache: store, load, attend, copy."""

from kvloom.ops.alibi import alibi_slopes
from kvloom.ops.api import Batch, Scores, attend, copy, cpu_kernels, load, store

__all__ = ["Batch", "Scores", "alibi_slopes", "attend", "copy", "cpu_kernels", "load", "store"]
