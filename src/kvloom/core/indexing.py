"""Slot of token t of sequence b: five published index formats in one class.

=============  ==========================  =======================================
format         tensor                      slot(b, t)
=============  ==========================  =======================================
offset         starts ``[B]``              ``starts[b] + t``
page table     first slots ``[B, P]``      ``table[b, t // size] + t % size``
block table    block ids ``[B, P]``        ``table[b, t // size] * size + t % size``
token table    slots ``[sum(lengths)]``    ``table[row_starts[b] + t]``
slot mapping   slots ``[T]``               given for each token
=============  ==========================  =======================================

A token table is a page table with page size 1 and ragged rows, and offset mode is one endless page, so a
``CacheIndex`` is a table of first slots and a page size. Slots are int64 before anything is multiplied.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, INT64_END, expect, expect_tensor
from kvloom.errors import ArgumentError, ShapeError

ENDLESS: Final = 1 << 62
"""Page size of offset mode."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheIndex:
    """Slots of a batch of sequences: ``slot(b, t) = table[row(b) + t // page_size] + t % page_size``.

    Attributes:
        table: First slot of each page, ``[B, P]``; or ``[N]`` with ragged rows. int64 or int32. Entries past
            the last page of a sequence are padding and never read.
        row_starts: Start of each row of a ragged ``table``, ``[B]`` or longer; ``None`` if ``table`` is 2-D.
        page_size: Token slots in a page.
    """

    table: Tensor
    row_starts: Tensor | None
    page_size: int

    @classmethod
    def offset(cls, starts: Tensor, *, name: str = "starts") -> "CacheIndex":
        """Index of sequences in contiguous slots from ``starts[b]``, ``[B]``; errors call it ``name``."""
        expect(name, starts, "B", dtype=INDEX_DTYPES)
        return cls(starts.unsqueeze(1), None, ENDLESS)

    @classmethod
    def pages(cls, table: Tensor, page_size: int, *, name: str = "table") -> "CacheIndex":
        """Index by the *first slot* of each page, ``table[b, p]``, ``[B, P]``; errors call it ``name``."""
        expect(name, table, "B P", dtype=INDEX_DTYPES)
        return cls(table, None, _expect_size("page_size", page_size))

    @classmethod
    def blocks(cls, table: Tensor, block_size: int) -> "CacheIndex":
        """Index by the *id* of each block, ``table[b, p]``, ``[B, P]``; id i begins at ``i * block_size``."""
        expect("table", table, "B P", dtype=INDEX_DTYPES)
        _expect_size("block_size", block_size)
        # No block beyond the largest slot, so that no product overflows.
        largest = (INT64_END - 1) // block_size
        return cls(table.long().clamp(-1, largest) * block_size, None, block_size)

    @classmethod
    def tokens(cls, table: Tensor, row_starts: Tensor, *, name: str = "table") -> "CacheIndex":
        """Index by a token table of slots, ``table[row_starts[b] + t]``; ``row_starts`` is ``[B + 1]``.

        Errors call the table ``name``.
        """
        expect(name, table, "N", dtype=INDEX_DTYPES)
        expect("row_starts", row_starts, "B+1", dtype=INDEX_DTYPES, device=table.device)
        return cls(table, row_starts, 1)

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Slots ``[T]`` int64 of tokens ``position[i]`` of sequences ``sequence[i]``, both ``[T]`` int64."""
        page = position // self.page_size
        if self.row_starts is None:
            first = self.table[sequence, page]
        else:
            first = self.table[self.row_starts[sequence] + page]
        return first.long() + position % self.page_size


def _expect_size(name: str, size: int) -> int:
    """Check the number of slots in a page, a plain int: kernels are compiled for it."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"{name} must be at least 1, got {size!r}")
    if size >= INT64_END:
        raise ArgumentError(f"{name} must be below {INT64_END}, got {size}")
    return size


def check_index(name: str, index: CacheIndex, lengths: Tensor, num_slots: int) -> None:
    """Check on the host that the pages of ``lengths`` ``[B]`` tokens of each sequence are in the cache.

    Raises:
        ArgumentError: a row has too few pages, or a token's slot is outside ``[0, num_slots)``.
    """
    lengths = lengths.long()
    if index.row_starts is not None:
        starts = index.row_starts[: len(lengths)].long()
        outside = (lengths > 0) & ((starts < 0) | (starts > index.table.shape[0] - lengths))
        for b in outside.nonzero().flatten().tolist()[:1]:
            raise ArgumentError(
                f"{name} must hold row {b} of {int(lengths[b])} entries from {int(starts[b])} on, "
                f"got {index.table.shape[0]} entries"
            )
        tokens = index.slots(*ragged_positions(prefix_sums(lengths)))
        check_slots(name, tokens, num_slots)
        return
    num_pages = -(-lengths // index.page_size)
    if bool((num_pages > index.table.shape[1]).any()):
        b = int(num_pages.argmax())
        raise ArgumentError(
            f"{name} must have {int(num_pages[b])} pages of {index.page_size} for the {int(lengths[b])} "
            f"tokens of sequence {b}, got {index.table.shape[1]}"
        )
    most = max([0, *num_pages.tolist()])
    page = torch.arange(most, device=lengths.device)
    used = page < num_pages.unsqueeze(1)
    # The first position of a page is sure to fit int64 only where the page is used.
    begin = torch.where(used, page, 0) * index.page_size
    held = torch.where(used, (lengths.unsqueeze(1) - begin).clamp(max=index.page_size), 0)
    first = index.table[: len(lengths), :most].long()
    # No sum in the comparison, since a padding entry may be the largest integer.
    wrong = (held > 0) & ((first < 0) | (first > num_slots - held))
    if bool(wrong.any()):
        b, p = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"{name} must be in [0, {num_slots}) for every token, got first slot {int(first[b, p])} for the "
            f"{int(held[b, p])} tokens of page {p} of sequence {b}"
        )


def prefix_sums(lengths: Tensor) -> Tensor:
    """Prefix sums ``[B + 1]`` int64 of lengths ``[B]``, from 0 on."""
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))


def ragged_positions(
    starts: Tensor, first: Tensor | None = None, *, total: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sequence and position of each packed token.

    Args:
        starts: ``[B + 1]``, tokens of sequence b are ``starts[b]:starts[b + 1]``.
        first: Position of the first packed token of each sequence, ``[B]``; 0 if ``None``.
        total: ``starts[B]``, if it is known without reading the tensor.

    Returns:
        ``(sequence, position)``, both ``[total]`` int64.
    """
    row = torch.arange(int(starts[-1]) if total is None else total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].long().contiguous(), row, right=True)
    sequence = sequence.clamp(max=starts.shape[0] - 2)  # a token after the end counts as the last sequence's
    position = row - starts.long()[sequence]
    return sequence, position if first is None else position + first.long()[sequence]


def check_slots(name: str, slots: Tensor, num_slots: int, *, skip_negative: bool = False) -> None:
    """Check on the host that ``slots`` are in the cache.

    Raises:
        ArgumentError: a slot is outside ``[0, num_slots)``; names the first such token.
    """
    if not slots.numel():
        return
    low, high = torch.aminmax(slots)
    if int(high) < num_slots and (skip_negative or low >= 0):
        return
    slots = slots.long()  # an int32 tensor converts the number to 32 bits for a comparison
    bad = (slots >= num_slots) if skip_negative else (slots >= num_slots) | (slots < 0)
    token = int(bad.nonzero()[0, 0])
    raise ArgumentError(f"{name} must be in [0, {num_slots}), got {int(slots[token])} for token {token}")


def check_starts(name: str, starts: list[int]) -> None:
    """Check the starts of the sequences of a ragged batch.

    Raises:
        ArgumentError: they do not begin with 0, or decrease.
    """
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ArgumentError(f"{name} must begin with 0 and never decrease, got {starts}")


def check_new(name: str, num_new: list[int], num_stored: list[int], has_positions: list[bool]) -> None:
    """Check that no sequence has more new tokens than stored ones, where the positions of queries matter.

    Causal masks, windows and ALiBi use a query's position among the stored tokens, which would be negative.
    Without these a query attends to every stored token.

    Raises:
        ArgumentError: names the first such sequence.
    """
    for b, (new, stored, matters) in enumerate(zip(num_new, num_stored, has_positions, strict=True)):
        if new > stored and matters:
            raise ArgumentError(f"{name} must give sequence {b} at least its {new} new tokens, got {stored}")


def check_distinct(name: str, slots: Tensor) -> None:
    """Check that no slot is written twice in one call. Costs a sort.

    Raises:
        ArgumentError: names a slot that occurs more than once.
    """
    ordered = slots[slots >= 0].sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise ArgumentError(f"{name} must be distinct, got slot {int(twice[0])} more than once")


def expect_slots(name: str, slots: Tensor, num_tokens: int | None, device: torch.device) -> None:
    """Check shape, dtype and device of a slot mapping ``[T]``.

    Raises:
        ShapeError: another rank, length, dtype or device.
    """
    expect_tensor(name, slots)
    if slots.ndim != 1 or slots.dtype not in INDEX_DTYPES or slots.device != device:
        expect(name, slots, "T", dtype=INDEX_DTYPES, device=device)
    if num_tokens is not None and slots.shape[0] != num_tokens:
        raise ShapeError(f"{name} must be [{num_tokens}], one slot for each token, got {list(slots.shape)}")
