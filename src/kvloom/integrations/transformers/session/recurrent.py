"""Recurrent states of the requests of a session, and the calls of mixers that change them.

The new tokens of a step are packed in one row, which a mixer would take for one text. So it is called once
for all requests with the same number of new tokens, with one row for each request. A step with one token for
each request needs one call.

Shapes: T new tokens of a step, B requests of a call, N new tokens of each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.session.held import Held, RequestStates
from kvloom.integrations.transformers.states.logs import Key, State
from kvloom.integrations.transformers.states.mixers import Inputs
from kvloom.integrations.transformers.states.rollback import empty_layers, keys_of

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
"""Arguments by which transformers describes a whole step; they are wrong for a part of it."""


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


class StateRows(Cache):  # type: ignore[misc]
    """Cache with the states of B requests, a row for each.

    Attributes:
        touched: Keys of the states that a mixer read or wrote since it was cleared.
        recording: Object that records the calls of mixers with this cache; ``None`` for none.

    Args:
        layers: Layers of any cache for the model, with its kinds and numbers of states.
    """

    recording: Any = None

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers=empty_layers(layers))
        self.touched: set[Key] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Read a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "conv", state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Read a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "recurrent", state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Write a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "conv", state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx=state_idx, **kwargs)

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Write a state, and record it in ``touched``."""
        self.touched.add(Key(layer_idx, "recurrent", state_idx))
        return super().update_recurrent_state(states, layer_idx, state_idx=state_idx, **kwargs)

    @property
    def num_rows(self) -> int:
        """B; 0 before any state was computed."""
        return next((len(x) for x in self.tensors().values()), 0)

    def tensors(self) -> dict[Key, Tensor]:
        """All states ``[B, ...]``."""
        found = {key: State.of(self.layers[key.layer], key).tensor for key in keys_of(self.layers)}
        return {key: x for key, x in found.items() if x is not None}

    def copy_row(self, row: int, keys: Iterable[Key], other: Cache) -> None:
        """Copy some states of one request to another cache, as its only row."""
        tensors = self.tensors()
        for key in keys:
            if key in tensors:
                State(tensors[key][row : row + 1], True).copied().put(other.layers[key.layer], key)


@dataclass(frozen=True)
class _Call:
    """One call of a mixer for several requests, with some of their tokens.

    Attributes:
        index: ``[B, N]``, indices of these tokens among those of the step.
        cache: States of the requests.
        copies: Rows to be copied after these tokens, and the caches for the copies.
    """

    index: Tensor
    cache: StateRows
    copies: list[tuple[int, Cache]]


class MixerCalls:
    """The calls of mixers in one step.

    Args:
        layers: As in ``StateRows``.
        feeds: Tokens of the requests, in the order of the step.
        device: Device of the model.

    Raises:
        StateError: the states of a request are not those after its stored tokens.
    """

    def __init__(self, layers: Sequence[Any], feeds: Sequence[Feed], device: torch.device) -> None:
        alike: dict[tuple[bool, tuple[int, ...]], list[tuple[int, Feed]]] = {}
        start = 0
        for feed in feeds:
            states = feed.held.states
            if (0 if states is None else states.num_tokens) != feed.past:
                raise StateError(
                    f"recurrent states must be those after {feed.past} tokens, got "
                    f"{0 if states is None else states.num_tokens}"
                )
            alike.setdefault((states is None, feed.pieces), []).append((start, feed))
            start += feed.new
        self._num_tokens, self._calls = start, list[_Call]()
        for (is_first, pieces), own in alike.items():
            old = [feed.held.states for _, feed in own]
            cache = StateRows(layers) if is_first else side_by_side([x for x in old if x is not None])
            starts = torch.tensor([at for at, _ in own], device=device)
            done = 0
            for size in pieces:
                index = (starts + done)[:, None] + torch.arange(size, device=device)
                done += size
                copies = list[tuple[int, Cache]]()
                for row, (_, feed) in enumerate(own):
                    if feed.past + done in feed.held.wanted:
                        copies.append((row, StateRows(layers)))
                        feed.held.kept[feed.past + done] = copies[-1][1]
                self._calls.append(_Call(index, cache, copies))
            for row, (_, feed) in enumerate(own):
                feed.held.states = RequestStates(cache, row, feed.past + feed.new)
        self._order = torch.cat([call.index.flatten() for call in self._calls]).argsort()
        self._outputs = list[Any]()
        self._depth = 0  # number of nested mixers that run

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call a mixer for all requests except those of the last call.

        Returns:
            Its arguments for the last call; ``None`` for a mixer within another one, whose arguments stay.

        Raises:
            StateError: the mixer is given other tokens than those of the step.
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
            call.cache.touched.clear()
            own, names = inputs.rows(call.index).given(call.cache)
            self._outputs.append(module(*own, **names))
            self._keep(call)
        last.cache.touched.clear()
        last.cache.recording = self  # so that ``after`` is called
        return inputs.rows(last.index).given(last.cache)

    def after(self, output: Any) -> Any:
        """The output for all tokens of the step, given that of the last call; ``None`` if it raised."""
        self._depth -= 1
        if self._depth:
            return None
        last = self._calls[-1]
        last.cache.recording = None
        if output is None:
            return None
        self._keep(last)
        return self._joined([*self._outputs, output])

    def _keep(self, call: _Call) -> None:
        for row, copy in call.copies:
            call.cache.copy_row(row, call.cache.touched, copy)

    def _joined(self, outputs: Sequence[Any]) -> Any:
        kind = type(outputs[0])
        if kind is tuple:
            return tuple(map(self._joined, zip(*outputs, strict=True)))
        if outputs[0] is None:
            return None
        if not isinstance(outputs[0], Tensor):
            raise UnsupportedError(f"a mixer must return tensors [B, N, ...], got {kind.__name__}")
        return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, self._order)[None]


def side_by_side(states: Sequence[RequestStates]) -> StateRows:
    """One cache with the states of B requests; their present cache if it has exactly these rows in order."""
    first: StateRows = states[0].cache
    is_all = all(x.cache is first and x.row == i for i, x in enumerate(states))
    if is_all and first.num_rows == len(states):
        return first
    new, known = StateRows(first.layers), {id(x.cache): x.cache.tensors() for x in states}
    for key in known[id(first)]:
        rows = torch.stack([known[id(x.cache)][key][x.row] for x in states])
        State(rows, True).put(new.layers[key.layer], key)
    return new


def copied(states: RequestStates) -> RequestStates:
    """A copy of the states of one request in a cache of its own."""
    cache = StateRows(states.cache.layers)
    states.cache.copy_row(states.row, states.cache.tensors(), cache)
    return states._replace(cache=cache, row=0)


def nbytes_of(held: Sequence[Held]) -> int:
    """Bytes of the caches with the states of requests, including rows that are no longer used."""
    caches = {id(x.states.cache): x.states.cache for x in held if x.states is not None}
    return sum(x.nbytes for cache in caches.values() for x in cache.tensors().values())


def expect_apart(held: Sequence[Held]) -> None:
    """Raise StateError if two requests have the same states."""
    places = [(id(x.states.cache), x.states.row) for x in held if x.states is not None]
    if len({*places}) < len(places):
        raise StateError("requests must have recurrent states of their own, got two with the same")
