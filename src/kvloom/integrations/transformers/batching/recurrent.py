"""Recurrent states of the requests of a session, and the calls of mixers that change them.

The new tokens of a step lie behind each other, which a mixer would take for one text. So it is called once
for all requests that have as many new tokens, with a row for each: once in a step in which each has one.

Shapes: T new tokens of a step, B requests of a call, N new tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.batching.held import Held, RequestStates
from kvloom.integrations.transformers.mixers import Inputs
from kvloom.integrations.transformers.rollback import empty_cache, keys_of
from kvloom.integrations.transformers.state_logs import State

_OF_STEP: Final = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "logits_indices",
    "logits_processor_args",
    "read_index",
    "write_index",
    "block_table",
    "is_causal",
)
"""Arguments with which transformers describes a step, and which are wrong for a part of it."""


class Feed(NamedTuple):
    """What a step feeds one request.

    Attributes:
        held: What the request holds.
        past: Tokens of which its states know.
        new: Tokens behind them.
    """

    held: Held
    past: int
    new: int


@dataclass(frozen=True)
class _Call:
    """Requests that a mixer is called for at once.

    Attributes:
        index: ``[B, N]``, where their tokens are among those of the step.
        cache: Their states.
    """

    index: Tensor
    cache: Cache


class MixerCalls:
    """The calls of mixers in one step.

    Args:
        layers: Of any cache for the model, whose kinds and numbers of states count.
        feeds: Of the requests, in the order of their tokens.
        device: Where the model is.

    Raises:
        StateError: the states of a request are not those behind its stored tokens.
    """

    def __init__(self, layers: Sequence[Any], feeds: Sequence[Feed], device: torch.device) -> None:
        by_size: dict[tuple[bool, int], list[tuple[int, Feed]]] = {}
        start = 0
        for feed in feeds:
            states = feed.held.states
            if (0 if states is None else states.num_tokens) != feed.past:
                raise StateError(
                    f"recurrent states must be those behind {feed.past} tokens, got "
                    f"{0 if states is None else states.num_tokens}"
                )
            by_size.setdefault((states is None, feed.new), []).append((start, feed))
            start += feed.new
        self._num_tokens, self._calls = start, list[_Call]()
        for (is_first, new), own in by_size.items():
            old = [feed.held.states for _, feed in own]
            cache = empty_cache(layers) if is_first else side_by_side([x for x in old if x is not None])
            for row, (_, feed) in enumerate(own):
                feed.held.states = RequestStates(cache, row, feed.past + feed.new)
            starts = torch.tensor([at for at, _ in own], device=device)
            self._calls.append(_Call(starts[:, None] + torch.arange(new, device=device), cache))
        self._order = torch.cat([call.index.flatten() for call in self._calls]).argsort()
        self._outputs = list[Any]()
        self._depth = 0  # of mixers that are called for the last requests

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call a mixer for all requests but the last ones.

        Returns:
            Its arguments for these; ``None`` for a mixer that another one calls, which has its own.

        Raises:
            StateError: it is given other tokens than those of the step.
            UnsupportedError: an argument cannot be cut.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        inputs = Inputs.of(module, args, kwargs).without(_OF_STEP)
        if inputs.num_tokens != self._num_tokens:
            raise StateError(
                f"{inputs.name} must be given the {self._num_tokens} tokens of the step, got "
                f"{inputs.num_tokens}"
            )
        self._outputs = []
        *first, last = self._calls
        for call in first:
            own, names = inputs.rows(call.index).given(call.cache)
            self._outputs.append(module(*own, **names))
        last.cache.recording = self  # so that the end of this call is seen
        return inputs.rows(last.index).given(last.cache)

    def after(self, output: Any) -> Any:
        """The output for all tokens of the step, where the last call returned this; ``None`` if it raised."""
        self._depth -= 1
        if self._depth:
            return None
        self._calls[-1].cache.recording = None
        if output is None:
            return None
        return self._joined([*self._outputs, output])

    def _joined(self, outputs: Sequence[Any]) -> Any:
        kind = type(outputs[0])
        if kind is tuple:
            return tuple(map(self._joined, zip(*outputs, strict=True)))
        if outputs[0] is None:
            return None
        if not isinstance(outputs[0], Tensor):
            raise UnsupportedError(f"a mixer must return tensors [B, N, ...], got {kind.__name__}")
        return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, self._order)[None]


def side_by_side(states: Sequence[RequestStates]) -> Cache:
    """States of B requests in one cache: the one that they are in, if they are all of it in this order."""
    first = states[0].cache
    is_all = all(x.cache is first and x.row == i for i, x in enumerate(states))
    if is_all and num_rows(first) == len(states):
        return first
    new = empty_cache(first.layers)
    for key in [*keys_of(first.layers)]:
        rows = [State.of(x.cache.layers[key.layer], key).tensor for x in states]
        own = [x[y.row] for x, y in zip(rows, states, strict=True) if x is not None]
        State(torch.stack(own), True).put(new.layers[key.layer], key)
    return new


def copied(states: RequestStates) -> RequestStates:
    """States of one request that no other request changes."""
    cache = empty_cache(states.cache.layers)
    for key in [*keys_of(states.cache.layers)]:
        tensor = State.of(states.cache.layers[key.layer], key).tensor
        if tensor is not None:
            own = State(tensor[states.row : states.row + 1], True).copied()
            own.put(cache.layers[key.layer], key)
    return states._replace(cache=cache, row=0)


def num_rows(cache: Cache) -> int:
    """Requests whose states are in a cache; 0 before any was computed."""
    tensors = (State.of(cache.layers[key.layer], key).tensor for key in keys_of(cache.layers))
    return next((len(x) for x in tensors if x is not None), 0)


def nbytes_of(held: Sequence[Held]) -> int:
    """Bytes of the states of requests, and of rows beside them that no request has any more."""
    caches = {id(x.states.cache): x.states.cache for x in held if x.states is not None}
    tensors = (
        State.of(cache.layers[key.layer], key).tensor
        for cache in caches.values()
        for key in keys_of(cache.layers)
    )
    return sum(x.nbytes for x in tensors if x is not None)


def expect_apart(held: Sequence[Held]) -> None:
    """Raise StateError if two requests have the same states."""
    places = [(id(x.states.cache), x.states.row) for x in held if x.states is not None]
    if len({*places}) < len(places):
        raise StateError("requests must have recurrent states of their own, got two with the same")
