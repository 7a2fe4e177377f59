"""Caches that own their tensors."""

import torch

from kvloom.caches.cache import Cache
from kvloom.caches.fixed import FixedLayer
from kvloom.caches.format import CacheFormat
from kvloom.caches.kinds import DynamicLayer, SlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from kvloom.caches.layer import Layer
from kvloom.caches.paged import PagedLayer
from kvloom.caches.pages import Pages
from kvloom.caches.prefix import PrefixCache, PrefixSequence
from kvloom.caches.quantized import QuantizedLayer
from kvloom.caches.sequences import Sequences
from kvloom.caches.token_index import TokenIndex
from kvloom.caches.tokens import Tokens
from kvloom.paging import interrupts

__all__ = [
    "Cache",
    "CacheFormat",
    "DynamicLayer",
    "FixedLayer",
    "Layer",
    "PagedLayer",
    "Pages",
    "PrefixCache",
    "PrefixSequence",
    "QuantizedLayer",
    "Sequences",
    "SlidingWindowLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "TokenIndex",
    "Tokens",
]

interrupts.is_traced = torch.compiler.is_compiling
