"""Caches that own their tensors."""

from kvloom.caches.batch import PagedBatch
from kvloom.caches.paged import PagedLayer
from kvloom.caches.storage import PagedFormat

__all__ = ["PagedBatch", "PagedFormat", "PagedLayer"]
