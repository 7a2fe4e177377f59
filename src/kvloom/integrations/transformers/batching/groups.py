"""Groups of layers of a session: those that attend to all tokens, those of each window, residual windows.

Each has pages of its own. Requests hold in each the pages that their later tokens see, and release those that
a window has passed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from kvloom.caches import CacheFormat, Pages
from kvloom.caches.prefix_group import GroupTable, PrefixGroup
from kvloom.caches.states import StateSpec
from kvloom.caches.storage import Storage
from kvloom.integrations.transformers.batching.growing import GrowingPages
from kvloom.integrations.transformers.batching.sizes import page_bytes, specs_of, windows_of

STATES_SHARE: Final = 2
"""Bytes of pages for one of recurrent states that can be found."""

_COPIES: Final = 2
"""Copies of the recurrent states of all requests, while those that take part in steps change."""

_SHARE: Final = 32
"""Pages of codes for one of a residual window that is kept at the ends of requests."""


class SessionGroup(PrefixGroup):
    """The pages of the layers of one window, or of what they keep unquantized beside codes.

    Attributes:
        growing: How many pages there are.

    Args:
        pages: Empty.
        window: Tokens that a token sees, itself included; ``None`` for all.
        storages: Of each layer.
        max_pages: Pages that there can be.
    """

    def __init__(
        self, pages: Pages, window: int | None, storages: dict[int, Storage], max_pages: int
    ) -> None:
        super().__init__(pages, window)
        pages.storages.update(storages)
        self.growing = GrowingPages(pages, max_pages)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(storage.nbytes for storage in self.storages.values())

    def make_room(self, num_pages: int) -> None:
        """Allocate pages before those that can be found are given up."""
        self.growing.grow(num_pages)

    def extend(self, held: GroupTable, past: int, end: int) -> bool:
        """Have room for the tokens of a request from ``past`` to ``end``, if there is.

        Raises:
            MemoryError: there is no memory; nothing was taken.
        """
        self.release_passed(held, past)
        new = end - held.num_tokens
        if new <= 0 or held.fill(new):
            return True
        missing = self.num_missing(held, end)
        self.growing.grow(missing)
        if missing > self.growing.num_room:
            return False
        self.append(held, new)
        return True


def make_groups(
    config: Any,
    format: CacheFormat,
    dtype: torch.dtype,
    device: torch.device,
    limits: Sequence[int],
    policy: str,
) -> tuple[list[SessionGroup], list[SessionGroup]]:
    """The groups of a model.

    Args:
        config: Of the model.
        format: How tokens are kept.
        dtype: That the model computes in.
        device: Where.
        limits: Of each group the pages that there can be, in the order of ``group_windows``.
        policy: Which pages are given up first, in layers without a window.

    Returns:
        Groups of all layers, those without a window first; and of residual windows of the layers that keep
        codes, in the same order.
    """
    size, codes, residuals = format.page_size, list[SessionGroup](), list[SessionGroup]()
    by_layer, windows = windows_of(config), group_windows(config)
    exact = format.residual(size)
    limit = iter(limits)
    for window in windows:
        storages = {
            i: Storage(
                *specs_of(config, i, format, dtype),
                size,
                device,
                format.layout,
                smoothing=format.of_layer(i).smoothing,
            )
            for i, own in by_layer.items()
            if own == window
        }
        max_pages = next(limit)
        kept = replace(format, max_tokens=max_pages * size, recent=0)
        pages = Pages(kept, policy=policy if window is None else "lru")
        codes.append(SessionGroup(pages, window, storages, max_pages))
    for group in codes:
        storages = {
            i: Storage(*specs_of(config, i, exact, dtype), size, device, exact.layout)
            for i in group.storages
            if format.of_layer(i).recent
        }
        if storages:
            max_pages = next(limit)
            pages = Pages(replace(exact, max_tokens=max_pages * size))
            newest = format.residual_window(group.window)
            residuals.append(SessionGroup(pages, newest, storages, max_pages))
    return codes, residuals


def group_windows(config: Any) -> list[int | None]:
    """The window of each group of layers, ``None`` first."""
    return sorted(set(windows_of(config).values()), key=lambda window: window or 0)


class Limits:
    """How many pages each group of a session can have.

    Args:
        config: Of the model.
        format: How tokens are kept.
        dtype: That the model computes in.
        num_requests: Most requests in a step.
        max_batch_tokens: Most tokens in a step.
    """

    def __init__(
        self, config: Any, format: CacheFormat, dtype: torch.dtype, num_requests: int, max_batch_tokens: int
    ) -> None:
        size, layers = format.page_size, windows_of(config)
        self._windows, self._needed, self._bytes = group_windows(config), list[int](), list[int]()
        for window in self._windows:
            members = [i for i, own in layers.items() if own == window]
            self._bytes.append(page_bytes(config, format, dtype, members))
        self._num_codes = len(self._windows)
        for window in list(self._windows):
            members = [i for i, own in layers.items() if own == window and format.of_layer(i).recent]
            if members:
                self._windows.append(format.residual_window(window))
                self._bytes.append(page_bytes(config, format.residual(size), dtype, members))
        for window in self._windows:
            each = 0 if window is None else -(-window // size) + 2
            self._needed.append(num_requests * each + -(-max_batch_tokens // size))

    def pages(self, main: int) -> list[int]:
        """Of each group, where the first one has ``main`` pages."""
        codes = [min(main, needed + main // 4) for needed in self._needed[1 : self._num_codes]]
        return [main, *codes, *(min(main, x) + main // _SHARE for x in self._needed[self._num_codes :])]

    def nbytes(self, main: int) -> int:
        """Bytes of so many pages."""
        return sum(count * size for count, size in zip(self.pages(main), self._bytes, strict=True))

    def most(self, room: int) -> int:
        """The most pages of the first group with which all fit into ``room`` bytes; at least one."""
        low, high = 1, max(room // self._bytes[0], 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= room else (low, middle - 1)
        return low

    @property
    def residual_bytes(self) -> int:
        """Bytes that residual windows need of all requests at once."""
        first = self._num_codes
        return sum(n * size for n, size in zip(self._needed[first:], self._bytes[first:], strict=True))


def plan_pages(
    config: Any,
    format: CacheFormat,
    dtype: torch.dtype,
    room: int,
    num_requests: int,
    max_batch_tokens: int,
    specs: Sequence[StateSpec],
) -> tuple[int, int]:
    """The most pages of the first group that fit into ``room`` bytes with those of all others.

    Args:
        config: Of the model.
        format: How tokens are kept.
        dtype: That the model computes in.
        room: Bytes.
        num_requests: Most requests in a step.
        max_batch_tokens: Most tokens in a step.
        specs: Recurrent states of a request; none for models without.

    Returns:
        Pages, and how many requests there are in a step so that their residual windows and recurrent states
        have room in half of it.
    """
    while True:
        limits = Limits(config, format, dtype, num_requests, max_batch_tokens)
        states = num_requests * _COPIES * sum(x.nbytes for x in specs)
        if limits.residual_bytes + states <= room // 2 or num_requests == 1:
            room -= states
            return limits.most(room * STATES_SHARE // (STATES_SHARE + 1) if specs else room), num_requests
        num_requests //= 2
