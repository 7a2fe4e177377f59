"""Layers of one cache: the one place where their rows, lengths and forks change together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from kvloom.caches.layers.groups import Groups
from kvloom.caches.layers.layer import Layer
from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.rows.sequences import Sequences, reserving
from kvloom.errors import StateError
from kvloom.paging import whole


class Change(NamedTuple):
    """Steps of a change, in order.

    Attributes:
        layers: Changes of layers with memory of their own. One that raises leaves its layer unchanged.
        tables: Changes of page tables and of numbers of tokens, which cannot fail.
    """

    layers: list[Callable[[], Any]]
    tables: list[Callable[[], Any]]


class LayerSet:
    """All layers of a cache, whose rows and lengths change in each of them or in none.

    Layers in pages may share sequences; then rows and lengths are changed once for all of them.

    Args:
        layers: One layer of any kind for each attention layer of the model.

    Attributes:
        is_inconsistent: Whether a change of rows or lengths broke off between layers; call ``reset`` then.
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self.layers = list(layers)
        self.is_inconsistent = False
        self._groups = Groups()
        self._find_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_groups()  # files of earlier releases have none of residual windows

    @property
    def sequences(self) -> list[Sequences]:
        """Sequences of the layers in pages, one for each window and number of removed tokens.

        Those of residual windows follow, in the same order.
        """
        if self._groups.num_changes != self._num_changes:
            self._find_groups()
        return self._sequences

    @property
    def lengths(self) -> set[int]:
        """Numbers of tokens that layers in pages have seen, also in a forward that broke off."""
        return {x.num_positions + self._removed[x] for x in self.sequences}

    @property
    def num_removed(self) -> list[int]:
        """For each of ``sequences``, the number of tokens that its layers have seen and no longer hold."""
        return [self._removed[x] for x in self.sequences]

    @property
    def num_rows(self) -> int:
        """B; 0 before the first update."""
        return self.layers[0].size if self.layers else 0

    @property
    def num_pages_held(self) -> int:
        """Pages that hold tokens of this cache or its forks; a shared page counts once."""
        return sum(x.num_pages_held for x in self.sequences if x.is_required)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @contextmanager
    def reserving(self, layer: PagedLayer, rows: int, end: int) -> Iterator[None]:
        """Reserve pages for the first ``end`` tokens of ``layer`` in all layers, or in none.

        Raises:
            OutOfPages: as ``Sequences.reserve``; nothing was changed.
        """
        end += layer.num_removed
        with reserving({x: end - self._removed[x] for x in self.sequences}, rows):
            yield

    def change_of_rows(self, rows: Sequence[int]) -> Change:
        """Plan a change that replaces sequence i by sequence ``rows[i]``.

        Raises:
            StateError: layers cannot be changed now.
        """
        self.expect_consistent()
        self._find_groups()  # a caller may have replaced layers
        for layer in self.layers:
            layer.expect_settled()
        own = [layer for layer in self.layers if layer.sequences is None]
        return Change(
            [partial(layer.select, torch.tensor(rows)) for layer in own],
            [partial(sequences.select, rows) for sequences in self.sequences],
        )

    def change_of_length(
        self, keep: Callable[[int], int], longest: int, counts: Sequence[int] | None = None
    ) -> Change:
        """Plan a change that removes the last tokens.

        Args:
            keep: Function from a number of tokens to the number that remains.
            longest: Number of tokens of the longest layer, also in a forward that broke off.
            counts: Number of tokens that each row loses, if they differ; all layers are then in pages.

        Raises:
            StateError: layers cannot be changed now, or later tokens would see tokens that a window has
                evicted.
        """
        self.expect_consistent()
        self._find_groups()
        end_of_longest = keep(longest)
        # Each group keeps tokens of those that it would have if no forward had broken off.
        kept = {x: keep(longest - self._removed[x]) for x in self.sequences}
        most = max(kept.values(), default=0)
        layers, removals, shortenings = list[Any](), list[Any](), list[Any]()
        for layer in self.layers:
            layer.expect_settled()
            held = layer.num_tokens
            if isinstance(layer, PagedLayer):
                end = min(kept[layer.sequences], held)
                shortenings.append(partial(self._shorten, layer, most - kept[layer.sequences]))
            else:
                end = min(end_of_longest, held)
                layers.append(partial(layer.truncate, end))
            layer.expect_truncatable(end)
        for x in self.sequences:
            removed = [max(x.num_positions - kept[x], 0)] * x.size if counts is None else counts
            x.expect_removable(removed)
            removals.append(partial(x.remove, removed))
        return Change(layers, [*removals, *shortenings, self._find_groups])

    @whole
    def make(self, change: Change, others: Sequence[Callable[[], Any]] = ()) -> None:
        """Make a change of all layers.

        Args:
            change: The change, planned since the last other one.
            others: Changes of other states of the tokens, kept elsewhere. One that raises may be half made.
        """
        for i, step in enumerate((*change.layers, *others)):
            self.is_inconsistent = i > 0 or i >= len(change.layers)  # if this one raises
            step()
        for step in change.tables:
            step()
        self.is_inconsistent = False

    def forks(self) -> dict[Sequences, Sequences]:
        """Fork each of ``sequences``, for forks of the layers that share them."""
        self._find_groups()
        return {sequences: sequences.fork() for sequences in self.sequences}

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()
        self.regroup()

    def regroup(self) -> None:
        """Let layers share sequences again, after each of them was reset."""
        whole, numbers = [layer for layer in self._paged if layer.window is None], set[int]()
        residual: Sequences | None = None
        for layer in whole:
            first = whole[0].sequences
            if layer.sequences.format == first.format and layer.index not in numbers:
                layer.sequences = first
                residual = residual or layer.residual
                layer.residual = None if layer.residual is None else residual
                numbers.add(layer.index)
        self._find_groups()
        self.is_inconsistent = False

    def expect_consistent(self) -> None:
        """Raise StateError if a change of rows or lengths broke off between two layers."""
        if self.is_inconsistent:
            raise StateError("layers must have the same rows: a change of them broke off, reset the cache")

    def _find_groups(self) -> None:
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        for layer in self._paged:
            layer.groups = self._groups
        self._removed = {layer.sequences: layer.num_removed for layer in self._paged}
        # Groups of full attention first: they need the most pages, so a lack of pages shows at once.
        first = sorted(self._removed, key=lambda sequences: sequences.window is not None)
        beside = {layer.residual: layer for layer in self._paged if layer.residual is not None}
        self._removed |= {residual: layer.num_removed for residual, layer in beside.items()}
        self._sequences = [*first, *sorted(beside, key=lambda x: first.index(beside[x].sequences))]
        self._num_changes = self._groups.num_changes

    def _shorten(self, layer: PagedLayer, num_removed: int) -> None:
        """Set the numbers of tokens of a layer to those of its sequences."""
        layer.truncate(min(layer.num_tokens, layer.sequences.num_positions))
        layer.num_removed = num_removed
