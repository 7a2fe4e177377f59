"""Probes: results of a model, stored beside its runs and compared with those of the reader's model."""

from collections.abc import Callable
from typing import NamedTuple


class Probe(NamedTuple):
    """Keys and values of a few fixed tokens, in any form.

    A fingerprint compares descriptions of models. A probe compares results, so it finds differences that a
    fingerprint misses before anything is read.

    Attributes:
        data: Bytes to store.
        difference: Function that describes how the ``data`` of another probe differ by more than rounding;
            empty if they do not.
    """

    data: bytes
    difference: Callable[[bytes], str]
