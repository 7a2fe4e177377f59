"""A layer of fixed storage, for which a decode step compiles once: its length is a tensor and no number."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvloom.caches.layers import Form, Layer, expect_config
from kvloom.caches.memory import free_bytes, is_exhausted, outside_inference_mode, too_long
from kvloom.caches.words import counted
from kvloom.core.checks import expect_range
from kvloom.errors import StateError


class StaticLayer(Layer):
    """Storage of ``max_length`` columns that never moves; ``update`` returns all of them.

    Columns behind the stored tokens are 0 and must be hidden by the mask. The length is a tensor, so that a
    decode step compiles once: ``allocate`` before the first compiled step. Without compilation each update
    reads that tensor, which waits for an accelerator.

    Args:
        max_length: Tokens of each sequence that fit.
    """

    _num_fixed = "all that were allocated"

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = expect_config("max_length", max_length, 1)
        self._tensors: tuple[Tensor, Tensor] | None = None
        with outside_inference_mode():
            self._length = torch.zeros((), dtype=torch.int64)

    def allocate(
        self,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        """Take the memory now, zeroed; the first ``update`` does so otherwise.

        Raises:
            StateError: it was taken before.
            ArgumentError: a size is not at least 1.
        """
        if self._tensors is not None:
            raise StateError("allocate must come before the first update and only once")
        sizes = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            expect_range(name, size, 1)
        self._allocate(batch, heads, key_dim, value_dim, dtype, device)
        # The device of a tensor has its index ("cuda" becomes "cuda:0").
        self._form = Form(batch, heads, key_dim, value_dim, dtype, self._length.device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._tensors is None else sum(x.nbytes for x in self._tensors)

    @property
    def num_held(self) -> int:
        """Tokens in the first columns of the storage; reads a tensor."""
        return int(self._length)

    @property
    def _length_given(self) -> tuple[str, int]:
        """The argument that says how much memory is taken, and its value."""
        return "max_length", self.max_length

    def get_seq_length(self) -> Tensor:
        """N, a new 0-d int64 tensor."""
        return self._length.clone()

    def get_max_length(self) -> int:
        """``max_length``."""
        return self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | Tensor]:
        """``(max_length, 0)``."""
        return self.max_length, 0

    def _reset(self) -> None:
        """Storage and shapes stay."""
        self._length.zero_()
        for x in self._tensors or ():
            x.zero_()

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        num_new = key.shape[2]
        if not torch.compiler.is_compiling() and (length := int(self._length)) + num_new > self.max_length:
            raise StateError(
                f"max_length must hold {counted(num_new, 'more token')}, got {self.max_length} with {length} "
                "taken"
            )
        if self._tensors is None:
            self._allocate(form.batch, form.heads, form.key_dim, form.value_dim, form.dtype, form.device)
        keys, values = self._stored()
        positions = self._length + torch.arange(num_new, device=keys.device)
        keys.index_copy_(2, positions, key)
        values.index_copy_(2, positions, value)
        self._length.add_(num_new)
        return keys, values

    def _stored(self) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            raise StateError("no tokens were stored yet")
        return self._tensors

    def _num_columns(self) -> int:
        return self.max_length

    def _replace(self, new: Mapping[int, Tensor], form: Form) -> None:
        for side, x in new.items():
            self._stored()[side].copy_(x)  # the addresses stay

    def _truncate(self, num_tokens: int) -> None:
        self._length.fill_(num_tokens)
        for x in self._tensors or ():
            x[:, :, num_tokens:] = 0

    def _take(self, rows: Tensor) -> None:
        key, value = (x.index_select(0, rows) for x in self._stored())
        if rows.shape[0] == self._stored()[0].shape[0]:  # the addresses stay
            for x, new in zip(self._stored(), (key, value), strict=True):
                x.copy_(new)
        else:
            with outside_inference_mode():
                self._tensors = key.clone(), value.clone()

    def _allocate(
        self,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        try:
            with outside_inference_mode():
                key, value = (
                    torch.zeros((batch, heads, self.max_length, dim), dtype=dtype, device=device)
                    for dim in (key_dim, value_dim)
                )
                self._length = self._length.to(key.device)
        except (MemoryError, RuntimeError) as error:
            if not is_exhausted(error):
                raise
            asked = batch * heads * self.max_length * (key_dim + value_dim) * dtype.itemsize
            free, what = free_bytes(torch.empty(0, device=device).device), counted(batch, "sequence")
            raise too_long(*self._length_given, asked, 0, free, f"{what} in one layer") from error
        self._tensors = key, value
