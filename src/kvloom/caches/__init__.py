"""Caches that own their tensors."""

from kvloom.caches.batch import PagedBatch
from kvloom.caches.cache import Cache
from kvloom.caches.growing import DynamicLayer, SlidingWindowLayer
from kvloom.caches.layers import Layer
from kvloom.caches.paged import PagedLayer
from kvloom.caches.prefix_cache import PagedCache, PagedSequence
from kvloom.caches.quantized import QuantizedLayer
from kvloom.caches.static import StaticLayer
from kvloom.caches.static_pages import StaticPagedLayer
from kvloom.caches.static_sliding import StaticSlidingWindowLayer
from kvloom.caches.storage import PagedFormat, PagedMemory
from kvloom.caches.stored import Placement, StoredTokens

__all__ = [
    "Cache",
    "DynamicLayer",
    "Layer",
    "PagedBatch",
    "PagedCache",
    "PagedFormat",
    "PagedLayer",
    "PagedMemory",
    "PagedSequence",
    "Placement",
    "QuantizedLayer",
    "SlidingWindowLayer",
    "StaticLayer",
    "StaticPagedLayer",
    "StaticSlidingWindowLayer",
    "StoredTokens",
]
