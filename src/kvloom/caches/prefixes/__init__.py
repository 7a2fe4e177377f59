"""Rows of any length, which find the prefixes of each other in groups of layers."""

from kvloom.caches.prefixes.search import Needed, Prefixes

__all__ = ["Needed", "Prefixes"]
