"""Recurrent states in pages: copies of layers' states, found by the tokens that lead to them.

A page has the states of all layers after one text, whose length is a multiple of the page size. In the prefix
tree it is the last page of that text, so tree, pool and store treat it as any other. It keeps float32, which
holds states of each supported dtype exactly.

Shapes: B texts, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.row import Row
from kvloom.caches.tensors.storage import Storage
from kvloom.errors import ArgumentError, OutOfPages, UnsupportedError
from kvloom.paging import PageRef

_KEPT: Final = torch.float32
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class StateSpec(NamedTuple):
    """One of the states of a layer.

    Attributes:
        name: Name of the state, such as ``"conv"``.
        number: Number among the states with that name.
        shape: Shape for one text.
        dtype: Dtype that float32 holds exactly.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes for one text."""
        return prod(self.shape) * self.dtype.itemsize


class StatePages:
    """The pages of recurrent states, and the tree that finds them.

    Args:
        specs: States of each layer, by its number.
        page_size: S; states are kept after texts whose length is a multiple of it.
        max_bytes: Maximum bytes of all pages.
        device: Device of the pages.

    Raises:
        ArgumentError: ``max_state_bytes``, as callers name it, is less than the states of one text.
        UnsupportedError: states are of another dtype than float32, bfloat16 and float16.
    """

    def __init__(
        self,
        specs: Mapping[int, Sequence[StateSpec]],
        page_size: int,
        max_bytes: int,
        device: torch.device,
    ) -> None:
        self.specs = {layer: tuple(own) for layer, own in sorted(specs.items())}
        others = {x.dtype for own in self.specs.values() for x in own if x.dtype not in _DTYPES}
        if others:
            raise UnsupportedError(f"recurrent states must be of one of {_DTYPES}, got {others}")
        self._device = device
        least = self.nbytes_of(specs, page_size)
        if max_bytes < least:
            raise ArgumentError(
                f"max_state_bytes must be at least {least} for the states after one text, got {max_bytes}"
            )
        max_tokens = max_bytes // least * page_size
        format = CacheFormat(_KEPT, None, page_size, max_tokens, layout="NHD")
        self.group = PrefixGroup(Pages(format, is_kept=True), 0)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle no states: the caches that found them save them."""
        return {"specs": self.specs, "_device": self._device, "pages": self.group.pages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pages = state.pop("pages")
        self.__dict__.update(state)
        pages.keep()
        self.group = PrefixGroup(pages, 0)

    @staticmethod
    def nbytes_of(specs: Mapping[int, Sequence[StateSpec]], page_size: int) -> int:
        """Bytes of one page for these states."""
        return sum(_width(own, page_size) for own in specs.values()) * page_size * _KEPT.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one page."""
        return self.nbytes_of(self.specs, self.page_size)

    @property
    def page_size(self) -> int:
        """S."""
        return self.group.pages.format.page_size

    def new_storages(self) -> dict[int, Storage]:
        """Make an empty storage for each layer's states."""
        format, heads = self.group.pages.format, 1
        return {
            layer: Storage(
                format.spec(heads, _width(own, self.page_size), _KEPT),
                None,
                self.page_size,
                self._device,
                format.layout,
            )
            for layer, own in self.specs.items()
        }

    def write(
        self, states: Mapping[int, Sequence[Tensor]], row: int, tokens: Sequence[int], scope: str
    ) -> Row | None:
        """Let others find the states of a text.

        Args:
            states: States of each layer, ``[B, ...]`` in the order of its specs.
            row: Number of the text among the B.
            tokens: Token ids of the text, a multiple of S.
            scope: Key of the text in the tree.

        Returns:
            The page, held by the caller; ``None`` if every page is held by others.
        """
        pages, tree = self.group.pages, self.group.tree
        held = self.group.new_table()
        held.first = len(tokens) // self.page_size - 1
        known = tree.pages_from(tokens, scope, held.first)
        if known:
            pages.pool.retain(known[0])
            held.table.adopt(known)
            return held
        self._allocate()
        try:
            self.group.append(held, self.page_size)
        except OutOfPages:
            return None
        try:
            self._write(states, row, held.table.pages[0])
        except BaseException:
            held.table.release()
            raise
        held.table.claim()
        held.replace(tree.insert(tokens, held.table.pages, scope, held.first))
        return held

    def _write(self, states: Mapping[int, Sequence[Tensor]], row: int, page: PageRef) -> None:
        pages = self.group.pages
        for layer, storage in pages.storages.items():
            flat = torch.cat([x[row].to(_KEPT).reshape(-1) for x in states[layer]])
            width = storage.sizes["Dk"]
            padded = flat.new_zeros(self.page_size * width)
            padded[: len(flat)] = flat
            new = padded.view(self.page_size, 1, width)
            storage.store(new, new[..., :0], pages.slots([page.id], storage).to(storage.device))
        pages.num_writes += 1

    def read(self, held: Sequence[Row]) -> dict[int, list[Tensor]]:
        """Copy the states of each layer, ``[B, ...]`` in their dtypes, from the last page of B tables."""
        pages, found = self.group.pages, dict[int, list[Tensor]]()
        ids = [own.table.pages[-1].id for own in held]
        for layer, storage in pages.storages.items():
            slots = pages.slots(ids, storage).to(storage.device)
            flat = ops.load(slots, storage.view)[0].reshape(len(ids), -1)
            states, at = list[Tensor](), 0
            for spec in self.specs[layer]:
                count = prod(spec.shape)
                x = flat[:, at : at + count].reshape(len(ids), *spec.shape)
                states.append(x.to(spec.dtype, copy=True))
                at += count
            found[layer] = states
        return found

    def _allocate(self) -> None:
        pages = self.group.pages
        if not pages.storages:
            for layer, storage in self.new_storages().items():
                pages.storages[layer] = storage
                pages.fit(storage)


def _width(specs: Sequence[StateSpec], page_size: int) -> int:
    """Number of elements of a layer's states in one of the S slots of a page."""
    return -(-sum(prod(x.shape) for x in specs) // page_size)
