"""A cache with recurrent states, which are rolled back by calls of their layers, if these are recorded."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvloom.core.checks import expect_range
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.cache.layers import KVCacheLayer, expect_thawed
from kvloom.integrations.transformers.cache.lengths import lengths_of
from kvloom.integrations.transformers.cache.pairs import PairGuard
from kvloom.integrations.transformers.models.remembered import Remembered
from kvloom.integrations.transformers.states.logs import Key
from kvloom.integrations.transformers.states.rollback import RECORDED, Past, Rollback
from kvloom.integrations.transformers.states.specs import stateful_layers

_Cache = TypeVar("_Cache", bound="StatefulCache")


class StatefulCache(DynamicCache):  # type: ignore[misc]
    """Recurrent states of a ``KVCache``, if its layers have any.

    Attributes:
        is_frozen: Whether changes raise.
        pair_guard: Refuses the cache where a model needs a pair of caches.
        remembered: What the model remembers of the text outside of the cache.
    """

    layers: list[Any]

    def __init__(self, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self._own_layers = [layer for layer in self.layers if isinstance(layer, KVCacheLayer)]
        self._stateful = stateful_layers(self.layers)
        self.is_frozen = False
        self.pair_guard = PairGuard()
        self.remembered = Remembered()
        self._rollback: Rollback | None = None
        self._kin: object = object()  # shared with its forks only
        self._begun = set[int]()  # layers whose states were asked for or changed in the last forward
        self._length_before = 0  # number of tokens when it began
        self._is_watched = False  # whether the model said when it began

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load what was saved; of earlier releases without a guard, and what a model remembers."""
        self.__dict__.update({"pair_guard": PairGuard(), "remembered": Remembered()} | state)
        self._stateful = stateful_layers(self.layers)

    def fork(self: _Cache) -> _Cache:  # noqa: PYI019 (not in Python 3.10)
        """A cache of the same tokens and states, not frozen; the two are independent."""
        fork = type(self)(self._forked_layers())
        fork._kin, fork.pair_guard = self._kin, self.pair_guard
        fork.remembered = self.remembered.fork()
        fork._rollback = None if self._rollback is None else self._rollback.fork()
        fork._begun, fork._length_before = {*self._begun}, self._length_before
        return fork

    def __deepcopy__(self: _Cache, memo: dict[int, Any]) -> _Cache:  # noqa: PYI019 (as above)
        return self.fork()

    def _forked_layers(self) -> list[Any]:
        """Copies of all layers."""
        return [copy.deepcopy(layer) for layer in self.layers]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        """Length as of transformers; a model that counts positions from it is given what it remembers."""
        if self.remembered.memory is not None and not torch.compiler.is_compiling():
            self.remembered.memory.give(self.remembered)
        return super().get_seq_length(*args, **kwargs)

    def freeze(self: _Cache) -> _Cache:  # noqa: PYI019 (as above)
        """Refuse every later change, so that forks start from the same tokens; returns the cache."""
        self.is_frozen = True
        for layer in self._own_layers:
            layer.is_frozen = True
        return self

    def snapshot(self: _Cache) -> _Cache:  # noqa: PYI019 (as above)
        """A frozen copy of the cache: recurrent states are copied, pages are shared until they change."""
        return self.fork().freeze()

    def restore(self, snapshot: "StatefulCache") -> None:
        """Go back to the tokens and states of a snapshot, which can be restored any number of times.

        Raises:
            ArgumentError: ``snapshot`` is not a snapshot of this cache or of a fork of it.
            StateError: the cache is frozen.
        """
        expect_thawed(self)
        if getattr(snapshot, "_kin", None) is not self._kin:
            raise ArgumentError(f"snapshot must be one of this cache, got another {type(snapshot).__name__}")
        fork = snapshot.fork()
        self.__dict__ = dict(vars(fork))

    @property
    def rollback(self) -> int:
        """Number of tokens that ``crop`` can remove from recurrent states; 0 if none, or if not recorded.

        Setting it begins to record, from the present tokens on; 0 ends it.
        """
        return 0 if self._rollback is None else self._rollback.num_tokens

    @rollback.setter
    def rollback(self, num_tokens: int) -> None:
        expect_range("rollback", num_tokens, 0)
        if num_tokens == 0 or not self._stateful:
            self._rollback = None
        elif self._rollback is None:
            self._rollback = Rollback(num_tokens, self._longest)
        else:
            self._rollback.num_tokens = num_tokens
        if self._rollback is not None:  # so that windows can be cropped as far
            groups = [getattr(x.pages, "sequences", None) for x in self._own_layers]
            for sequences in filter(None, groups):
                sequences.rollback = max(sequences.rollback, num_tokens)

    @property
    def nbytes_rollback(self) -> int:
        """Bytes that are kept to roll back recurrent states, beside ``nbytes``."""
        return 0 if self._rollback is None else self._rollback.nbytes

    @property
    def recording(self) -> Rollback | None:
        """Recorder of the calls of mixers; ``None`` if they are not recorded."""
        return None if self.is_frozen else self._rollback

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can remove the last step."""
        is_recorded = self._rollback is not None and not self._rollback.refusal
        others = (x for i, x in enumerate(self.layers) if i not in self._stateful)
        return (is_recorded or not self._stateful) and all(getattr(x, "is_croppable", False) for x in others)

    def activate_past_recording(self) -> None:
        """Begin to keep evicted tokens of windows and states, for assisted decoding to remove drafts."""
        for i, layer in enumerate(self.layers):
            is_theirs = i in self._stateful and layer not in self._own_layers
            if hasattr(layer, "activate_past_recording") and not is_theirs:
                layer.activate_past_recording()
        self.rollback = max(self.rollback, RECORDED)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State as of transformers; a copy if the cache is frozen, as mixers write to it."""
        self._touch(layer_idx, "conv", state_idx)
        return self._state(super().get_conv_state(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """State as of transformers; a copy if the cache is frozen, as mixers write to it."""
        self._touch(layer_idx, "recurrent", state_idx)
        return self._state(super().get_recurrent_state(layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Update as transformers; raises StateError if the cache is frozen."""
        expect_thawed(self)
        self._touch(layer_idx, "conv", state_idx)
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx=state_idx, **kwargs)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Update as transformers; raises StateError if the cache is frozen."""
        expect_thawed(self)
        self._touch(layer_idx, "recurrent", state_idx)
        state: Tensor = super().update_recurrent_state(
            recurrent_states, layer_idx, state_idx=state_idx, **kwargs
        )
        return state

    @property
    def _longest(self) -> int:
        """Number of tokens that the longest layer has seen, also in a forward that broke off."""
        if self._rollback is None or any(any(x.num_assigned) for x in self._own_layers):
            return self._longest_own
        return max(self._longest_own, self._rollback.end)

    @property
    def _longest_own(self) -> int:
        """Number of tokens of the longest layer with keys and values."""
        return max(lengths_of(self._own_layers), default=0)

    def _begin_forward(self) -> None:
        """Note that a forward begins after the present tokens."""
        self._begun, self._length_before = set(), self._longest_own

    def _has_begun(self, layer_idx: int) -> bool:
        """Whether a layer asks within a forward, after it changed its states and before it stores keys.

        Without the model's hook that cannot be told from the forward after one that broke off there.
        """
        layer = self.layers[layer_idx]
        is_asking = self._is_watched and layer_idx in self._begun and isinstance(layer, KVCacheLayer)
        return is_asking and lengths_of([layer]) == {self._length_before}

    def _expect_states_of(self, length: int) -> None:
        """Raise StateError unless the last forward changed the states of all layers, or of none.

        Args:
            length: Number of tokens of the layers with keys and values, which have one length.
        """
        if self._begun and (not self._stateful.keys() <= self._begun or length == self._length_before):
            raise StateError(
                f"layers must have seen the same tokens, got recurrent states of layers "
                f"{sorted(self._begun)} that are a step ahead: an earlier forward broke off (reset the "
                f"cache, or restore a snapshot)"
            )

    def _past(self, ends: Sequence[int]) -> Past | None:
        """States after the first ``ends[b]`` tokens of each row; ``None`` if these are the present ones.

        Raises:
            StateError: no kept state is early enough; nothing was changed.
            UnsupportedError: states cannot be rolled back; nothing was changed.
        """
        longest = self._longest
        if not self._stateful or all(end == longest for end in ends):
            return None
        if self._rollback is None:
            raise UnsupportedError(
                "the cache has a recurrent state, which cannot go back: make it with rollback, or set that "
                "before the tokens that are to be removed"
            )
        assigned = self._rollback.end - longest  # number of tokens by which assignment shortened layers
        return self._rollback.past(self.layers, [end + assigned for end in ends])

    def _return_to(self, past: Past | None) -> None:
        """Put earlier states into layers, after the tokens that follow them were removed."""
        if past is not None and self._rollback is not None:
            self._rollback.return_to(self.layers, past, self._longest_own)
            self._begun.clear()

    def _touch(self, layer_idx: int, kind: str, state_idx: int) -> None:
        if not self.is_frozen and not torch.compiler.is_compiling():
            self._begun.add(layer_idx)  # a mixer in a loop has a layer for each pass
        if self._rollback is not None and not self.is_frozen:
            layer = self._stateful.get(layer_idx)
            if layer is not None:
                self._rollback.touch(layer, Key(layer_idx, kind, state_idx))

    def _state(self, state: Tensor | None) -> Tensor | None:
        return state.clone() if self.is_frozen and state is not None else state
