"""Probes: results of a model, kept beside its runs and compared with those of whoever opens them."""

from collections.abc import Callable
from typing import NamedTuple


class Probe(NamedTuple):
    """Keys and values of a few fixed tokens, in whatever form their maker chose.

    A fingerprint tells models apart by what they say of themselves. A probe tells apart what they compute, so
    that whatever a fingerprint leaves out is found before anything is read.

    Attributes:
        data: To be kept.
        difference: Says how the ``data`` of another differ by more than rounding; empty if they do not.
    """

    data: bytes
    difference: Callable[[bytes], str]
