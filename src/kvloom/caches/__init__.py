"""Caches that own their tensors."""

import torch

from kvloom.caches.cache import Cache
from kvloom.caches.format import CacheFormat
from kvloom.caches.layers.fixed import FixedLayer
from kvloom.caches.layers.kinds import DynamicLayer, SlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from kvloom.caches.layers.layer import Layer
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.layers.quantized import QuantizedLayer
from kvloom.caches.prefixes.cache import PrefixCache, PrefixSequence
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.sequences import Sequences
from kvloom.caches.tensors.token_index import TokenIndex
from kvloom.caches.tensors.tokens import Tokens
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
