"""Layers of a ``KVCache``, with the interface of transformers 4.57 to 5.24.

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
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvloom.caches import FixedLayer, PagedLayer, TokenIndex
from kvloom.caches.layers.assigning import SIDES
from kvloom.caches.layers.changing import Forks
from kvloom.caches.layers.read_only import ReadOnly, WrittenBack
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.errors import ArgumentError, ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION
from kvloom.integrations.transformers.attention.lazy_states import LazyStates, refuse_gradient
from kvloom.integrations.transformers.attention.lazy_tensor import as_autocast
from kvloom.integrations.transformers.models.layer_specs import BESIDE_STATES, OF_PICTURES

# With transformers 4 ``crop(n)`` keeps n tokens; with 5 ``crop(-n)`` removes n.
_CROP_KEEPS: Final = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters

States = Tensor | LazyStates
_Layer = TypeVar("_Layer", bound="KVCacheLayer")
_Hybrid = TypeVar("_Hybrid", bound="HybridKVCacheLayer")


def _refuse(layer: "KVCacheLayer", *args: Any) -> None:
    raise UnsupportedError("a layer of a KVCache shares its rows with the others: call the cache")


def expect_thawed(cache: Any) -> None:
    """Raise StateError if a cache or layer is frozen."""
    if cache.is_frozen:
        raise StateError("this cache is frozen: use a fork of it, cache.fork()")


class KVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, in pages or in fixed storage.

    Args:
        pages: The layer that keeps the tokens; pages are shared with the other layers of its sequences.
        config: Configuration of the model. At each update its attention implementation decides what
            ``update`` returns: tensors, or ``LazyStates`` that kvloom's attention reads in place.
        kwargs: Arguments of the next class.

    Attributes:
        streams: Storages of its tokens: keys and values, and index keys if there are any.
    """

    is_compileable = False
    is_croppable = True
    keeps = "keys and values"  # for errors, which do not name classes of this library
    is_found = False  # whether all tokens were found, so that no forward has said in which dtype it computes

    def __init__(self, pages: PagedLayer | FixedLayer, config: Any, **kwargs: Any) -> None:
        self.pages = pages
        self.streams: tuple[PagedLayer | FixedLayer, ...] = (pages,)
        super().__init__(**kwargs)
        # Whether ``update`` returns no more than the window; with fixed storage the mask hides the rest.
        self.is_sliding = isinstance(pages, PagedLayer) and pages.window is not None
        self.is_frozen = False
        self.is_used = True  # false if the configuration names the layer and the model does not use it
        self.num_assigned = [0, 0]  # number of assignments to keys and to values
        self._config = config
        self._dtype: torch.dtype | None = None  # dtype that attention computes in, set at the first update

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved layer, whose keys may have been loaded on another device."""
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
        """Store ``[B, H, Q, D]`` and return all keys and values that attention reads, ``[B, H, N, D]``.

        Under ``torch.autocast`` keys and values of two dtypes are stored in its dtype.
        """
        if self.is_frozen:
            expect_thawed(self)
        if key_states.dtype != value_states.dtype:
            key_states, value_states = as_autocast(key_states, value_states)
        if key_states.dtype != self._dtype and self._dtype is not None and not self.is_found:
            raise ShapeError(
                f"key_states must be {self._dtype} as those of the tokens before, got {key_states.dtype}: "
                f"compute a text in one dtype of torch.autocast, or without it"
            )
        if self.is_in_place:
            tokens = self.pages.append(key_states, value_states)
            pair: tuple[States, States] = LazyStates.pair(tokens, key_states, value_states)
        else:
            keys, values = self.pages.update(key_states, value_states)
            pair = refuse_gradient(keys, key_states), refuse_gradient(values, value_states)
        if self._dtype is None or self.is_found:
            KVCacheLayer.lazy_initialization(self, key_states)
            self.is_found = False
        return pair

    @property
    def is_in_place(self) -> bool:
        """Whether attention reads the cache in place."""
        found = None
        if not torch.compiler.is_compiling():  # without the hooks of a configuration, which are slow
            found = object.__getattribute__(self._config, "__dict__").get("_attn_implementation_internal")
        return bool((self._config._attn_implementation if found is None else found) == IMPLEMENTATION)

    @property
    def attn_implementation(self) -> str:
        """Name of the attention that reads this layer."""
        return str(self._config._attn_implementation)

    def get_seq_length(self) -> int | Tensor:
        """Number of tokens seen, evicted ones included; with fixed storage a new 0-d int64 tensor."""
        return self.pages.get_seq_length()

    def get_max_length(self) -> int:
        """Number of tokens that can be seen at once, or that fit in fixed storage; -1 for no bound."""
        return self.pages.get_max_length()

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int | Tensor]:
        """Length and first position of what ``update`` will return; 4 has positions as the argument."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.pages.get_mask_sizes(new)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; with 4 a positive number is how many to keep."""
        self.expect_changeable()
        self.pages.truncate(num_kept(tokens_to_remove, self.pages.num_tokens))

    def reset(self) -> None:
        """Forget all tokens."""
        expect_thawed(self)
        self.pages.reset()
        self.is_initialized, self._dtype = False, None

    def activate_past_recording(self) -> None:
        """Keep tokens outside the window until the next crop, so that it can remove any number of tokens."""
        self.record_past = True

    @property
    def record_past(self) -> bool:
        """Whether tokens outside the window are kept until the next crop."""
        return isinstance(self.pages, PagedLayer) and self.pages.sequences.is_recording

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        if isinstance(self.pages, PagedLayer):
            self.pages.sequences.is_recording = wanted

    def fork(self: _Layer, forks: Forks) -> _Layer:  # noqa: PYI019 (not in Python 3.10)
        """A copy of this layer over ``forks`` of the sequences of all layers."""
        other = type(self)(self.pages.fork(forks), self._config)
        other.is_used, other.num_assigned = self.is_used, [*self.num_assigned]
        other.is_found = self.is_found
        if self._dtype is not None:
            other._dtype = other.dtype = self._dtype
            other.device, other.is_initialized = self.device, True
        return other

    @property
    def keys(self) -> Tensor | None:
        """Keys that the next token sees, ``[B, H, N, D]``, gathered at each access.

        Writing to them changes the cache. After another change of the cache, writing to them raises. Keys of
        a static cache are read-only. In a compiled model they are a copy.

        Assigning replaces all keys, quantized if the cache is. A layer without a window that is not static
        also accepts another number of tokens; ``values`` must then be assigned as many, and until then every
        other use of the cache raises.

        Raises:
            ShapeError: B, H, D, dtype or device differs, or N differs where it must not; nothing was changed.
            StateError: the cache is frozen, or fixed storage has no tokens yet.
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
        """Raise StateError if the cache is frozen, or only one of keys and values was assigned."""
        expect_thawed(self)
        self.pages.expect_settled()

    def gathered(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values that the next token sees, ``[B, H, N, D]``, owned by the caller."""
        if self._dtype is None or self.pages.storage is None:
            return None
        return replace(self.pages.stored(), rows=None).gather(self._dtype)

    def _side(self, side: int) -> Tensor | None:
        waiting = self.pages.assignment.get(side)
        if waiting is not None:
            return waiting
        pair = self.gathered()
        if pair is None:
            return None
        if torch.compiler.is_compiling():  # which does not trace subclasses of tensors
            return pair[side].clone()
        if isinstance(self.pages, FixedLayer):
            return ReadOnly.of(pair[side])
        return WrittenBack.read(pair[side], _Reading(self, side, pair[side]))

    def _assign(self, side: int, x: Tensor | None) -> None:
        if x is None and "is_frozen" not in vars(self):
            return  # the base class begins with ``None``
        expect_thawed(self)
        expect(SIDES[side], cast(Tensor, x), "B H N D", dtype=self._dtype or FLOAT_DTYPES)
        self.num_assigned[side] += 1
        setattr(self.pages, SIDES[side], x)
        if self._dtype is None and self.pages.storage is not None:
            KVCacheLayer.lazy_initialization(self, cast(Tensor, x))

    reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse
    __deepcopy__ = _refuse  # such as of a model that appends copies, which no change of rows would reach


class _Reading:
    """Keys (0) or values (1) read from a layer in pages; implements ``read_only.Reading``."""

    def __init__(self, layer: KVCacheLayer, side: int, x: Tensor) -> None:
        self._layer, self._side, self._x = weakref.ref(layer), side, x
        self._state = _state_of(layer, side)

    def expect_current(self) -> None:
        """Raise UnsupportedError if the layer changed since the read, StateError if it cannot be changed."""
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
        """Assign the written tensor to the layer."""
        layer = self._layer()
        if layer is not None:
            setattr(layer, SIDES[self._side], self._x)
            self._state = _state_of(layer, self._side)


def _state_of(layer: KVCacheLayer, side: int) -> tuple[int, TokenIndex | None]:
    """Number of assignments to a side, and the index of its tokens; equal until the layer changes."""
    pages = layer.pages
    return layer.num_assigned[side], None if pages.storage is None else pages.stored().index


class StaticKVCacheLayer(KVCacheLayer):
    """Keys and values in fixed storage, for ``torch.compile``."""

    is_compileable = True
    keeps = "keys and values in fixed storage"
    pages: FixedLayer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the storage."""
        value_states = key_states if value_states is None else value_states
        self.pages.allocate_for(key_states, value_states, is_gathered=not self.is_in_place)
        super().lazy_initialization(key_states, value_states)


# With transformers 4 hybrid models have cache classes of their own, and no layer is of the class below.
TheirHybridLayer: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)

_STATES: Final = {
    "number_of_states",
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
}


class HybridKVCacheLayer(KVCacheLayer, TheirHybridLayer):  # type: ignore[misc]
    """Keys and values in pages, and recurrent states as transformers keeps them."""

    keeps = BESIDE_STATES

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize keys and values, given by position, or states, given by name."""
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
        """False: ``Rollback`` restores states, so past columns of convolutions need not be kept."""
        return False

    @record_past.setter
    def record_past(self, wanted: bool) -> None:
        if isinstance(self.pages, PagedLayer):  # tokens outside the window
            self.pages.sequences.is_recording = wanted

    def select_states(self, rows: Tensor) -> None:
        """Give row i the states of row ``rows[i]``."""
        cache_utils.LinearAttentionLayer.reorder_cache(self, rows)

    def fork(self: _Hybrid, forks: Forks) -> _Hybrid:  # noqa: PYI019 (as above)
        """A copy of this layer over ``forks``, with copied states."""
        is_recording = super().record_past
        other = super().fork(forks)
        other.record_past = is_recording
        for name in vars(self).keys() & _STATES:  # not every version has all
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other


class CrossLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of pictures that a layer attends to, as in Mllama, without tokens of the text.

    They are kept as transformers keeps them, and a crop of the text leaves them.
    """

    keeps = OF_PICTURES

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing."""


def kept_by(layer: Any) -> str:
    """What a cache layer keeps, for errors; the class of a layer of transformers' own."""
    return str(getattr(layer, "keeps", type(layer).__name__))


def num_kept(tokens_to_remove: int, num_tokens: int) -> int:
    """Number of the ``num_tokens`` tokens that ``crop(tokens_to_remove)`` keeps.

    Raises:
        ArgumentError: the number is positive, which this version of transformers does not accept.
    """
    tokens_to_remove = int(tokens_to_remove)  # some versions pass a 0-d tensor
    if tokens_to_remove <= 0:
        keeps_none = _CROP_KEEPS and tokens_to_remove == 0
        return 0 if keeps_none else max(0, num_tokens + tokens_to_remove)
    if _CROP_KEEPS:
        return min(num_tokens, tokens_to_remove)
    raise ArgumentError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
