"""Groups of layers of a session: layers without a window, layers of each window, and residual windows.

Each group has its own pages. Requests hold the pages that their later tokens see, and release pages before
the window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from kvloom.caches import CacheFormat
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.states import StateSpec
from kvloom.core.entries import Entry
from kvloom.core.specs import dtype_name
from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.models.cache_argument import argument_of
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, layers_of
from kvloom.integrations.transformers.models.seen import entries_seen
from kvloom.integrations.transformers.session.requests.growing import GrowingPages

STATES_SHARE: Final = 2
"""Ratio of bytes of pages to bytes of recurrent states that can be found."""

_COPIES: Final = 2
"""Number of copies of the recurrent states of all requests, since a step may copy states into other rows."""

_SHARE: Final = 32
"""Ratio of pages of codes to pages of residual windows that are kept at the ends of requests."""

TokenLayers: TypeAlias = Mapping[int, LayerSpec]
"""Layers that keep keys and values of their own, with the entry of a token, by their numbers."""


def token_layers_of(model: Any) -> TokenLayers:
    """Layers of a model that keep keys and values, in the dtype of the model."""
    entries, dtype, found = once_per_state(model, entries_seen), dtype_name(model.dtype), {}
    for layer in layers_of(model):
        if (seen := entries.get(layer.number)) is not None:
            key, value = (replace(side or seen.key, dtype=dtype) for side in (seen.key, seen.value))
            found[layer.number] = replace(layer, entry=Entry(seen.heads, key, value))
    return found


def stateful_layers_of(model: Any) -> list[Any] | None:
    """Layers of an empty cache of transformers for a model; ``None`` if no layer has recurrent states.

    Raises:
        UnsupportedError: a layer has states, and the model does not take its cache as ``cache``.
    """
    layers = layers_of(model)
    if not any(x.states for x in layers):
        return None
    if (name := argument_of(model)) != "cache":
        raise UnsupportedError(
            "model must take its cache as `cache` where it has recurrent states, as those of transformers "
            f"5.24 do, got {type(model).__name__}, which takes `{name}`"
        )
    return [x.theirs for x in layers]


class GroupPlan(NamedTuple):
    """One group of layers, before it has pages.

    Attributes:
        window: Tokens that a token sees, itself included; ``None`` for all.
        format: Format of its tokens.
        entries: Unquantized entry of a token of each of its layers.
        num_needed: Number of pages that the requests of a step need for what they see and for new tokens.
    """

    window: int | None
    format: CacheFormat
    entries: dict[int, Entry]
    num_needed: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, scales included."""
        nbytes = (self.format.of_layer(i).entry(own).nbytes for i, own in self.entries.items())
        return self.format.page_size * sum(nbytes)

    def group(self, num_pages: int, policy: str, device: torch.device) -> PrefixGroup:
        """The group, with at most ``num_pages`` pages, of which ``policy`` evicts those without a window."""
        format = replace(self.format, max_tokens=num_pages * self.format.page_size)
        pages = GrowingPages(format, policy if self.window is None else "lru")
        for i, own in self.entries.items():
            dims = own.key.head_dim, (own.value or own.key).head_dim
            pages.add_layers([i], own.heads, dims, getattr(torch, own.key.dtype), device)
        return PrefixGroup(pages, self.window)


class Limits:
    """The groups of a session, and the largest number of pages of each.

    Args:
        layers: Layers that keep keys and values.
        format: Cache format of the tokens.
        num_requests: Largest number of requests in a step.
        max_batch_tokens: Largest number of tokens in a step.

    Attributes:
        layers, format, num_requests, max_batch_tokens: As above.
        codes: Groups of all layers, those without a window first.
        residuals: Groups of the residual windows of layers that keep codes, in the same order.
    """

    def __init__(
        self, layers: TokenLayers, format: CacheFormat, num_requests: int, max_batch_tokens: int
    ) -> None:
        self.layers, self.format = layers, format
        self.num_requests, self.max_batch_tokens, size = num_requests, max_batch_tokens, format.page_size
        self.codes, self.residuals = list[GroupPlan](), list[GroupPlan]()
        for window in sorted({x.window for x in layers.values()}, key=lambda x: x or 0):
            own = {i: x.entry for i, x in layers.items() if x.window == window and x.entry is not None}
            newest = {i: x for i, x in own.items() if format.of_layer(i).recent}
            kinds = (self.codes, window, replace(format, recent=0), own), (
                self.residuals, format.residual_window(window), format.residual(size), newest
            )  # fmt: skip
            for groups, seen, kept, entries in kinds:
                each = 0 if seen is None else -(-seen // size) + 2
                needed = num_requests * each + -(-max_batch_tokens // size)
                if entries:
                    groups.append(GroupPlan(seen, kept, entries, needed))
        self._groups = [*self.codes, *self.residuals]

    def pages(self, main: int) -> list[int]:
        """Number of pages of each group, if the first one has ``main`` pages."""
        codes = [min(main, x.num_needed + main // 4) for x in self.codes[1:]]
        return [main, *codes, *(min(main, x.num_needed) + main // _SHARE for x in self.residuals)]

    def groups(self, main: int, policy: str, device: torch.device) -> list[PrefixGroup]:
        """The groups, of which the first one has at most ``main`` pages."""
        every = zip(self._groups, self.pages(main), strict=True)
        return [plan.group(num_pages, policy, device) for plan, num_pages in every]

    def nbytes(self, main: int) -> int:
        """Bytes of the pages of all groups, if the first one has ``main`` pages."""
        return sum(x.page_bytes * count for x, count in zip(self._groups, self.pages(main), strict=True))

    def most(self, room: int) -> int:
        """Largest number of pages of the first group with which all fit into ``room`` bytes; at least one."""
        low, high = 1, max(room // self.codes[0].page_bytes, 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= room else (low, middle - 1)
        return low

    def fitted(self, room: int, specs: Sequence[StateSpec], num_drafted: int = 0) -> "tuple[Limits, int]":
        """Limits for ``room`` bytes, and the largest number of pages of the first group that fits with all.

        Args:
            room: Bytes for all pages and states.
            specs: Specs of the recurrent states of a request; empty for models without states.
            num_drafted: Number of drafted tokens of a step for whose states there is room; at least one for
                each request if it is above 0.

        Returns:
            These limits, with fewer requests in a step if their residual windows and recurrent states need
            more than half of ``room``; and the number of pages.
        """
        num_states = self.num_requests * _COPIES + (num_drafted and max(num_drafted, self.num_requests))
        states = num_states * sum(x.nbytes for x in specs)
        if self.residual_bytes + states > room // 2 and self.num_requests > 1:
            fewer = Limits(self.layers, self.format, self.num_requests // 2, self.max_batch_tokens)
            return fewer.fitted(room, specs, num_drafted)
        room -= states
        return self, self.most(room * STATES_SHARE // (STATES_SHARE + 1) if specs else room)

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residual windows of all requests of a step."""
        return sum(x.num_needed * x.page_bytes for x in self.residuals)


def page_bytes(layers: TokenLayers, format: CacheFormat) -> int:
    """Bytes of a page in all layers, scales included."""
    return sum(x.page_bytes for x in Limits(layers, format, 0, 0).codes)
