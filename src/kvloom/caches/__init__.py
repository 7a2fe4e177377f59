"""Caches that own their tensors."""

from kvloom.caches.paged import PagedLayer
from kvloom.caches.storage import PagedFormat

__all__ = ["PagedFormat", "PagedLayer"]
