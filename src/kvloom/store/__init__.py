"""Persistent stores of keys and values, in files and elsewhere, verified on every read.

Names load on first use. Only ``transfer`` and ``below``, which move pages, need torch.
"""

from typing import TYPE_CHECKING

from kvloom.lazy_names import getattr_of

if TYPE_CHECKING:
    from kvloom.store.below import put_below
    from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat
    from kvloom.store.format import DamagedRun, Run, read_head
    from kvloom.store.store import KVStore
    from kvloom.store.transfer import entries_of, rotation_of, smoothing_digest

_HOME = {
    "DamagedRun": "format",
    "Fingerprint": "fingerprint",
    "KVStore": "store",
    "LayerFormat": "fingerprint",
    "Run": "format",
    "SideFormat": "fingerprint",
    "entries_of": "transfer",
    "layers_of": "transfer",  # the earlier name of ``entries_of``
    "put_below": "below",
    "rotation_of": "transfer",
    "smoothing_digest": "transfer",
    "read_head": "format",
}

__all__ = [
    "DamagedRun",
    "Fingerprint",
    "KVStore",
    "LayerFormat",
    "Run",
    "SideFormat",
    "entries_of",
    "put_below",
    "read_head",
    "rotation_of",
    "smoothing_digest",
]

__getattr__ = getattr_of(__name__, _HOME)
