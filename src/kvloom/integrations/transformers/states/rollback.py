"""Rollback of recurrent states: a cache records the calls that change them, and restores earlier states.

Shapes: B rows.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.models.layer_specs import DummyLayer, StatefulLayer, TheirStatefulLayer
from kvloom.integrations.transformers.states.logs import Call, Key, Log, State, States
from kvloom.integrations.transformers.states.mixers import Inputs, cache_in, joined, state_of

RECORDED: Final = 128
"""Number of tokens of which drafts may consist if transformers asks for a record of the past."""
_PIECE: Final = 256
"""Long steps are cut at multiples of this, since kernels cut texts into chunks of 16 to 256 tokens."""


class Past(NamedTuple):
    """Earlier states, and the logs that end at them; ``None`` if rows went back by different numbers."""

    states: States
    logs: dict[Key, Log] | None


class Rollback:
    """Record of a cache's recurrent states that lets it remove tokens.

    Attributes:
        num_tokens: Number of last tokens that can always be removed.
        cuts_steps: Whether a long step is fed to mixers in two calls, so that only the arguments of its last
            tokens are kept. Only for models that continue correctly from their states.
        refusal: Why no crop is possible, because an unseen call changed states; empty if it is possible.

    Args:
        num_tokens: As above.
        position: Number of tokens in the cache.
        cuts_steps: As above.
    """

    def __init__(self, num_tokens: int, position: int, cuts_steps: bool = False) -> None:
        self.num_tokens, self.cuts_steps = num_tokens, cuts_steps
        self.restart(position)

    def __reduce__(self) -> Any:
        """Reduce for saving, without the record."""
        return type(self), (self.num_tokens, self.end, self.cuts_steps)

    def restart(self, position: int) -> None:
        """Forget the record, for a cache that holds ``position`` tokens."""
        self._position = position
        self._logs: dict[Key, Log] = {}
        self.refusal = ""
        self._depth = 0  # number of nested mixers that run
        self._call: Call | None = None  # the outermost call that runs
        self._log: Log | None = None  # log of this call, set when it first reads a state
        self._num_skipped = 0
        self._first: Any = None  # the output of the tokens that were skipped

    def fork(self) -> "Rollback":
        """A copy for another cache of the same tokens."""
        other = Rollback(self.num_tokens, self._position, self.cuts_steps)
        other.refusal = self.refusal
        other._logs = {key: replace(x, keys={*x.keys}, entries=[*x.entries]) for key, x in self._logs.items()}
        return other

    @property
    def end(self) -> int:
        """Number of tokens that the states include."""
        return max((log.end for log in self._logs.values()), default=self._position)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(log.nbytes for log in self._logs.values())

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record a call of a mixer, and first call it with the first tokens of a long step.

        Returns:
            Arguments of the remaining tokens; ``None`` if the step was not cut.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        self._num_skipped, self._first, self._log = 0, None, None
        try:
            inputs, given = Inputs.of(module, args, kwargs), None
        except UnsupportedError as error:
            self.refusal = str(error)
            return None
        first = (inputs.num_tokens - self.num_tokens) // _PIECE * _PIECE
        if self.cuts_steps and first > 0 and (pieces := inputs.pieces(first)) is not None:
            cache = cache_in(args, kwargs)
            own, names = pieces[0].given(cache)
            self._first = module(*own, **names)
            self._num_skipped, inputs = first, pieces[1]
            given = inputs.given(cache)
        is_chosen = torch.amp.is_autocast_available(inputs.device) and torch.is_autocast_enabled(
            inputs.device
        )
        autocast = torch.get_autocast_dtype(inputs.device) if is_chosen else None
        self._call = Call(weakref.ref(module), 0, inputs.copied(), autocast, state_of(module), None)
        return given

    def after(self, output: Any) -> Any:
        """Record the end of a call; returns the output of the whole step, ``None`` if that is ``output``."""
        self._depth -= 1
        if self._depth:
            return None
        call, first, self._call, self._first = self._call, self._first, None, None
        if call is None or first is None or output is None:
            return None
        return joined(call.inputs.name, first, output)

    def touch(self, layer: Any, key: Key) -> None:
        """Record that a state of a layer is read, and may be changed then."""
        if self._call is None:
            if not self._depth:
                self.refusal = _unseen(key)
            return
        if self._log is None:
            self._log = self._logs.setdefault(key, Log(self._position))
            if self._num_skipped:
                self._log.skip(self._num_skipped)
            self._call = self._log.begin(self._call, self.num_tokens)
        log, base = self._log, self._call.base
        if key not in log.keys and len(log.entries) > 1:
            self.refusal = f"{key.kind} state {key.number} of layer {key.layer} is not changed by every step"
        log.keys.add(key)
        if base is not None and key not in base:
            base[key] = State.of(layer, key).copied()

    def select(self, rows: Sequence[int]) -> None:
        """Record that row i was replaced by row ``rows[i]``."""
        for log in self._logs.values():
            if log.entries:
                log.entries.append(torch.tensor(rows))

    def past(self, layers: Sequence[Any], ends: Sequence[int]) -> Past:
        """The states of the first ``ends[b]`` tokens of each row; nothing is changed.

        Raises:
            StateError: no states are kept from which they can be computed.
            UnsupportedError: an unseen call changed them, or a call cannot be repeated with fewer tokens.
        """
        self._expect_known(layers)
        cut = {end: {key: log.until(end) for key, log in self._logs.items()} for end in set(ends)}
        by_end = {end: self._states(layers, end) for end in cut}
        if len(by_end) == 1:
            [end] = by_end
            return Past(by_end[end], cut[end])
        keys = {key for log in self._logs.values() for key in log.keys}
        return Past({key: _joined([by_end[end][key] for end in ends]) for key in keys}, None)

    def return_to(self, layers: Sequence[Any], past: Past, position: int) -> None:
        """Restore earlier states in layers, for a cache that then holds ``position`` tokens."""
        for key, state in past.states.items():
            state.put(layers[key.layer], key)
        self.restart(position)
        self._logs = past.logs or {}

    def _states(self, layers: Sequence[Any], end: int) -> States:
        cache = Cache(layers=empty_layers(layers))
        with torch.no_grad():
            for log in self._logs.values():
                log.compute(end, cache)
        keys = [key for log in self._logs.values() for key in log.keys]
        return {key: State.of(cache.layers[key.layer], key) for key in keys}

    def _expect_known(self, layers: Sequence[Any]) -> None:
        if not self._logs and not self.refusal:
            raise StateError(
                f"at least {self._position} tokens must stay, before which no recurrent states are kept"
            )
        known = {key for log in self._logs.values() for key in log.keys}
        unknown = next((key for key in keys_of(layers) if key not in known), None)
        if refusal := self.refusal or (unknown and _unseen(unknown)):
            raise UnsupportedError(f"recurrent states cannot go back: {refusal}")


def _unseen(key: Key) -> str:
    return f"{key.kind} state {key.number} of layer {key.layer} was changed by no mixer that is known"


def keys_of(layers: Sequence[Any]) -> Iterator[Key]:
    """Keys of all states that layers have."""
    for i, layer in enumerate(layers):
        for kind in ("conv", "recurrent") if isinstance(layer, StatefulLayer) else ():
            for number, x in getattr(layer, f"{kind}_states").items():
                if x is not None and layer.has_previous_state[number]:
                    yield Key(i, kind, number)


def _joined(states: Sequence[State]) -> State:
    """State whose row b is that of ``states[b]``; a row without tokens has zeros."""
    some = next((x.tensor for x in states if x.tensor is not None), None)
    if some is None:
        return states[0]
    rows = [some.new_zeros(some.shape[1:]) if x.tensor is None else x.tensor[b] for b, x in enumerate(states)]
    return State(torch.stack(rows), True)


def empty_layers(layers: Sequence[Any]) -> list[Any]:
    """Empty layers of the same kinds, for a cache of states alone."""
    dummy, stateful = cast(Any, DummyLayer), cast(Any, TheirStatefulLayer)
    own = []
    for layer in layers:
        own.append(dummy())
        if isinstance(layer, cast(Any, StatefulLayer)):
            own[-1] = stateful(number_of_states=layer.number_of_states)
            own[-1].conv_kernel_size = {**layer.conv_kernel_size}
            own[-1].device, own[-1].dtype = layer.device, layer.dtype
    return own
