"""Caches that own their tensors."""

from kvloom.caches.cache import Cache
from kvloom.caches.format import CacheFormat
from kvloom.caches.growing import DynamicLayer, SlidingWindowLayer
from kvloom.caches.layers import Layer
from kvloom.caches.paged import PagedLayer
from kvloom.caches.pages import Pages
from kvloom.caches.prefix import PrefixCache, PrefixSequence
from kvloom.caches.quantized import QuantizedLayer
from kvloom.caches.sequences import Sequences
from kvloom.caches.static import StaticLayer
from kvloom.caches.static_pages import StaticPagedLayer
from kvloom.caches.static_sliding import StaticSlidingWindowLayer
from kvloom.caches.tokens import TokenIndex, Tokens

__all__ = [
    "Cache",
    "CacheFormat",
    "DynamicLayer",
    "Layer",
    "PagedLayer",
    "Pages",
    "PrefixCache",
    "PrefixSequence",
    "QuantizedLayer",
    "Sequences",
    "SlidingWindowLayer",
    "StaticLayer",
    "StaticPagedLayer",
    "StaticSlidingWindowLayer",
    "TokenIndex",
    "Tokens",
]
