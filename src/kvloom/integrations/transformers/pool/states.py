"""Recurrent states of a pool: restored when a cache begins, and kept where pieces of its text ended.

A prefix is found where all of its pages and its states are kept, which is at multiples of the grid: after the
last whole piece of a committed text, and where two texts begin to differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache

from kvloom.caches import CacheFormat
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.states import StatePages, StateSpec
from kvloom.caches.rows.row import Row
from kvloom.core.checks import expect_range
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.cache.trial import trial_of
from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.models.seen import entries_seen
from kvloom.integrations.transformers.pool.origin import PoolCache
from kvloom.integrations.transformers.states.grid import Grid
from kvloom.integrations.transformers.states.specs import restore_states, stateful_layers, states_of
from kvloom.paging import Events, PageRef, PageTable, release_all
from kvloom.paging.grid import grid_interval
from kvloom.tracing.states import StateEvents

PADDED: Final = "recurrent states depend on the padding of their row"
"""Why nobody finds the states of padded rows."""
_LEAST: Final = 8
"""Least number of texts whose states are kept if ``max_bytes`` is not given."""


class PoolStates:
    """The states of the caches of one pool.

    Args:
        specs: Specs of the states of each layer.
        page_size: Tokens in a page.
        interval: Tokens of the grid.
        max_bytes: Bytes that states may take.
        device: Device of the states.

    Attributes:
        pages: Pages that hold the states.
        interval: As above.
        max_bytes: As above.
    """

    def __init__(
        self,
        specs: Mapping[int, Sequence[StateSpec]],
        page_size: int,
        interval: int,
        max_bytes: int,
        device: torch.device,
    ) -> None:
        self.interval, self.max_bytes = interval, max_bytes
        self.pages = StatePages(specs, page_size, max_bytes, device)
        self._events = StateEvents()

    @property
    def group(self) -> PrefixGroup:
        """Group in which the pages are found."""
        return self.pages.group

    def record(self, events: Events) -> None:
        """Record events of states among the events of pages."""
        self._events.record(events, self.group.tree)

    def note(self, events: Events | None, what: str, request: int, found: Sequence[PageRef] = ()) -> None:
        """Record an event of states, as ``StateEvents.note``."""
        self._events.note(events, self.group.tree, what, request, found)

    def begin(self, cache: PoolCache, held: Sequence[PageTable], end: int, num_shared: Sequence[int]) -> None:
        """Restore found states into a cache, and note where copies of it are wanted.

        Args:
            cache: A cache that holds the pages of ``end`` tokens.
            held: The page of each row, which is released.
            end: As above.
            num_shared: Number of pages of each row that another text shares, up to a multiple of the grid.
        """
        try:
            cache.grid = Grid(self.interval, end)
            cache.grid.wanted = {count * self.pages.page_size for count in num_shared} - {0, end}
            if end:
                states = self.pages.read([Row(table) for table in held])
                restore_states(cache.layers, self.pages.specs, states)
            events = cache.sequences[0].pages.pool.events
            for table in held:
                self.note(events, "read", table.request, table.pages)
        finally:
            release_all(held)

    def write(self, cache: Cache, row: int, tokens: Sequence[int], scope: str, found: int) -> Row | None:
        """Let others find the states of a row of a cache, and evict the states it continued from first.

        Args:
            cache: A copy of a cache after a piece of its text.
            row: Number of the row.
            tokens: All tokens of the row.
            scope: Scope in which the states are found.
            found: Number of tokens whose states the text continued from; 0 for none.

        Returns:
            The page of the states, held by the caller; ``None`` if none was free.
        """
        held = self.pages.write(states_of(cache.layers, self.pages.specs), row, tokens, scope)
        if held is not None and 0 < found < len(tokens):
            tree, pool = self.group.tree, self.group.pages.pool
            for ref in tree.pages_from(tokens[:found], scope, found // self.pages.page_size - 1):
                pool.retain(ref)
                pool.release(ref, is_passed=True)
        return held

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for x in self.pages.group.storages.values())

    def report(self) -> dict[str, Any]:
        """Numbers of pages by state, bytes of the states of a text, ``max_bytes``, and tokens of the grid."""
        return {
            **self.group.pages.pool.report(),
            "nbytes": self.pages.nbytes,
            "max_bytes": self.max_bytes,
            "interval": self.interval,
        }


def states_for(
    model: Any, layers: Sequence[Any], format: CacheFormat, interval: int | None, max_bytes: int | None
) -> PoolStates | None:
    """Pages for the states of a model's caches, ``None`` if it has no states; see ``trial_of``.

    Args:
        model: A ``PreTrainedModel``.
        layers: Layers of an empty cache for it.
        format: Cache format of its keys and values.
        interval: Tokens of the grid, a multiple of the page size; ``None`` for 256, or the next multiple.
        max_bytes: Bytes that states may take; ``None`` for as many as the pages, and at least eight texts.

    Raises:
        ArgumentError: ``state_interval`` is no multiple of ``page_size``, or ``max_state_bytes`` is less than
            the states of one text.
        UnsupportedError: the model is wrong in pieces; or as ``StatePages``.
    """
    page_size = format.page_size
    if not stateful_layers(layers):
        return None
    interval = expect_interval(interval, page_size)
    why_wrong, specs = trial_of(model)
    if why_wrong:
        raise UnsupportedError(why_wrong)
    if not specs:
        return None
    if max_bytes is None:
        entries = once_per_state(model, entries_seen)
        nbytes = sum(layers[i].pages.format.entry(entry).nbytes for i, entry in entries.items())
        max_bytes = max(round(nbytes * (format.max_pages or 0) * page_size), least_bytes(specs, page_size))
    return PoolStates(specs, page_size, interval, max_bytes, model.device)


def expect_interval(interval: int | None, page_size: int) -> int:
    """Tokens of the grid; ``None`` for 256, or the next multiple of the page size.

    Raises:
        ArgumentError: ``state_interval`` is no multiple of ``page_size``.
    """
    if interval is not None:
        expect_range("state_interval", interval, 1)
    return grid_interval(interval, page_size)


def least_bytes(specs: Mapping[int, Sequence[StateSpec]], page_size: int) -> int:
    """Least bytes of states if ``max_bytes`` is not given: those of eight texts."""
    return _LEAST * StatePages.nbytes_of(specs, page_size)
