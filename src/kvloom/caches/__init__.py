"""Caches that own their tensors."""

from kvloom.caches.paged import PagedLayer

__all__ = ["PagedLayer"]
