"""One layer of a cache: takes keys and values of new tokens, returns those that attention reads.

Shapes: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims. Layers are for inference: returned tensors have no gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from kvloom.caches.layers.assigning import SIDES, Assignment
from kvloom.caches.rows.selection import reordered, repeated, selected
from kvloom.caches.rows.sequences import Sequences
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.core.views import detached
from kvloom.errors import ArgumentError, ConfigError, ShapeError, StateError

_Layer = TypeVar("_Layer", bound="Layer")
Forks: TypeAlias = Mapping[Sequences, Sequences]
"""The fork of each of some sequences."""


class Layer(ABC):
    """Keys and values of B sequences of one length.

    The first update fixes B, H, both head dims, the dtype and the device.

    Attributes:
        dtype: Dtype of the tokens; ``None`` before the first update.
        assignment: Keys or values that were assigned while the other side still has another length.
        sequences: Page tables that other layers may share; ``None`` for a layer with memory of its own.
    """

    sequences: Sequences | None = None

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.assignment = Assignment()

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens and return the keys and values that their attention reads.

        Args:
            key: ``[B, H, Q, Dk]`` float32, float16 or bfloat16.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Returns:
            ``(keys, values)``, ``[B, H, n, Dk]`` and ``[B, H, n, Dv]`` in the dtype of ``key``; n is the
            first result of ``get_mask_sizes(Q)`` before. They may be views of the cache: ``crop`` followed by
            ``update`` changes them.

        Raises:
            ShapeError: shape, dtype or device is not that of the first update; nothing was written.
            StateError, OutOfPages: the layer is full; nothing was written.
        """
        self._expect_fits(key, value)
        result = self._update(detached(key), detached(value))
        self.dtype = key.dtype
        return result

    def append(self, key: Tensor, value: Tensor) -> Tokens:
        """Store new tokens as ``update``, and return their slots, to attend in place or to gather.

        Returns:
            The tokens that attention reads, the new ones included. Valid until the layer changes.
        """
        self._expect_fits(key, value)
        result = self._append(detached(key), detached(value))
        self.dtype = key.dtype
        return result

    @abstractmethod
    def stored(self) -> Tokens:
        """Slots of the tokens of ``keys`` and ``values``.

        Raises:
            StateError: before the first update.
        """

    def gather(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``stored`` as tensors, dequantized: keys ``[B, H, N, Dk]`` and values ``[B, H, N, Dv]``."""
        return self.stored().gather(dtype)

    @property
    def keys(self) -> Tensor:
        """Stored keys, ``[B, H, n, Dk]``: a view of the cache, or gathered and then read-only.

        Assigning replaces all of them by copies, quantized if the layer is. If another n is allowed, it takes
        effect once ``values`` has the same n; until then every change raises. ShapeError if B, H, Dk, dtype
        or device differs, or n where it is fixed; nothing was changed. Reading raises StateError before the
        first update.
        """
        return self._side(0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._assign(0, keys)

    @property
    def values(self) -> Tensor:
        """Stored values, ``[B, H, n, Dv]``; as ``keys``."""
        return self._side(1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self._assign(1, values)

    @property
    @abstractmethod
    def size(self) -> int:
        """B; 0 before the first update."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens seen of each sequence, evicted ones included."""

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Number of columns of ``keys``, n there."""

    @property
    def num_held(self) -> int:
        """Number of tokens of each sequence that are held: the first ones of ``keys``."""
        return self.num_tokens - self._num_evicted()

    @property
    def window(self) -> int | None:
        """Number of tokens that a token sees, itself included; ``None`` for all before it."""
        return None

    @property
    def is_sliding(self) -> bool:
        """Whether ``update`` returns only the tokens within a window."""
        return self.window is not None

    @property
    @abstractmethod
    def storage(self) -> Storage | None:
        """The tensors; ``None`` before the first update."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, scales and residual window included."""
        return (0 if self.storage is None else self.storage.nbytes) + self.nbytes_recent

    @property
    def nbytes_recent(self) -> int:
        """Bytes of the residual window among ``nbytes``: the last tokens, stored unquantized beside codes."""
        return 0

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token of one sequence takes, scales included; 0 before the first update."""
        return 0.0 if self.storage is None else self.storage.nbytes_per_token

    def get_seq_length(self) -> int | Tensor:
        """``num_tokens``; of a fixed layer a new 0-d int64 tensor."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """Largest number of tokens that are seen at once; -1 for no bound."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """Number of tokens that ``update`` of ``query_length`` tokens returns, and position of the first.

        The position is a 0-d tensor in fixed layers of unbounded length.
        """
        first = 0 if self.window is None else max(self.num_tokens - self.window + 1, 0)
        return self.num_tokens - first + query_length, first

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, or, if negative, remove the last ``-num_tokens``.

        Keeping more than there are keeps all; removing more than there are removes all.

        Raises:
            ArgumentError: ``num_tokens`` is no int.
            StateError: the layer has evicted tokens that later ones would see; nothing was changed.
        """
        length = self.num_tokens
        kept = cropped_length(num_tokens, length)
        self.expect_settled()
        self._expect_held(kept, num_tokens)
        if kept < length:
            self.truncate(kept)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` of each sequence.

        Raises:
            StateError: there are fewer, or the window has evicted tokens that later ones would see.
        """
        self.expect_truncatable(num_tokens)
        self._truncate(num_tokens)

    def expect_truncatable(self, num_tokens: int) -> None:
        """Raise as ``truncate`` would, and change nothing."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise StateError(f"num_tokens must be in [0, {self.num_tokens}], got {num_tokens}")
        self._expect_held(num_tokens, num_tokens)

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i by sequence ``rows[i]``; does nothing before the first update.

        Args:
            rows: ``[B]`` int64 or int32 on any device, repeats allowed.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        if self._has_rows():
            self._select(reordered(rows, self.size))

    def select(self, rows: Tensor) -> None:
        """Keep the sequences at ``rows``, in that order; does nothing before the first update.

        Args:
            rows: ``[R]`` int64 or int32, or a bool mask ``[B]``, on any device.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        if self._has_rows():
            self._select(selected(rows, self.size))

    def repeat_interleave(self, n: int) -> None:
        """Repeat each sequence ``n`` times in a row; does nothing before the first update.

        Raises:
            ArgumentError: ``n`` is not at least 1.
        """
        rows = repeated(n, self.size)
        if self._has_rows() and n > 1:
            self._select(rows)

    def assigned(self, side: int) -> Tensor | None:
        """Keys (0) or values (1) that were assigned while the other side still has another length."""
        return self.assignment.get(side)

    def expect_settled(self) -> None:
        """Raise StateError if only one of keys and values was assigned with another length."""
        if self.assignment.waiting is not None:
            self.assignment.expect_none(0 if self.storage is None else self.num_columns)

    def reset(self) -> None:
        """Forget all tokens."""
        self.assignment.clear()
        self._reset()

    def fork(self: _Layer, forks: Forks | None = None) -> _Layer:  # noqa: PYI019 (not in Python 3.10)
        """Another layer of the same tokens; tokens that one stores are not seen by the other.

        Args:
            forks: Forks of the sequences that this layer shares; ``None`` to fork them here.
        """
        self.expect_settled()
        other = object.__new__(type(self))
        vars(other).update(vars(self), assignment=Assignment())
        other._hold_alone(forks)
        return other

    @abstractmethod
    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Replace the stored keys (0), values (1) or both by these, ``[B, H, n, D]``.

        If n changes, where that is allowed, both must be given.
        """

    @abstractmethod
    def _update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _append(self, key: Tensor, value: Tensor) -> Tokens: ...

    @abstractmethod
    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Stored keys and values, as of the properties."""

    @abstractmethod
    def _truncate(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _select(self, rows: list[int]) -> None: ...

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _hold_alone(self, forks: Forks | None) -> None:
        """Separate a fork from its layer, with ``forks`` of the sequences that layers share."""

    def _expect_held(self, kept: int, given: int) -> None:
        """Raise StateError if the next token would see evicted ones when ``kept`` tokens remain."""
        window, evicted = self.window, self._num_evicted()
        if window is not None and max(kept - window + 1, 0) < min(kept, evicted):
            raise StateError(
                f"num_tokens must keep at least {evicted + window - 1} tokens or none, got {given}: of "
                f"{self.num_tokens} tokens the window has evicted the first {evicted}"
            )

    def _num_evicted(self) -> int:
        """Number of tokens at the beginning that a window has evicted."""
        return 0

    @property
    def _num_fixed(self) -> str | None:
        """Reason why the number of tokens of ``keys`` cannot change; ``None`` if it can."""
        return None if self.window is None else "those that the window holds"

    def _side(self, side: int) -> Tensor:
        waiting = self.assigned(side)
        if waiting is not None:
            return waiting
        if self.storage is None or self.dtype is None:
            raise StateError("no tokens were stored yet")
        return self._held(self.dtype)[side]

    def _assign(self, side: int, x: Tensor) -> None:
        name, is_new, known = SIDES[side], self.storage is None, self._known_sizes()
        sizes = {"B": known["B"]} if "B" in known else {}
        sizes |= {} if is_new else {"H": known["H"], "D": known[("Dk", "Dv")[side]]}
        expect(name, x, "B H N D", dtype=self._dtypes, device=self._device, **sizes)
        held = None if is_new else self.num_columns
        new = self.assignment.add(side, x.detach(), held, self._num_fixed)
        if new is not None:
            if len(new) == 2:
                self._expect_tokens(new[0], new[1])
            self.replace(new)
            self.assignment.clear()
            self.dtype = x.dtype

    def _expect_fits(self, key: Tensor, value: Tensor) -> None:
        """Check new tokens: one fast test that a decoding step passes, then each requirement."""
        self.expect_settled()
        storage = self.storage
        if (
            storage is None
            or not isinstance(key, Tensor)
            or not isinstance(value, Tensor)
            or key.dtype != self.dtype
            or not storage.serves(key, value, self.size)
        ):
            self._expect_tokens(key, value)

    def _expect_tokens(self, key: Tensor, value: Tensor) -> None:
        """Check keys and values ``[B, H, Q, D]`` against each other and the first update."""
        known = self._known_sizes()
        sizes = expect("key", key, "B H Q Dk", dtype=self._dtypes, device=self._device, **known)
        expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, **sizes)
        if not sizes["B"]:
            raise ShapeError(f"key must have at least one sequence, got {list(key.shape)}")

    def _known_sizes(self) -> dict[str, int]:
        """Sizes that every token must have."""
        known = {} if self.storage is None else self.storage.sizes
        return known | {"B": self.size} if self.size else known

    @property
    def _dtypes(self) -> torch.dtype | tuple[torch.dtype, ...]:
        """Accepted dtypes of new tokens."""
        return self.dtype or FLOAT_DTYPES

    @property
    def _device(self) -> torch.device | None:
        return None if self.storage is None else self.storage.device

    def _has_rows(self) -> bool:
        self.expect_settled()
        return self.size > 0


def expect_config(name: str, value: int, low: int) -> int:
    """``value`` if it is an int of at least ``low``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an int of at least {low}, got {value!r}")
    return value


def cropped_length(num_tokens: int, length: int) -> int:
    """Number of ``length`` tokens that ``crop(num_tokens)`` keeps.

    Raises:
        ArgumentError: ``num_tokens`` is no int.
    """
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise ArgumentError(f"num_tokens must be an int, got {num_tokens!r}")
    return max(length + num_tokens, 0) if num_tokens < 0 else min(num_tokens, length)
