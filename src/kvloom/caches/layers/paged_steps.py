"""How tokens of a step are stored in pages: those that fill a window alone, and those of a residual window.

Shapes: B sequences, Q new tokens of each, H heads, Dk and Dv head dims.
"""

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import first_seen
from kvloom.caches.rows.sequences import Sequences
from kvloom.caches.tensors.storage import Storage
from kvloom.caches.tensors.token_index import BLOCK, PARTIAL, AlignedStep, TokenIndex
from kvloom.caches.tensors.tokens import Exact, Tokens
from kvloom.core.indexing import CacheIndex
from kvloom.core.views import detached
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import store_plain
from kvloom.ops.fast.steps import store_step


def holding(sequences: Sequences, num_tokens: int) -> Sequences:
    """Sequences that match a layer's tokens: those before the step if only other layers made it."""
    previous = sequences.previous
    is_behind = previous is not None and previous.size and num_tokens <= previous.num_positions
    return previous if previous is not None and is_behind else sequences


def store_beyond_window(
    key: Tensor, value: Tensor, storage: Storage, sequences: Sequences, start: int
) -> tuple[Storage, TokenIndex]:
    """Store new tokens that fill a window alone: all in a storage of this step, the last in pages, too.

    Args:
        key: ``[B, H, Q, Dk]``.
        value: ``[B, H, Q, Dv]``.
        storage: The tensors of the pages.
        sequences: Rows that have pages for the last tokens.
        start: Position of the first new token.

    Returns:
        The storage of the step, and the slots in it that attention reads.
    """
    previous = sequences.previous or sequences
    rows, num_new, device = key.shape[0], key.shape[2], key.device
    end = start + num_new
    first = first_seen(start, sequences.window)
    # Number, in its sequence, of the token in column 0; negative if that column is empty. Blocks of a
    # sequence begin at multiples of BLOCK.
    token = first - torch.tensor(sequences.begins, device=device).unsqueeze(1)
    block = token // BLOCK * BLOCK
    size = -(-(end - first + BLOCK - 1) // BLOCK) * BLOCK
    step = storage.like(size)
    step.reserve(rows, 1)
    row_starts = torch.arange(rows, device=device).unsqueeze(1) * size
    slots = row_starts + token - block + torch.arange(end - first, device=device)
    if start > first:
        old = previous.place(first, start, storage).slots
        ops.copy(storage.view, old.flatten(), step.view, slots[:, : start - first].flatten())
    positions = token + torch.arange(start - first, end - first, device=device)
    step.store(key, value, slots[:, start - first :].contiguous(), positions)
    for b, column in enumerate(sequences.first_held(first)):
        if column < end:
            target = sequences.place(column, end, storage).slots[b]
            ops.copy(step.view, slots[b, column - first :].contiguous(), storage.view, target)
    # A sequence that begins among the new tokens has placeholders in front.
    base = torch.minimum(token.clamp(min=0), token + start - first) // PARTIAL * PARTIAL
    blocks = base - block + torch.arange(0, PARTIAL + end - first, BLOCK, device=device)
    index = CacheIndex(row_starts + blocks.clamp(0, size - BLOCK), None, BLOCK)
    origins = (token - base).squeeze(1)
    begins = -token.clamp(max=0).squeeze(1) if max(sequences.begins) > start else None
    lengths, position = origins + end - first, base.squeeze(1)
    spans = None
    if begins is None:
        counted = [(first - begin) - min(max(first - begin, 0), start - begin) // PARTIAL * PARTIAL
                   for begin in sequences.begins]  # fmt: skip
        spans = tuple((origin, origin + end - first, 0) for origin in counted)
    return step, TokenIndex(
        index, lengths, end - first, origins, begins=begins, first_position=position, spans=spans
    )


def store_newest(
    residual: Sequences, exact: Storage, key: Tensor, value: Tensor, start: int, num_newest: int
) -> Exact:
    """Store new tokens from position ``start`` on in a residual window.

    Returns:
        The part of it that attention reads; ``num_newest`` is its length, the query included.
    """
    end = start + key.shape[2]
    if residual.previous is not None and end > start:
        known = residual.previous.known(start, exact.device, is_read=True)
        for row, old in zip(residual.rows, residual.previous.rows, strict=False):  # none before a text
            row.is_exact = old.is_exact
        newest, columns = store_beyond_window(key, value, exact, residual, start)
        return Exact(Tokens(newest.view, columns), num_newest, known)
    columns = residual.place(first_seen(start, residual.window), end, exact, end - start)
    return store_exact(exact, key, value, residual.begin(start, end, exact, columns), num_newest)


def store_exact(exact: Storage, key: Tensor, value: Tensor, step: AlignedStep, num_newest: int) -> Exact:
    """``store_newest`` in the slots of a step."""
    if key.requires_grad or value.requires_grad:
        key, value = detached(key), detached(value)
    kept = value if exact.has_values else None
    store = store_step if key.device.type in steps.DEVICES else store_plain
    if not store(key, kept, step.slots, exact.view, False):
        exact.store(key, value, step.slots)
    return Exact(Tokens(exact.view, step.visible), num_newest, step.known)


def held_newest(residual: Sequences, exact: Storage, end: int, num_newest: int) -> Exact | None:
    """What a token at position ``end`` reads of a residual window, without itself; ``None`` if nothing."""
    rows, first = holding(residual, end), first_seen(end, residual.window)
    if first == end:
        return None
    known = rows.known(end, exact.device, is_read=False)
    return Exact(Tokens(exact.view, rows.place(first, end, exact)), num_newest, known)
