"""What outlives the process: pages of keys and values in files and elsewhere, verified on every read.

Needs no torch; ``transfer`` and ``below``, which move pages of a pool, do.
"""

from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat
from kvloom.store.format import DamagedRun, Run, read_head
from kvloom.store.store import KVStore

__all__ = ["DamagedRun", "Fingerprint", "KVStore", "LayerFormat", "Run", "SideFormat", "read_head"]
