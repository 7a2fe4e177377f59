"""Caches that own their tensors."""

from kvloom.caches.batch import PagedBatch
from kvloom.caches.cache import Cache
from kvloom.caches.layers import DynamicLayer, Layer, SlidingWindowLayer
from kvloom.caches.paged import PagedLayer
from kvloom.caches.prefix_cache import PagedCache, PagedSequence
from kvloom.caches.quantized import QuantizedLayer
from kvloom.caches.static import StaticLayer
from kvloom.caches.storage import PagedFormat

__all__ = [
    "Cache",
    "DynamicLayer",
    "Layer",
    "PagedBatch",
    "PagedCache",
    "PagedFormat",
    "PagedLayer",
    "PagedSequence",
    "QuantizedLayer",
    "SlidingWindowLayer",
    "StaticLayer",
]
