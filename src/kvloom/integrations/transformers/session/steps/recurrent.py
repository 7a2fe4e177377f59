"""The calls of mixers in a step of a session, which change the recurrent states of its requests.

The new tokens of a step are packed in one row, which a mixer would take for one text. So it is called once
for all requests with the same number of new tokens, with one row for each request. A step with one token for
each request needs one call.

Shapes: T new tokens of a step, B requests of a call, N new tokens of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.session.requests.held import Held
from kvloom.integrations.transformers.session.requests.state_rows import (
    RequestStates,
    StateRows,
    side_by_side,
)
from kvloom.integrations.transformers.states.mixers import Inputs

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
