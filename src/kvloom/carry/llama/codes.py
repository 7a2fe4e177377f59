"""q8_0 and q4_0 as int8 codes of ``KVCache`` and back, none of them changed.

Element j of a head with adjacent pairs is element j // 2 + (j % 2) * D / 2 of one with halves: the bits of
its index turn by one place if D is a power of two. A Hadamard matrix in Sylvester's order is the same after
such a change of both of its indices, so a rotated vector is permuted as any other. A block of 32 adjacent
elements is 16 of each half, so groups of 16 have its scale twice.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvloom.carry.carried import Int8Codes
from kvloom.carry.llama.ggml import BLOCK, GgmlType, fits, rows_of
from kvloom.carry.rope_pairs import to_adjacent, to_halves
from kvloom.errors import ArgumentError
from kvloom.quant.rotation import block_of


def can_be_int8(head_dim: int, is_permuted: bool, rotation: int) -> bool:
    """Whether codes of a side are int8 codes of a ``KVCache``.

    Args:
        head_dim: Elements of a head vector, of which all or none are permuted.
        is_permuted: Whether pairs are adjacent.
        rotation: Elements rotated together; 0 for none.
    """
    if head_dim % BLOCK:
        return False
    if rotation and rotation != block_of(head_dim):
        return False
    return not (rotation and is_permuted and rotation != head_dim)


def int8_of(codes: Tensor, scales: Tensor, heads: int, is_permuted: bool, rotation: int) -> Int8Codes:
    """Codes in halves, given codes ``[T, n]`` and scales ``[T, n / 32]``."""
    codes, scales = (x.unflatten(-1, (heads, -1)) for x in (codes, scales))
    if is_permuted:
        codes, scales = to_halves(codes, codes.shape[-1]), torch.cat((scales, scales), -1)
    return Int8Codes(codes.contiguous(), scales.contiguous(), rotation)


def coded_rows(vectors: Int8Codes, kind: GgmlType, is_permuted: bool, rotation: int) -> Tensor:
    """Rows of a kind of codes, ``[T, bytes]`` uint8.

    Raises:
        ArgumentError: the vectors have another rotation, several scales in a block of 32, or codes that the
            kind has not.
    """
    if not fits(vectors.codes, kind):
        raise ArgumentError(
            f"kind must hold codes of 8 bits without rounding, got {kind.name}: rounding was not asked for"
        )
    if vectors.rotated != rotation:
        raise ArgumentError(
            f"kind must hold codes rotated by {vectors.rotated or 'none'} without rounding, got {kind.name} "
            f"rotated by {rotation or 'none'}: rounding was not asked for"
        )
    order: Callable[[Tensor], Tensor] = (
        (lambda x: to_adjacent(x, x.shape[-1])) if is_permuted else (lambda x: x)
    )
    codes = order(vectors.codes).flatten(1)
    whole = order(vectors.scales.repeat_interleave(vectors.group, -1)).flatten(1).unflatten(-1, (-1, BLOCK))
    if not torch.equal(whole, whole[..., :1].expand_as(whole)):
        raise ArgumentError(
            f"kind must hold codes of groups of {vectors.group} without rounding, got {kind.name}, of which "
            f"{BLOCK} elements {'of adjacent pairs ' if is_permuted else ''}share a scale: rounding was not "
            f"asked for"
        )
    return rows_of(codes, whole[..., 0], kind)
