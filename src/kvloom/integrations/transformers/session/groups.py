"""Groups of layers of a session: layers without a window, layers of each window, and residual windows.

Each group has its own pages. Requests hold the pages that their later tokens see, and release pages before
the window.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from kvloom.caches import CacheFormat, Pages
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.states import StateSpec
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
from kvloom.integrations.transformers.session.growing import GrowingPages
from kvloom.integrations.transformers.session.sizes import TokenLayers, page_bytes, specs_of

STATES_SHARE: Final = 2
"""Ratio of bytes of pages to bytes of recurrent states that can be found."""

_COPIES: Final = 2
"""Number of copies of the recurrent states of all requests, since a step may copy states into other rows."""

_SHARE: Final = 32
"""Ratio of pages of codes to pages of residual windows that are kept at the ends of requests."""


class SessionGroup(PrefixGroup):
    """The pages of the layers of one window, or of their residual windows.

    Attributes:
        growing: Growth of the pages.

    Args:
        pages: Empty pages.
        window: Tokens that a token sees, itself included; ``None`` for all.
        storages: Storage of each layer.
        max_pages: Largest number of pages.
    """

    def __init__(
        self, pages: Pages, window: int | None, storages: dict[int, Storage], max_pages: int
    ) -> None:
        super().__init__(pages, window)
        pages.storages.update(storages)
        self.growing = GrowingPages(pages, max_pages)

    def make_room(self, num_pages: int) -> None:
        """Allocate pages before findable pages are evicted."""
        self.growing.grow(num_pages)

    def extend(self, held: Row, past: int, end: int) -> bool:
        """Take pages for the tokens of a request from ``past`` to ``end``; false if there are too few.

        Raises:
            MemoryError: memory was refused; nothing was taken.
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
    layers: TokenLayers,
    format: CacheFormat,
    dtype: torch.dtype,
    device: torch.device,
    limits: Sequence[int],
    policy: str,
) -> tuple[list[SessionGroup], list[SessionGroup]]:
    """The groups of a model.

    Args:
        layers: Layers that keep keys and values, as ``token_layers_of``.
        format: Cache format of the tokens.
        dtype: Dtype that the model computes in.
        device: Device of the model.
        limits: Largest number of pages of each group, as ``Limits.pages``.
        policy: Which pages are evicted first, in layers without a window.

    Returns:
        Groups of all layers, those without a window first; and groups of the residual windows of layers that
        keep codes, in the same order.
    """
    size, codes, residuals = format.page_size, list[SessionGroup](), list[SessionGroup]()
    windows = group_windows(layers)
    exact = format.residual(size)
    limit = iter(limits)
    for window in windows:
        storages = {
            i: Storage(
                *specs_of(layers, i, format, dtype),
                size,
                device,
                format.layout,
                smoothing=format.of_layer(i).smoothing,
            )
            for i, own in layers.items()
            if own.window == window
        }
        max_pages = next(limit)
        kept = replace(format, max_tokens=max_pages * size, recent=0)
        pages = Pages(kept, policy=policy if window is None else "lru")
        codes.append(SessionGroup(pages, window, storages, max_pages))
    for group in codes:
        storages = {
            i: Storage(*specs_of(layers, i, exact, dtype), size, device, exact.layout)
            for i in group.storages
            if format.of_layer(i).recent
        }
        if storages:
            max_pages = next(limit)
            pages = Pages(replace(exact, max_tokens=max_pages * size))
            newest = format.residual_window(group.window)
            residuals.append(SessionGroup(pages, newest, storages, max_pages))
    return codes, residuals


def group_windows(layers: TokenLayers) -> list[int | None]:
    """The window of each group of layers, ``None`` first."""
    return sorted({x.window for x in layers.values()}, key=lambda window: window or 0)


class Limits:
    """Largest number of pages of each group of a session.

    Args:
        layers: Layers that keep keys and values, as ``token_layers_of``.
        format: Cache format of the tokens.
        dtype: Dtype that the model computes in.
        num_requests: Largest number of requests in a step.
        max_batch_tokens: Largest number of tokens in a step.
    """

    def __init__(
        self,
        layers: TokenLayers,
        format: CacheFormat,
        dtype: torch.dtype,
        num_requests: int,
        max_batch_tokens: int,
    ) -> None:
        size = format.page_size
        self._windows, self._needed, self._bytes = group_windows(layers), list[int](), list[int]()
        for window in self._windows:
            members = [i for i, own in layers.items() if own.window == window]
            self._bytes.append(page_bytes(layers, format, dtype, members))
        self._num_codes = len(self._windows)
        for window in list(self._windows):
            members = [i for i, own in layers.items() if own.window == window and format.of_layer(i).recent]
            if members:
                self._windows.append(format.residual_window(window))
                self._bytes.append(page_bytes(layers, format.residual(size), dtype, members))
        for window in self._windows:
            each = 0 if window is None else -(-window // size) + 2
            self._needed.append(num_requests * each + -(-max_batch_tokens // size))

    def pages(self, main: int) -> list[int]:
        """Number of pages of each group, if the first one has ``main`` pages."""
        codes = [min(main, needed + main // 4) for needed in self._needed[1 : self._num_codes]]
        return [main, *codes, *(min(main, x) + main // _SHARE for x in self._needed[self._num_codes :])]

    def nbytes(self, main: int) -> int:
        """Bytes of the pages of all groups, if the first one has ``main`` pages."""
        return sum(count * size for count, size in zip(self.pages(main), self._bytes, strict=True))

    def most(self, room: int) -> int:
        """Largest number of pages of the first group with which all fit into ``room`` bytes; at least one."""
        low, high = 1, max(room // self._bytes[0], 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= room else (low, middle - 1)
        return low

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residual windows of all requests of a step."""
        first = self._num_codes
        return sum(n * size for n, size in zip(self._needed[first:], self._bytes[first:], strict=True))


def plan_pages(
    layers: TokenLayers,
    format: CacheFormat,
    dtype: torch.dtype,
    room: int,
    num_requests: int,
    max_batch_tokens: int,
    specs: Sequence[StateSpec],
) -> tuple[int, int]:
    """Largest number of pages of the first group that fit into ``room`` bytes with those of all others.

    Args:
        layers: Layers that keep keys and values, as ``token_layers_of``.
        format: Cache format of the tokens.
        dtype: Dtype that the model computes in.
        room: Bytes for all pages and states.
        num_requests: Largest number of requests in a step.
        max_batch_tokens: Largest number of tokens in a step.
        specs: Specs of the recurrent states of a request; empty for models without states.

    Returns:
        The number of pages, and the number of requests in a step, reduced until their residual windows and
        recurrent states fit into half of ``room``.
    """
    while True:
        limits = Limits(layers, format, dtype, num_requests, max_batch_tokens)
        states = num_requests * _COPIES * sum(x.nbytes for x in specs)
        if limits.residual_bytes + states <= room // 2 or num_requests == 1:
            room -= states
            return limits.most(room * STATES_SHARE // (STATES_SHARE + 1) if specs else room), num_requests
        num_requests //= 2
