"""What is known of one folder of a store."""

import time

from kvloom.store.fingerprint import Fingerprint
from kvloom.store.index import Index
from kvloom.store.index_objects import IndexObjects


class Folder:
    """The runs of one fingerprint."""

    def __init__(self, fingerprint: Fingerprint, name: str) -> None:
        self.fingerprint = fingerprint
        self.index, self.objects = Index(), IndexObjects(name)
        self.ignored: set[str] = set()
        self.doubted: set[str] = set()  # runs for which index objects are not trusted
        self.written: set[str] = set()  # runs written since the last listing began, which may miss them
        self.version: float | None = None
        self.must_list = False  # despite an unchanged version
        self.began = self.ended = float("-inf")  # of the last listing, monotonic
        self.num_listed = 0

    @property
    def took(self) -> float:
        """Seconds of the last listing."""
        return self.ended - self.began if self.num_listed else 0.0

    def end(self, began: float) -> None:
        """Record that a listing ended now."""
        self.began, self.ended = began, time.monotonic()
        self.num_listed += 1
