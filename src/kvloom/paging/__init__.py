"""Who holds which page of a paged cache: pool, prefix tree, page tables. Integers only; imports no torch."""

from kvloom.paging.check import check
from kvloom.paging.pool import PagePool, PageRef
from kvloom.paging.prefix import PrefixTree
from kvloom.paging.table import Copy, Growth, PageTable

__all__ = ["Copy", "Growth", "PagePool", "PageRef", "PageTable", "PrefixTree", "check"]
