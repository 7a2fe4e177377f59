"""Logs of recurrent states: copies of them, and the calls of mixers that changed them since.

A recurrent state cannot be computed backwards. So a copy of it is kept, with the arguments of the calls that
changed it since. To remove the last tokens, the calls of the remaining tokens are repeated on the copy. A
whole step that is repeated from the same states gives the same bits.

Shapes: B rows.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.states.mixers import Inputs, state_of


class Key(NamedTuple):
    """Identifier of a state; ``kind`` is ``"conv"`` or ``"recurrent"``."""

    layer: int
    kind: str
    number: int


class State(NamedTuple):
    """A state ``[B, ...]``; ``None`` before the first token."""

    tensor: Tensor | None
    has_previous: bool

    @classmethod
    def of(cls, layer: Any, key: Key) -> "State":
        """The state of a layer, not copied."""
        has_previous = layer.has_previous_state[key.number]
        return cls(getattr(layer, f"{key.kind}_states")[key.number] if has_previous else None, has_previous)

    def put(self, layer: Any, key: Key) -> None:
        """Set it as the state of a layer, not copied."""
        getattr(layer, f"{key.kind}_states")[key.number] = self.tensor
        getattr(layer, f"is_{key.kind}_states_initialized")[key.number] = self.tensor is not None
        layer.has_previous_state[key.number] = self.has_previous

    def copied(self) -> "State":
        """A copy of the state."""
        return self._replace(tensor=None if self.tensor is None else self.tensor.detach().clone())

    def selected(self, rows: Tensor) -> "State":
        """The state with the selected rows."""
        x = self.tensor
        return self if x is None else self._replace(tensor=x.index_select(0, rows.to(x.device)))


States: TypeAlias = dict[Key, State]


@dataclass(frozen=True)
class Call:
    """A call of a mixer.

    Attributes:
        module: The mixer.
        start: Position of the first token.
        inputs: Its arguments.
        autocast: Dtype of torch's autocast; ``None`` without autocast.
        state: State name of the mixer, as ``mixers.state_of``.
        base: Copies of the states before the call, made when it reads them; ``None`` if none are kept.
    """

    module: "weakref.ref[nn.Module]"
    start: int
    inputs: Inputs
    autocast: torch.dtype | None
    state: str
    base: States | None

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.inputs.num_tokens

    def until(self, end: int) -> "Call":
        """The call cut to its tokens before ``end``."""
        return self if self.end <= end else replace(self, inputs=self.inputs.cut(0, end - self.start))

    def again(self, cache: Cache) -> None:
        """Repeat the call on the states of another cache."""
        module, device = self.module(), self.inputs.device
        if module is None:
            raise UnsupportedError(f"the model whose {self.inputs.name} changed a recurrent state is gone")
        is_chosen = torch.amp.is_autocast_available(device)
        with torch.autocast(device, self.autocast, self.autocast is not None) if is_chosen else nullcontext():
            if state_of(module, quick=False) != self.state:
                raise UnsupportedError(
                    f"recurrent states cannot go back: the weights, adapters, hooks or attributes of "
                    f"{self.inputs.name} are others than when it changed them, or torch's settings are"
                )
            args, kwargs = self.inputs.given(cache)
            module(*args, **kwargs)


@dataclass
class Log:
    """Log of the calls that changed the states of one mixer, oldest first, and of selected rows.

    Attributes:
        end: Position after the last call.
        keys: Keys of the states.
        entries: Calls, and row numbers ``[B]`` of selections. The first entry is a call with a base.
    """

    end: int
    keys: set[Key] = field(default_factory=set)
    entries: list[Call | Tensor] = field(default_factory=list)

    def begin(self, call: Call, num_tokens: int) -> Call:
        """Record a call that begins, and drop calls that no crop of ``num_tokens`` tokens needs.

        Returns:
            The call with its position, and with an empty base if its states are to be copied.
        """
        passed = self.end - num_tokens
        old = [i for i, start in self._bases() if start <= passed]
        del self.entries[: old[-1] if old else 0]
        bases = self._bases()
        has_base = call.inputs.num_tokens > 1 or not bases or bases[-1][1] <= passed
        if has_base and len(bases) > 1 and bases[-2][1] > passed:  # the base before it suffices
            index = bases[-1][0]
            self.entries[index] = replace(self._call(index), base=None)
        call = replace(call, start=self.end, base={} if has_base else None)
        self.entries.append(call)
        self.end = call.end
        return call

    def skip(self, num_tokens: int) -> None:
        """Record tokens that cannot be removed any more."""
        self.entries.clear()
        self.end += num_tokens

    def until(self, end: int) -> "Log":
        """The log cut to the tokens before ``end``.

        Raises:
            StateError: ``end`` is before the first kept state, or after the last recorded call.
            UnsupportedError: an argument of a call cannot be cut.
        """
        least = self._call(0).start if self.entries else self.end
        if end < least:
            raise StateError(
                f"at least {least} tokens must stay, before which no recurrent states are kept, got {end}"
            )
        if end > self.end:
            raise StateError(
                f"a forward broke off after {self.end} tokens: at most those can stay, got {end}"
            )
        calls = [x for x in self.entries if isinstance(x, Tensor) or x.start < end]
        is_empty = end == least  # the next call has a base
        entries = [] if is_empty else [x if isinstance(x, Tensor) else x.until(end) for x in calls]
        return Log(end, {*self.keys}, entries)

    def compute(self, end: int, cache: Cache) -> None:
        """Compute the states after the tokens before ``end`` in another cache."""
        first = max(i for i, start in self._bases() if start <= end)
        for key, state in (self._call(first).base or {}).items():
            state.copied().put(cache.layers[key.layer], key)
        for x in self.entries[first:]:
            if isinstance(x, Call) and x.start < end:
                x.until(end).again(cache)
            elif isinstance(x, Tensor):
                for key in self.keys:
                    State.of(cache.layers[key.layer], key).selected(x).put(cache.layers[key.layer], key)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        calls = [x for x in self.entries if isinstance(x, Call)]
        states = [x.tensor for call in calls for x in (call.base or {}).values() if x.tensor is not None]
        return sum(x.inputs.nbytes for x in calls) + sum(x.nbytes for x in states)

    def _bases(self) -> list[tuple[int, int]]:
        """Indices and starts of the calls that have a base."""
        calls = [(i, x) for i, x in enumerate(self.entries) if isinstance(x, Call)]
        return [(i, x.start) for i, x in calls if x.base is not None]

    def _call(self, index: int) -> Call:
        return cast(Call, self.entries[index])
