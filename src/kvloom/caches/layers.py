"""One layer of a cache: takes keys and values of new tokens, returns those that attention reads.

Letters: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims. Layers are for inference: nothing they return carries a gradient.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, can_read, expect, expect_range
from kvloom.errors import ArgumentError, ConfigError, StateError

_MIN_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Form:
    """What the first update fixes: shapes, dtype and device of every later one."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class Columns:
    """Consecutive tokens, keys ``[B, H, n, Dk]`` and values ``[B, H, n, Dv]``, appended and dropped in place.

    Storage grows by half, so that appending n tokens one by one moves O(n) columns and allocates O(log n)
    times. Columns are never moved inside a storage: a view stays as it was until ``truncate``.

    Args:
        limit: Columns of storage that are not exceeded while fewer tokens are held; ``None`` for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def capacity(self) -> int:
        """Columns allocated."""
        return 0 if self._tensors is None else self._tensors[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._tensors is None else sum(x.nbytes for x in self._tensors)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Store ``[B, H, Q, D]`` behind the last column."""
        needed = len(self) + key.shape[2]
        if self._tensors is None or self._end + key.shape[2] > self.capacity:
            capacity = max(self.capacity + self.capacity // 2, _MIN_COLUMNS)
            self._move(
                key, value, max(needed, capacity if self._limit is None else min(capacity, self._limit))
            )
        start, self._end = self._end, self._end + key.shape[2]
        for target, new in zip(self._tensors or (), (key, value), strict=True):
            target[:, :, start : self._end] = new

    def view(self, count: int) -> tuple[Tensor, Tensor]:
        """The last ``count`` columns, views of the storage."""
        if self._tensors is None:
            raise StateError("no tokens were stored yet")
        key, value = (x[:, :, self._end - count : self._end] for x in self._tensors)
        return key, value

    def drop_front(self, count: int) -> None:
        """Forget the first ``count`` columns."""
        self._start += count

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` columns."""
        self._end = self._start + count

    def take(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was, in a new storage."""
        if self._tensors is not None:
            key, value = (x.index_select(0, rows) for x in self.view(len(self)))
            self._start = self._end
            self._move(key, value, self.capacity)
            self.append(key, value)

    def clear(self) -> None:
        """Give the storage back."""
        self._tensors, self._start, self._end = None, 0, 0

    def _move(self, key: Tensor, value: Tensor, capacity: int) -> None:
        """Move what is held to the front of a new storage of the shapes of ``key`` and ``value``."""
        count = len(self)
        with outside_inference_mode():
            new = tuple(x.new_empty((*x.shape[:2], capacity, x.shape[3])) for x in (key, value))
        if count:
            for target, source in zip(new, self.view(count), strict=True):
                target[:, :, :count] = source
        self._tensors, self._start, self._end = (new[0], new[1]), 0, count


class Layer(ABC):
    """Keys and values of B sequences of one length.

    The first update fixes B, H, both head dims, the dtype and the device.
    """

    is_sliding = False

    def __init__(self) -> None:
        self._form: Form | None = None

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens and return the keys and values that their attention reads.

        Args:
            key: ``[B, H, Q, Dk]``.
            value: ``[B, H, Q, Dv]``, dtype and device of ``key``.

        Returns:
            ``(keys, values)``, ``[B, H, n, Dk]`` and ``[B, H, n, Dv]`` with n as ``get_mask_sizes(Q)`` said.
            They may be views of the cache: ``crop`` followed by ``update`` changes them.

        Raises:
            ShapeError: shape, dtype or device is not that of the first update; nothing was written.
            StateError: the layer is full; nothing was written.
        """
        form = _expect_tokens(key, value, self._form)
        result = self._append(key.detach(), value.detach(), form)
        if self._form is None:
            self._form = form
        return result

    @property
    def keys(self) -> Tensor:
        """Keys as held, ``[B, H, n, Dk]``; raises StateError before the first update."""
        return self._stored()[0]

    @property
    def values(self) -> Tensor:
        """Values as held, ``[B, H, n, Dv]``; raises StateError before the first update."""
        return self._stored()[1]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, scales included."""

    @abstractmethod
    def get_seq_length(self) -> int | Tensor:
        """Tokens seen of each sequence, whether or not they are still stored."""

    @abstractmethod
    def get_max_length(self) -> int:
        """Tokens that can be seen at once; -1 for no bound."""

    @abstractmethod
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that ``update`` of ``query_length`` tokens will return, and the position of the first."""

    def crop(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, or, if negative, remove the last ``-num_tokens``.

        Keeping more than there are keeps all; removing more than there are removes all.

        Raises:
            ArgumentError: ``num_tokens`` is no int.
            StateError: the layer no longer holds what later tokens would see; nothing was changed.
        """
        kept = self.expect_croppable(num_tokens)
        if kept < int(self.get_seq_length()):
            self._truncate(kept)

    def expect_croppable(self, num_tokens: int) -> int:
        """The tokens that ``crop`` would keep; raises as it would and changes nothing."""
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
            raise ArgumentError(f"num_tokens must be an int, got {num_tokens!r}")
        length = int(self.get_seq_length())
        return max(length + num_tokens, 0) if num_tokens < 0 else min(num_tokens, length)

    def reorder(self, rows: Tensor) -> None:
        """Make sequence i what sequence ``rows[i]`` was; does nothing before the first update.

        Args:
            rows: ``[B]`` int64 or int32 on any device, repeats allowed.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        if self._form is not None:
            expect("rows", rows, "B", dtype=INDEX_DTYPES, B=self._form.batch)
            self._take_rows(rows, self._form)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences at ``rows``, in that order; does nothing before the first update.

        Args:
            rows: ``[R]`` int64 or int32, or a bool mask ``[B]``, on any device.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        if self._form is not None:
            if isinstance(rows, Tensor) and rows.dtype == torch.bool:
                expect("rows", rows, "B", B=self._form.batch)
                rows = rows.nonzero().flatten()
            expect("rows", rows, "R", dtype=INDEX_DTYPES)
            self._take_rows(rows, self._form)

    def repeat_interleave(self, n: int) -> None:
        """Repeat each sequence ``n`` times in a row; does nothing before the first update.

        Raises:
            ArgumentError: ``n`` is not at least 1.
        """
        expect_range("n", n, 1)
        if self._form is not None and n > 1:
            self._take_rows(torch.arange(self._form.batch).repeat_interleave(n), self._form)

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    @abstractmethod
    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _stored(self) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _truncate(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _take(self, rows: Tensor) -> None: ...

    def _take_rows(self, rows: Tensor, form: Form) -> None:
        if can_read(rows) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < form.batch:
            raise ArgumentError(f"rows must be in [0, {form.batch}), got {rows.tolist()}")
        self._take(rows.to(form.device))
        self._form = replace(form, batch=rows.shape[0])


class _ColumnsLayer(Layer):
    """A layer whose tokens are columns as they came."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self._columns = columns

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._columns.nbytes

    def reset(self) -> None:
        """Forget all tokens and shapes; the memory is given back."""
        self._columns.clear()
        self._form = None

    def _stored(self) -> tuple[Tensor, Tensor]:
        return self._columns.view(len(self._columns))

    def _take(self, rows: Tensor) -> None:
        self._columns.take(rows)


class DynamicLayer(_ColumnsLayer):
    """Every token, in storage that grows by half when it is full; ``update`` returns views of N columns."""

    def __init__(self) -> None:
        super().__init__(Columns())

    def get_seq_length(self) -> int:
        """N."""
        return len(self._columns)

    def get_max_length(self) -> int:
        """-1: no bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(N + Q, 0)``."""
        return len(self._columns) + query_length, 0

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        self._columns.append(key, value)
        return self._stored()

    def _truncate(self, num_tokens: int) -> None:
        self._columns.truncate(num_tokens)


class SlidingWindowLayer(_ColumnsLayer):
    """The tokens that later ones can see, when each sees ``window`` tokens, itself included.

    Between updates the last ``window - 1 + rollback`` tokens are held, in storage of at most
    ``2 * (window + rollback)`` columns, also after a long prefill.

    Args:
        window: Tokens that a token sees, itself included.
        rollback: How many of the last tokens ``crop`` can remove, as those of a rejected draft.
    """

    is_sliding = True

    def __init__(self, window: int, rollback: int = 0) -> None:
        self.window = expect_config("window", window, 1)
        self._limit = 2 * (window + expect_config("rollback", rollback, 0))
        super().__init__(Columns(self._limit))
        self._hold = window - 1 + rollback
        self._seen = 0

    def get_seq_length(self) -> int:
        """Tokens seen, more than are held."""
        return self._seen

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(min(seen, window - 1) + Q, max(seen - window + 1, 0))``."""
        return min(self._seen, self.window - 1) + query_length, max(self._seen - self.window + 1, 0)

    def reset(self) -> None:
        """Forget all tokens and shapes; the memory is given back."""
        super().reset()
        self._seen = 0

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        num_new, count = key.shape[2], self.get_mask_sizes(key.shape[2])[0]
        held = len(self._columns) + num_new
        if held <= self._limit:
            self._columns.append(key, value)
            result = self._columns.view(count)
            self._columns.drop_front(max(held - self._hold, 0))
        else:  # a long prefill goes past the storage
            keys, values = key, value
            if len(self._columns):
                old = self._columns.view(len(self._columns))
                keys, values = torch.cat([old[0], key], 2), torch.cat([old[1], value], 2)
            result = keys[:, :, held - count :], values[:, :, held - count :]
            self._columns.clear()
            self._columns.append(keys[:, :, held - self._hold :], values[:, :, held - self._hold :])
        self._seen += num_new
        return result

    def expect_croppable(self, num_tokens: int) -> int:
        """As for any layer, but what the next token sees must still be held."""
        kept = super().expect_croppable(num_tokens)
        start, first = self._seen - len(self._columns), max(kept - self.window + 1, 0)
        if first < min(kept, start):
            raise StateError(
                f"num_tokens must keep at least {start + self.window - 1} tokens or none, got {num_tokens}: "
                f"of {self._seen} tokens the first {start} are gone"
            )
        return kept

    def _truncate(self, num_tokens: int) -> None:
        self._columns.truncate(max(num_tokens - self._seen + len(self._columns), 0))
        self._seen = num_tokens


def expect_config(name: str, value: int, low: int) -> int:
    """``value`` if it is an int of at least ``low``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an int of at least {low}, got {value!r}")
    return value


def outside_inference_mode() -> AbstractContextManager[object]:
    """Tensors made here can be written inside and outside ``torch.inference_mode()``."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def _expect_tokens(key: Tensor, value: Tensor, form: Form | None) -> Form:
    """Check new tokens against each other and the first ones; returns their form."""
    if form is None:
        expect("key", key, "B H Q Dk")
    else:
        sizes = {"B": form.batch, "H": form.heads, "Dk": form.key_dim}
        expect("key", key, "B H Q Dk", dtype=form.dtype, device=form.device, **sizes)
    sizes = dict(zip("BHQ", key.shape[:3], strict=True))
    if form is not None:
        sizes["Dv"] = form.value_dim
    expect("value", value, "B H Q Dv", dtype=key.dtype, device=key.device, **sizes)
    if form is not None:
        return form
    return Form(key.shape[0], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
