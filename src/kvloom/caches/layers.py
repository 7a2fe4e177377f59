"""One layer of a cache: takes keys and values of new tokens, returns those that attention reads.

Letters: B sequences of one length, H key/value heads, Q new tokens of each sequence, N stored ones, Dk and Dv
head dims. Layers are for inference: nothing they return carries a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvloom.caches.assigning import SIDES, Assignment
from kvloom.core.checks import INDEX_DTYPES, can_read, expect, expect_range
from kvloom.errors import ArgumentError, ConfigError


@dataclass(frozen=True, slots=True)
class Form:
    """What the first update fixes: shapes, dtype and device of every later one."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class Layer(ABC):
    """Keys and values of B sequences of one length.

    The first update fixes B, H, both head dims, the dtype and the device.
    """

    is_sliding = False
    _num_fixed: str | None = None
    """Why ``keys`` can be assigned as many columns as it has and no others; ``None`` if any will do."""

    def __init__(self) -> None:
        self._form: Form | None = None
        self._assignment = Assignment()

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
        self._expect_settled()
        form = _expect_tokens(key, value, self._form)
        result = self._append(key.detach(), value.detach(), form)
        if self._form is None:
            self._form = form
        return result

    @property
    def keys(self) -> Tensor:
        """Keys as held, ``[B, H, n, Dk]``; raises StateError before the first update.

        Assigning replaces all of them by copies, quantized if the layer is. Where any number of tokens will
        do, another number is kept once ``values`` was assigned as many; until then every change raises.
        Raises ShapeError if B, H, Dk, dtype or device is another, or n is and must not be; nothing was
        changed.
        """
        return self._side(0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._assign(0, keys)

    @property
    def values(self) -> Tensor:
        """Values as held, ``[B, H, n, Dv]``; as ``keys``."""
        return self._side(1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self._assign(1, values)

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
    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """Columns that ``update`` of ``query_length`` tokens will return, and the position of the first.

        The position is a 0-d tensor in layers of fixed storage in which it moves.
        """

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
        self._expect_settled()
        length = int(self.get_seq_length())
        return max(length + num_tokens, 0) if num_tokens < 0 else min(num_tokens, length)

    def reorder(self, rows: Tensor) -> None:
        """Make sequence i what sequence ``rows[i]`` was; does nothing before the first update.

        Args:
            rows: ``[B]`` int64 or int32 on any device, repeats allowed.

        Raises:
            ArgumentError: ``rows`` does not fit; nothing was changed.
        """
        self._expect_settled()
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
        self._expect_settled()
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
        self._expect_settled()
        expect_range("n", n, 1)
        if self._form is not None and n > 1:
            self._take_rows(torch.arange(self._form.batch).repeat_interleave(n), self._form)

    def reset(self) -> None:
        """Forget all tokens."""
        self._assignment.clear()
        self._reset()

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _stored(self) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _truncate(self, num_tokens: int) -> None: ...

    @abstractmethod
    def _take(self, rows: Tensor) -> None: ...

    @abstractmethod
    def _replace(self, new: Mapping[int, Tensor], form: Form) -> None:
        """Hold copies of these keys (0), values (1) or both instead; one of them has as many columns."""

    def _side(self, side: int) -> Tensor:
        waiting = self._assignment.get(side)
        return self._stored()[side] if waiting is None else waiting

    def _assign(self, side: int, x: Tensor) -> None:
        name, form = SIDES[side], self._form
        if form is None:
            expect(name, x, "B H N D")
            held = None
        else:
            sizes = {"B": form.batch, "H": form.heads, "D": (form.key_dim, form.value_dim)[side]}
            expect(name, x, "B H N D", dtype=form.dtype, device=form.device, **sizes)
            held = self._num_columns()
        new = self._assignment.add(side, x.detach(), held, self._num_fixed)
        if new is not None:
            if form is None or len(new) == 2:
                form = _expect_tokens(new[0], new[1], form)
            self._replace(new, form)
            self._assignment.clear()
            self._form = form

    def _num_columns(self) -> int:
        """Columns of ``keys``."""
        return int(self.get_seq_length())

    def _expect_settled(self) -> None:
        self._assignment.expect_none(0 if self._form is None else self._num_columns())

    def _take_rows(self, rows: Tensor, form: Form) -> None:
        if can_read(rows) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < form.batch:
            raise ArgumentError(f"rows must be in [0, {form.batch}), got {rows.tolist()}")
        self._take(rows.to(form.device))
        self._form = replace(form, batch=rows.shape[0])


def expect_config(name: str, value: int, low: int) -> int:
    """``value`` if it is an int of at least ``low``, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an int of at least {low}, got {value!r}")
    return value


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
