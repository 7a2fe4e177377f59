"""Slots of tokens in the compressing scenarios: one run of consecutive slots for each (sequence, head).

Shapes: B sequences, H heads, T source tokens (padding included), L real length of a sequence, ``win`` its
``compress_lens`` and ``off`` its ``compress_seq_offset``; run ``p = b * H + h``.

=========  ======================================================  =================
mode       the run holds, in order                                 slots
=========  ======================================================  =================
Alibi      tokens ``L - win .. L``                                 ``win``
Rope       tokens ``0 .. off``, mean of the next ``win``, rest     ``L - win + 1``
Omni       tokens ``0 .. off``, rest after the next ``win``        ``L - win``
=========  ======================================================  =================

In Rope and Omni a run with ``off == -1``, ``win == 0`` or ``off == L`` is not compressed and holds all L
tokens.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, INT64_END, can_read, expect, expect_range, expect_tensor
from kvloom.core.indexing import CacheIndex, prefix_sums, ragged_positions
from kvloom.errors import ArgumentError, ShapeError

COMPRESSING: Final = ("Alibi", "Rope", "Omni")


class Runs(NamedTuple):
    """Runs of one call; tensors are ``[B, H]`` int64, but ``lengths`` is ``[B, 1]``; ``dtype`` as given."""

    mode: str
    dtype: torch.dtype
    lengths: Tensor
    win: Tensor
    off: Tensor

    @property
    def compressed(self) -> Tensor:
        """Mask of runs that drop or average a window, ``[B, H]`` bool; always true in Alibi."""
        if self.mode == "Alibi":
            return torch.ones_like(self.win, dtype=torch.bool)
        return (self.off != -1) & (self.win != 0) & (self.off != self.lengths)

    @property
    def num_slots(self) -> Tensor:
        """Number of slots of each run, ``[B, H]``."""
        if self.mode == "Alibi":
            return self.win
        shorter = self.lengths - self.win + (self.mode == "Rope")
        return torch.where(self.compressed, shorter, self.lengths)

    def check(self) -> None:
        """Check that windows are inside their sequence.

        Raises:
            ArgumentError: one is not; names the argument and the first such run.
        """
        for length in self.lengths[self.lengths < 0].tolist()[:1]:
            raise ArgumentError(f"seq_lens must be at least 0, got {length}")
        self._refuse((self.win < 0) | (self.win > self.lengths), "compress_lens", self.win)
        if self.mode != "Alibi":
            # Compared without a sum, which could overflow.
            late = self.compressed & (self.off > self.lengths - self.win)
            self._refuse((self.off < -1) | late, "compress_seq_offset", self.off)

    def _refuse(self, wrong: Tensor, name: str, values: Tensor) -> None:
        for b, h in wrong.nonzero().tolist()[:1]:
            raise ArgumentError(
                f"{name} must stay within the {int(self.lengths[b, 0])} tokens of sequence {b}, "
                f"got {int(values[b, h])} for head {h} (compress_lens {int(self.win[b, h])})"
            )

    def places(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Target slot of each source token.

        Args:
            sequence: ``[T]`` int64.
            position: ``[T]`` int64, position in its sequence; padding has ``position >= L``.

        Returns:
            ``(place, is_averaged)``, both ``[T, H]``: the place in the run, -1 for tokens that are not
            written; and whether Rope replaces the token and others by their mean, at the place of the first.
        """
        lengths, win, off = self.lengths[sequence], self.win[sequence], self.off[sequence]
        t = position.unsqueeze(1)
        real = (t < lengths).expand_as(win)
        if self.mode == "Alibi":
            kept = real & (t >= lengths - win)
            return torch.where(kept, t - (lengths - win), -1), torch.zeros_like(kept)
        window = self.compressed[sequence] & (t >= off) & (t < off + win)
        behind = self.compressed[sequence] & (t >= off + win)
        place = torch.where(behind, t - win + (self.mode == "Rope"), t)
        is_averaged = window if self.mode == "Rope" else torch.zeros_like(window)
        kept = real & (~window | (is_averaged & (t == off)))
        return torch.where(kept, place, -1), is_averaged


def read_runs(
    mode: str,
    seq_lens: Tensor | None,
    compress_lens: Tensor | None,
    compress_seq_offset: Tensor | None,
    *,
    heads: int = 0,
) -> Runs:
    """Check the shapes and dtypes of the arguments that describe runs, and convert them to ``[B, H]``.

    H follows from them; ``heads`` is used if there are no sequences.

    Raises:
        ArgumentError: an argument that ``mode`` needs is missing, or one is given that it does not use.
        ShapeError: rank, size, dtype or device does not fit.
    """
    if seq_lens is None:
        raise ArgumentError(f"seq_lens must be given in {mode}, got None")
    if compress_lens is None:
        raise ArgumentError(f"compress_lens must be given in {mode}, got None")
    if (compress_seq_offset is None) != (mode == "Alibi"):
        wanted = "None" if mode == "Alibi" else "given"
        raise ArgumentError(f"compress_seq_offset must be {wanted} in {mode}")
    batch = expect("seq_lens", seq_lens, "B", dtype=INDEX_DTYPES)["B"]
    num_told = _heads_of("compress_lens", compress_lens, batch, seq_lens)
    if batch and heads and num_told != heads:
        raise ShapeError(
            f"compress_lens must have an entry for each of {heads} heads of {batch} sequences, "
            f"got {list(compress_lens.shape)}"
        )
    heads = num_told if batch else heads
    win = compress_lens.long().reshape(batch, heads)
    off = torch.zeros_like(win)
    if compress_seq_offset is not None:
        if _heads_of("compress_seq_offset", compress_seq_offset, batch, seq_lens) != heads and batch:
            raise ShapeError(
                f"compress_seq_offset must have {batch * heads} entries as compress_lens, "
                f"got {list(compress_seq_offset.shape)}"
            )
        off = compress_seq_offset.long().reshape(batch, heads)
    return Runs(mode, seq_lens.dtype, seq_lens.long().unsqueeze(1), win, off)


def _heads_of(name: str, x: Tensor, batch: int, seq_lens: Tensor) -> int:
    """H of an index tensor ``[B * H]`` or ``[B, H]``."""
    expect_tensor(name, x)
    expect(name, x, "B H" if x.ndim == 2 else "B*H", dtype=seq_lens.dtype, device=seq_lens.device)
    fits = x.shape[0] == batch if x.ndim == 2 else (x.numel() % batch == 0 if batch else x.numel() == 0)
    if not fits:
        raise ShapeError(f"{name} must be [B * H] or [B, H] for B={batch} as seq_lens, got {list(x.shape)}")
    return x.shape[1] if x.ndim == 2 else x.numel() // max(batch, 1)


def run_lengths(
    scatter_mode: str, seq_lens: Tensor, compress_lens: Tensor, compress_seq_offset: Tensor | None = None
) -> Tensor:
    """Number of slots of the run of each (sequence, head), to lay them out before a call.

    Args:
        scatter_mode: ``"Alibi"``, ``"Rope"`` or ``"Omni"``.
        seq_lens: ``[B]`` int32 or int64.
        compress_lens: ``[B * H]`` or ``[B, H]``, dtype of ``seq_lens``.
        compress_seq_offset: The same in Rope and Omni, ``None`` in Alibi.

    Returns:
        ``[B * H]`` int64.

    Raises:
        ArgumentError, ShapeError: as ``scatter_pa_kv_cache``.
    """
    if scatter_mode not in COMPRESSING:
        raise ArgumentError(f"scatter_mode must be one of {COMPRESSING}, got {scatter_mode!r}")
    runs = read_runs(scatter_mode, seq_lens, compress_lens, compress_seq_offset)
    if can_read(seq_lens):
        runs.check()
    return runs.num_slots.flatten()


def plan_slots(lengths: Tensor, block_size: int = 1, start: int = 0) -> tuple[Tensor, int]:
    """Lay out runs one after the other, each from the first slot of a block.

    Args:
        lengths: Slots of each run, any shape, as from ``run_lengths``.
        block_size: Slots in a block; 1 leaves no gaps.
        start: First slot that may be used; the first run begins at the next block.

    Returns:
        ``(slot_mapping, end)``: the first slot of each run, int64 in the shape of ``lengths``, and the slot
        after the last block.

    Raises:
        ArgumentError: a length or ``start`` is negative, ``block_size`` is not positive, or a slot would
            exceed int64.
    """
    expect_range("block_size", block_size, 1, INT64_END)
    start = -(-expect_range("start", start, 0, INT64_END - block_size) // block_size) * block_size
    if lengths.dtype not in INDEX_DTYPES:
        raise ShapeError(f"lengths must be int64 or int32, got {lengths.dtype}")
    rounded = -(-lengths.long().flatten() // block_size) * block_size
    sums = rounded.cumsum(0)
    ends = sums + start
    if not torch.compiler.is_compiling():
        if bool((lengths < 0).any()):
            raise ArgumentError(f"lengths must not be negative, got {int(lengths.min())}")
        # The sum of two non-negative numbers is negative after an overflow.
        if any(bool((x < 0).any()) for x in (rounded, sums, ends)):
            raise ArgumentError(
                f"lengths must fit before slot 2**63 in blocks of {block_size} from slot {start} on, "
                f"got {lengths.tolist()}"
            )
    return (ends - rounded).reshape(lengths.shape), int(ends[-1]) if ends.shape[0] else start


def slot_mapping(block_table: Tensor, positions_start: Tensor, lengths: Tensor, block_size: int) -> Tensor:
    """Slots of new tokens whose sequences are stored in blocks.

    Args:
        block_table: Block ids ``[B, M]`` int32 or int64.
        positions_start: Position of the first new token of each sequence, ``[B]``.
        lengths: New tokens of each sequence, ``[B]``.
        block_size: Slots in a block.

    Returns:
        ``[sum(lengths)]`` int64, packed in batch order, for ``scatter_pa_kv_cache``.

    Raises:
        ShapeError: rank, size or dtype does not fit.
        ArgumentError: a token lies after the last column of its row, or its slot would exceed int64.
    """
    sizes = expect("block_table", block_table, "B M", dtype=INDEX_DTYPES)
    for name, x in (("positions_start", positions_start), ("lengths", lengths)):
        expect(name, x, "B", B=sizes["B"], dtype=INDEX_DTYPES, device=block_table.device)
    expect_range("block_size", block_size, 1, INT64_END)
    if not torch.compiler.is_compiling():
        _check_positions(positions_start.long(), lengths.long(), sizes["M"], block_size)
    sequence, position = ragged_positions(prefix_sums(lengths), positions_start)
    if not torch.compiler.is_compiling():
        used, last = block_table[sequence, position // block_size].long(), INT64_END // block_size - 1
        for block in used[used > last].tolist()[:1]:
            raise ArgumentError(f"block_table must name blocks up to {last}, got {block}")
    return CacheIndex.blocks(block_table, block_size).slots(sequence, position)


def _check_positions(first: Tensor, lengths: Tensor, num_blocks: int, block_size: int) -> None:
    """Check that tokens are inside the ``num_blocks`` blocks of their row."""
    if bool((lengths < 0).any()):
        raise ArgumentError(f"lengths must be at least 0, got {int(lengths.min())}")
    # Compared without a sum, which could overflow.
    room = min(num_blocks * block_size, INT64_END - 1)
    outside = (lengths > 0) & ((first < 0) | (first > room - lengths))
    for b in outside.nonzero().flatten().tolist()[:1]:
        raise ArgumentError(
            f"positions_start must keep every token in the {num_blocks} blocks of its row, got "
            f"{int(lengths[b])} tokens from position {int(first[b])} on with block_size {block_size}"
        )
