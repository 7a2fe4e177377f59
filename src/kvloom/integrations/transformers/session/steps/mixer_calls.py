"""Which calls of mixers a step needs, with the states of which requests.

Shapes: B requests of a call, N new tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.requests.held import Held
from kvloom.integrations.transformers.session.requests.state_rows import (
    RequestStates,
    StateRows,
    side_by_side,
)


class Feed(NamedTuple):
    """Tokens of one request in a step.

    Attributes:
        held: ``Held`` of the request.
        past: Number of tokens that its states include.
        new: Number of new tokens.
    """

    held: Held
    past: int
    new: int

    @property
    def pieces(self) -> tuple[int, ...]:
        """Lengths of the pieces of new tokens, which end where copies of the states are wanted."""
        end = self.past + self.new
        ends = [self.past, *sorted(x for x in self.held.wanted if self.past < x < end), end]
        return tuple(b - a for a, b in pairwise(ends))

    @property
    def is_growing(self) -> bool:
        """Whether new tokens are behind the text with which the request began: the newest, and a draft."""
        return self.past >= len(self.held.prompt.text)


@dataclass(frozen=True)
class MixerCall:
    """One call of a mixer for several requests, with some of their tokens.

    Attributes:
        index: ``[B, N]``, indices of these tokens among those of the step.
        cache: States of the requests.
        copies: Rows to be copied after these tokens, and the caches for the copies.
    """

    index: Tensor
    cache: StateRows
    copies: list[tuple[Sequence[int], StateRows]]


def calls_alike(layers: Sequence[Any], feeds: Sequence[Feed], device: torch.device) -> list[MixerCall]:
    """One call for each piece of all requests whose pieces are alike; bits may depend on their number.

    Args:
        layers: As in ``StateRows``.
        feeds: Tokens of the requests, in the order of the step.
        device: Device of the model.
    """
    alike: dict[tuple[bool, tuple[int, ...]], list[tuple[int, Feed]]] = {}
    for start, feed in _placed(feeds):
        alike.setdefault((feed.held.states is None, feed.pieces), []).append((start, feed))
    calls = list[MixerCall]()
    for (_, pieces), own in alike.items():
        calls += _calls_of(layers, own, pieces, device)
    return calls


def calls_cut(
    layers: Sequence[Any], feeds: Sequence[Feed], device: torch.device, cuts: Cuts
) -> list[MixerCall]:
    """Calls by which the bits of a request depend on its own text alone.

    A mixer gives a row of one token the same bits among any rows, and a row of several tokens when it is
    alone. So the newest tokens of all requests are one call, as are their first drafted tokens, and so on;
    each piece of a prompt is a call of its own. States behind all but the last of such tokens are passed.

    Args:
        layers, feeds, device: As in ``calls_alike``.
        cuts: Where texts are cut.
    """
    calls, growing = list[MixerCall](), list[tuple[int, Feed]]()
    for start, feed in _placed(feeds):
        if feed.is_growing:
            growing.append((start, feed))
        else:
            pieces = cuts.pieces(feed.held.prompt.num_asked, feed.past, feed.new)
            calls += _calls_of(layers, [(start, feed)], pieces, device)
    cache = (
        side_by_side([x.held.states for _, x in growing if x.held.states is not None]) if growing else None
    )
    depth = 0
    while cache is not None:
        index = torch.tensor([[start + depth] for start, _ in growing], device=device)
        depth += 1
        others = [row for row, (_, feed) in enumerate(growing) if feed.new > depth]
        for row, (_, feed) in enumerate(growing):
            states = RequestStates(cache, row, feed.past + depth)
            if feed.new > depth:
                feed.held.passed[feed.past + depth] = states
            else:
                feed.held.states = states
        behind = StateRows(cache.layers) if others else None
        calls.append(MixerCall(index, cache, [] if behind is None else [(others, behind)]))
        growing, cache = [growing[row] for row in others], behind
    return calls


def _placed(feeds: Sequence[Feed]) -> list[tuple[int, Feed]]:
    """Feeds, each with the index of its first token among those of the step."""
    placed, start = list[tuple[int, Feed]](), 0
    for feed in feeds:
        placed.append((start, feed))
        start += feed.new
    return placed


def _calls_of(
    layers: Sequence[Any], own: Sequence[tuple[int, Feed]], pieces: Sequence[int], device: torch.device
) -> list[MixerCall]:
    """Calls for each piece of requests with the same pieces, with copies of the states that are wanted."""
    old = [feed.held.states for _, feed in own]
    cache = StateRows(layers) if old[0] is None else side_by_side([x for x in old if x is not None])
    starts, done, calls = torch.tensor([at for at, _ in own], device=device), 0, list[MixerCall]()
    for size in pieces:
        index = (starts + done)[:, None] + torch.arange(size, device=device)
        done += size
        copies = list[tuple[Sequence[int], StateRows]]()
        for row, (_, feed) in enumerate(own):
            if feed.past + done in feed.held.wanted:
                copies.append(([row], StateRows(layers)))
                feed.held.kept[feed.past + done] = copies[-1][1]
        calls.append(MixerCall(index, cache, copies))
    for row, (_, feed) in enumerate(own):
        feed.held.states = RequestStates(cache, row, feed.past + feed.new)
    return calls
