"""Who holds which page of a paged cache: pool, prefix tree, block tables. Integers only; imports no torch."""

from kvloom.blocks.check import check
from kvloom.blocks.pool import BlockPool, BlockRef
from kvloom.blocks.prefix import PrefixTree
from kvloom.blocks.table import BlockTable, Copy, Growth, append_all

__all__ = ["BlockPool", "BlockRef", "BlockTable", "Copy", "Growth", "PrefixTree", "append_all", "check"]
