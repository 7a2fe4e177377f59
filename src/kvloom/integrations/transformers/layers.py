"""One layer of a ``KVCache``, as transformers 4.57 to 5.24 call it.

Shapes: B sequences, Q new tokens of each, N tokens that are returned, H key/value heads, D head dim.
"""

import copy
import inspect
import weakref
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from kvloom.caches import FixedLayer, PagedLayer, Sequences, TokenIndex
from kvloom.caches.assigning import SIDES
from kvloom.caches.read_only import ReadOnly, WrittenBack
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.attention import IMPLEMENTATION
from kvloom.integrations.transformers.lazy_states import LazyStates, refuse_gradient

# Until transformers 5.12 ``crop(n)`` kept n tokens; since then ``crop(-n)`` removes n.
_CROP_KEEPS: Final = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters

States = Tensor | LazyStates
_Layer = TypeVar("_Layer", bound="KVCacheLayer")
_Hybrid = TypeVar("_Hybrid", bound="HybridKVCacheLayer")


class KVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, in pages or in fixed storage.

    Args:
        pages: The layer that keeps the tokens; pages are shared with the other layers of its sequences.
        config: Of the model. At each update its attention implementation decides what ``update`` returns:
            tensors, or what stands for them until kvloom's attention reads them in place.
        kwargs: For the next class.

    Attributes:
        streams: All that is kept of its tokens: keys and values, and what there is beside them.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, pages: PagedLayer | FixedLayer, config: Any, **kwargs: Any) -> None:
        self.pages = pages
        self.streams: tuple[PagedLayer | FixedLayer, ...] = (pages,)
        super().__init__(**kwargs)
        # Whether ``update`` returns no more than the window; of fixed storage the mask hides what is more.
        self.is_sliding = isinstance(pages, PagedLayer) and pages.window is not None
        self.is_frozen = False
        self.is_used = True  # by the model, whose configuration may name more layers
        self.num_assigned = [0, 0]  # how often keys and values were
        self._config = config
        self._dtype: torch.dtype | None = None  # in which attention computes, from the first update on

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loaded, the keys may be on another device than those that were saved."""
        self.__dict__.update(state)
        if self.pages.storage is not None:
            self.device = self.pages.storage.view.device

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; ``None`` for all before it."""
        return self.pages.window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember the dtype that attention computes in; pages are taken when tokens arrive."""
        self._dtype = self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[States, States]:
        """Store ``[B, H, Q, D]`` and return everything that their attention reads, ``[B, H, N, D]``."""
        if self.is_frozen:
            self._expect_thawed()
        if self.is_in_place:
            tokens = self.pages.append(key_states, value_states)
            pair: tuple[States, States] = LazyStates.pair(tokens, key_states, value_states)
        else:
            keys, values = self.pages.update(key_states, value_states)
            pair = refuse_gradient(keys, key_states), refuse_gradient(values, value_states)
        if self._dtype is None:
            KVCacheLayer.lazy_initialization(self, key_states)
        return pair

    @property
    def is_in_place(self) -> bool:
        """Whether attention reads the cache itself."""
        found = None
        if not torch.compiler.is_compiling():  # without the hooks of a configuration, which are slow
            found = object.__getattribute__(self._config, "__dict__").get("_attn_implementation_internal")
        return bool((self._config._attn_implementation if found is None else found) == IMPLEMENTATION)

    @property
    def attn_implementation(self) -> str:
        """Name of the attention that reads this layer."""
        return str(self._config._attn_implementation)

    def get_seq_length(self) -> int | Tensor:
        """Tokens seen, evicted ones included; of fixed storage a new 0-d int64 tensor."""
        return self.pages.get_seq_length()

    def get_max_length(self) -> int:
        """Tokens that can be seen at once, of fixed storage those that fit; -1 for no bound."""
        return self.pages.get_max_length()

    def get_max_cache_shape(self) -> int:
        """``get_max_length`` as transformers up to 5.18 calls it."""
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int | Tensor]:
        """Length and first position of what ``update`` will return; up to 5.3 called with positions."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.pages.get_mask_sizes(new)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; up to 5.12 a positive number is what is kept."""
        self.expect_changeable()
        self.pages.truncate(num_kept(tokens_to_remove, self.pages.num_tokens))

    def reset(self) -> None:
        """Forget all tokens."""
        self._expect_thawed()
        self.pages.reset()
        if isinstance(self.pages, PagedLayer):
            self.is_initialized, self._dtype = False, None

    def activate_past_recording(self) -> None:
        """Keep what the window evicts until the next crop, which may then remove any number of tokens."""
        self.record_past = True

    @property
    def record_past(self) -> bool:
        """Whether what the window evicts is kept until the next crop."""
        return isinstance(self.pages, PagedLayer) and self.pages.sequences.is_recording

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        if isinstance(self.pages, PagedLayer):
            self.pages.sequences.is_recording = wanted

    def fork(self: _Layer, sequences: Sequences | None) -> _Layer:  # noqa: PYI019 (not in Python 3.10)
        """This layer over ``sequences``, a fork of its own."""
        other = type(self)(self.pages.fork(sequences), self._config)
        other.is_used, other.num_assigned = self.is_used, [*self.num_assigned]
        if self._dtype is not None:
            other._dtype = other.dtype = self._dtype
            other.device, other.is_initialized = self.device, True
        return other

    @property
    def keys(self) -> Tensor | None:
        """Keys that the next token sees, ``[B, H, N, D]``, gathered at each access.

        Changing them in place changes the cache, until it is changed in another way; then that raises. Those
        of a static cache are read-only.

        Assigning replaces all of them, quantized if the cache is. Without a window, and if it is not static,
        a layer also takes another number of tokens. ``values`` must then be assigned as many; until then
        every other use of the cache raises.

        Raises:
            ShapeError: B, H, D, dtype or device is another, or N is and must not be; nothing was changed.
            StateError: the cache is frozen, or there is nothing yet to be replaced in fixed storage.
        """
        return self._side(0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign(0, keys)

    @property
    def values(self) -> Tensor | None:
        """Values that the next token sees, ``[B, H, N, D]``; as ``keys``."""
        return self._side(1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign(1, values)

    def expect_changeable(self) -> None:
        """Raise StateError if the cache is frozen, or keys or values wait for the other to be assigned."""
        self._expect_thawed()
        self.pages.expect_settled()

    def gathered(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values that the next token sees, ``[B, H, N, D]``; the caller owns them."""
        if self._dtype is None or self.pages.storage is None:
            return None
        return replace(self.pages.stored(), rows=None).gather(self._dtype)

    def _side(self, side: int) -> Tensor | None:
        waiting = self.pages.assigned(side)
        if waiting is not None:
            return waiting
        pair = self.gathered()
        if pair is None:
            return None
        if isinstance(self.pages, FixedLayer):
            return ReadOnly.of(pair[side])
        return WrittenBack.read(pair[side], _Reading(self, side, pair[side]))

    def _assign(self, side: int, x: Tensor | None) -> None:
        if x is None and "is_frozen" not in vars(self):
            return  # the base class begins with ``None``
        self._expect_thawed()
        expect(SIDES[side], cast(Tensor, x), "B H N D", dtype=self._dtype or FLOAT_DTYPES)
        self.num_assigned[side] += 1
        setattr(self.pages, SIDES[side], x)
        if self._dtype is None and self.pages.storage is not None:
            KVCacheLayer.lazy_initialization(self, cast(Tensor, x))

    def _expect_thawed(self) -> None:
        if self.is_frozen:
            raise StateError("this cache is frozen: use a fork of it, cache.fork()")

    def _refuse(self, *args: Any) -> None:
        raise UnsupportedError("a layer of a KVCache shares its rows with the others: call the cache")

    reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class _Reading:
    """Keys (0) or values (1) as they were read from a layer in pages, as ``read_only.Reading``."""

    def __init__(self, layer: KVCacheLayer, side: int, x: Tensor) -> None:
        self._layer, self._side, self._x = weakref.ref(layer), side, x
        self._state = _state_of(layer, side)

    def expect_current(self) -> None:
        """Raise UnsupportedError if the layer no longer holds them, StateError if it cannot be changed."""
        layer = self._layer()
        if layer is None:
            return
        layer.expect_changeable()
        if self._state != _state_of(layer, self._side):
            raise UnsupportedError(
                f"{SIDES[self._side]} that were gathered before their cache changed cannot be changed in "
                f"place: read layer.{SIDES[self._side]} again"
            )

    def write(self) -> None:
        """Let the layer hold what they are now."""
        layer = self._layer()
        if layer is not None:
            setattr(layer, SIDES[self._side], self._x)
            self._state = _state_of(layer, self._side)


def _state_of(layer: KVCacheLayer, side: int) -> tuple[int, TokenIndex | None]:
    """How often a side was assigned, and where its tokens are: the same object until that changes."""
    pages = layer.pages
    return layer.num_assigned[side], None if pages.storage is None else pages.stored().index


class StaticKVCacheLayer(KVCacheLayer):
    """Keys and values in fixed storage, for ``torch.compile``."""

    is_compileable = True
    pages: FixedLayer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Take the memory."""
        value_states = key_states if value_states is None else value_states
        self.pages.allocate_for(key_states, value_states, is_gathered=not self.is_in_place)
        super().lazy_initialization(key_states, value_states)


# Before transformers 5.4 such models brought caches of their own.
TheirHybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
THEIR_HYBRID_LAYERS: Final = {
    TheirHybridLayer,
    getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None),
} - {None}
"""Tokens beside recurrent states, with a window or without one."""

_STATES: Final = {
    "number_of_states",
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
}

if TheirHybridLayer is not None:

    class HybridKVCacheLayer(KVCacheLayer, TheirHybridLayer):  # type: ignore[misc]
        """Keys and values in pages, beside the recurrent states of the layer as transformers keeps them."""

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Called with keys and values, or with states by name."""
            if args:
                KVCacheLayer.lazy_initialization(self, *args)
            else:
                super(KVCacheLayer, self).lazy_initialization(**kwargs)

        def reset(self) -> None:
            """Forget all tokens and states."""
            cache_utils.LinearAttentionLayer.reset(self)
            KVCacheLayer.reset(self)

        @property
        def record_past(self) -> bool:
            """Of the states: they go back otherwise, so columns of convolutions need not be kept."""
            return False

        @record_past.setter
        def record_past(self, wanted: bool) -> None:
            if isinstance(self.pages, PagedLayer):  # of the window
                self.pages.sequences.is_recording = wanted

        def select_states(self, rows: Tensor) -> None:
            """Make the states of row i those of row ``rows[i]``."""
            cache_utils.LinearAttentionLayer.reorder_cache(self, rows)

        def fork(self: _Hybrid, sequences: Sequences | None) -> _Hybrid:  # noqa: PYI019 (as above)
            """This layer over ``sequences``, with states of its own."""
            is_recording = sequences is not None and sequences.is_recording
            other = super().fork(sequences)
            other.record_past = is_recording
            for name in vars(self).keys() & _STATES:  # not every version has all
                setattr(other, name, copy.deepcopy(getattr(self, name)))
            return other


else:  # no layer is one

    class HybridKVCacheLayer(KVCacheLayer):  # type: ignore[no-redef]
        """Not in this version of transformers."""


def num_kept(tokens_to_remove: int, num_tokens: int) -> int:
    """Of ``num_tokens`` tokens, those that ``crop(tokens_to_remove)`` keeps.

    Raises:
        ArgumentError: the number is positive, and this version of transformers takes none.
    """
    tokens_to_remove = int(tokens_to_remove)  # some versions pass a 0-d tensor
    if tokens_to_remove <= 0:
        keeps_none = _CROP_KEEPS and tokens_to_remove == 0
        return 0 if keeps_none else max(0, num_tokens + tokens_to_remove)
    if _CROP_KEEPS:
        return min(num_tokens, tokens_to_remove)
    raise ArgumentError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
