"""Pages and their holders: pool, prefix tree, page tables. Integers only; imports no torch."""

from kvloom.paging.arguments import POLICIES, expect_policy
from kvloom.paging.causes import CAUSES, Miss
from kvloom.paging.check import check
from kvloom.paging.events import Events
from kvloom.paging.interrupts import interruptible, uninterrupted, whole
from kvloom.paging.page_states import PageRef
from kvloom.paging.pool import PagePool
from kvloom.paging.prefix import PrefixTree, TreePath
from kvloom.paging.recorded_states import Event, PageStates
from kvloom.paging.salts import expect_salt
from kvloom.paging.table import Copy, Growth, PageTable, release_all

__all__ = [
    "CAUSES",
    "POLICIES",
    "Copy",
    "Event",
    "Events",
    "Growth",
    "Miss",
    "PagePool",
    "PageRef",
    "PageStates",
    "PageTable",
    "PrefixTree",
    "TreePath",
    "check",
    "expect_policy",
    "expect_salt",
    "interruptible",
    "release_all",
    "uninterrupted",
    "whole",
]  # fmt: skip
