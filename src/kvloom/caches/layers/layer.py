"""One layer of a cache: takes keys and values of new tokens, returns those that attention reads.

Shapes: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims. Layers are for inference: returned tensors have no gradient.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvloom.caches.format import first_seen
from kvloom.caches.layers.assigning import SIDES
from kvloom.caches.layers.changing import Changing
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.checks import FLOAT_DTYPES, expect
from kvloom.core.views import detached
from kvloom.errors import ShapeError, StateError


class _Side:
    """Stored keys (0) or values (1) of a layer, see ``Layer``."""

    def __init__(self, side: int) -> None:
        self._side = side

    def __get__(self, layer: "Layer", owner: Any = None) -> Tensor:
        if (waiting := layer.assigned(self._side)) is not None:
            return waiting
        if layer.storage is None or layer.dtype is None:
            raise StateError("no tokens were stored yet")
        return layer._held(layer.dtype)[self._side]

    def __set__(self, layer: "Layer", x: Tensor) -> None:
        side, name, storage, known = self._side, SIDES[self._side], layer.storage, layer._known_sizes()
        sizes = {"B": known["B"]} if "B" in known else {}
        sizes |= {} if storage is None else {"H": known["H"], "D": known[("Dk", "Dv")[side]]}
        device = None if storage is None else storage.device
        expect(name, x, "B H N D", dtype=layer._dtypes, device=device, **sizes)
        held = None if storage is None else layer.num_columns
        new = layer.assignment.add(side, x.detach(), held, layer._num_fixed)
        if new is not None:
            if len(new) == 2:
                layer._expect_tokens(new[0], new[1])
            layer.replace(new)
            layer.assignment.clear()
            layer.dtype = x.dtype


class Layer(Changing):
    """Keys and values of B sequences of one length.

    The first update fixes B, H, both head dims, the dtype and the device.

    ``keys`` are the stored keys, ``[B, H, n, Dk]``: a view of the cache, or gathered and then read-only.
    Assigning replaces all of them by copies, quantized if the layer is. If another n is allowed, it takes
    effect once ``values``, ``[B, H, n, Dv]``, has the same n; until then every change raises. ShapeError if
    B, H, Dk, dtype or device differs, or n where it is fixed; nothing was changed. Reading raises StateError
    before the first update.

    Attributes:
        dtype: Dtype of the tokens; ``None`` before the first update.
    """

    keys, values = _Side(0), _Side(1)

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

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
        result: tuple[Tensor, Tensor] = self._add(detached(key), detached(value), is_gathered=True)
        self.dtype = key.dtype
        return result

    def append(self, key: Tensor, value: Tensor) -> Tokens:
        """Store new tokens as ``update``, and return their slots, to attend in place or to gather.

        Returns:
            The tokens that attention reads, the new ones included. Valid until the layer changes.
        """
        self._expect_fits(key, value)
        result: Tokens = self._add(detached(key), detached(value), is_gathered=False)
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
    def residual_storage(self) -> Storage | None:
        """The tensors of the residual window; ``None`` without one."""
        return None

    @property
    def nbytes_recent(self) -> int:
        """Bytes of the residual window among ``nbytes``: the last tokens, stored unquantized beside codes."""
        return 0 if self.residual_storage is None else self.residual_storage.nbytes

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
        first = first_seen(self.num_tokens, self.window)
        return self.num_tokens - first + query_length, first

    def assigned(self, side: int) -> Tensor | None:
        """Keys (0) or values (1) that were assigned while the other side still has another length."""
        return self.assignment.get(side)

    @abstractmethod
    def replace(self, new: Mapping[int, Tensor]) -> None:
        """Replace the stored keys (0), values (1) or both by these, ``[B, H, n, D]``.

        If n changes, where that is allowed, both must be given.
        """

    @abstractmethod
    def _add(self, key: Tensor, value: Tensor, *, is_gathered: bool) -> Any:
        """Store new tokens that fit, and return what ``update`` (``is_gathered``) or ``append`` returns."""

    @abstractmethod
    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Stored keys and values, as of the properties."""

    @property
    def _num_fixed(self) -> str | None:
        """Reason why the number of tokens of ``keys`` cannot change; ``None`` if it can."""
        return None if self.window is None else "those that the window holds"

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
        known, device = self._known_sizes(), None if self.storage is None else self.storage.device
        sizes = expect("key", key, "B H Q Dk", dtype=self._dtypes, device=device, **known)
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
