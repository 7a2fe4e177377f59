"""What llama.cpp's states do not say: the order of RoPE's pairs, and before 0.6.0 the rotation of codes.

The order belongs to an architecture: where llama.cpp turns adjacent pairs, its converter permutes the rows
of the projections, and keys come out permuted against those of transformers.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvloom.errors import ArgumentError

_ROTATED: Final = 64
"""Heads are rotated if their size is a multiple of it; values are, in blocks of it."""


class Architecture(NamedTuple):
    """An architecture of llama.cpp.

    Attributes:
        name: Its name.
        pairs: Order of RoPE's pairs in its keys, one of ``PAIRS``.
    """

    name: str
    pairs: str


ARCHITECTURES: Final = {
    "llama": Architecture("llama", "adjacent"),
    "mistral": Architecture("llama", "adjacent"),
    "qwen2": Architecture("qwen2", "halves"),
    "gemma3": Architecture("gemma3", "halves"),
    "gemma3_text": Architecture("gemma3", "halves"),
    "deepseek_v3": Architecture("deepseek2", "adjacent"),
    "gpt2": Architecture("gpt2", "none"),
    "phi": Architecture("phi2", "halves"),
    "stablelm": Architecture("stablelm", "halves"),
    "gpt_neox": Architecture("gptneox", "halves"),
    "glm4": Architecture("glm4", "none"),  # adjacent in transformers, too
}
"""Architectures by the ``model_type`` of transformers; of a latent the pairs are those of its rope key."""


def architecture_of(model_type: str, pairs: str | None = None) -> Architecture:
    """The architecture of a model, with other pairs if they are given.

    Raises:
        ArgumentError: the order of its pairs is not known and not given.
    """
    known = ARCHITECTURES.get(model_type)
    if pairs is not None:
        return Architecture("" if known is None else known.name, pairs)
    if known is None:
        raise ArgumentError(
            f"pairs must be given for an architecture that is none of {', '.join(ARCHITECTURES)}, got "
            f"{model_type or 'none'!r}"
        )
    return known


def rotation_of(head_dim: int, is_keys: bool) -> int:
    """Elements of codes that llama.cpp rotates together, unless it was told not to; 0 for none.

    Args:
        head_dim: Elements of the vector.
        is_keys: Whether it is a key: the largest power of two that divides the head; values have 64.
    """
    if head_dim % _ROTATED:
        return 0
    return head_dim & -head_dim if is_keys else _ROTATED


def rotations_of(rotated: bool, are_codes: tuple[bool, bool], head_dims: tuple[int, int]) -> tuple[int, int]:
    """Elements of a key, and of a value, that are rotated together; arguments as of ``rotation_said``."""
    key, value = (rotated and codes for codes in are_codes)
    return rotation_of(head_dims[0], True) if key else 0, rotation_of(head_dims[1], False) if value else 0


def rotation_said(
    rotations: Sequence[tuple[int, int] | None], are_codes: tuple[bool, bool], head_dims: tuple[int, int]
) -> bool | None:
    """Whether codes are rotated, by what a state says of each cache; ``None`` if it says nothing.

    Args:
        rotations: As of ``StoredCache``.
        are_codes: Whether keys, and whether values, are codes.
        head_dims: Elements of a head of keys, and of values.

    Raises:
        ArgumentError: they are rotated otherwise than in llama.cpp of today.
    """
    said = {x for x in rotations if x is not None}
    if not said:
        return None
    wanted = rotations_of(True, are_codes, head_dims)
    if not said <= {wanted, (0, 0)} or len(said) > 1:
        raise ArgumentError(f"source must have heads rotated by {wanted} or none, got {sorted(said)}")
    return said == {wanted} if any(wanted) else False


def expect_rotation_said(rotated: bool | None, has_codes: bool, head_dims: list[int]) -> bool:
    """Whether codes are rotated.

    Raises:
        ArgumentError: there are codes of which nothing else says it, or it is said of floats, which never
            are.
    """
    if not has_codes:
        if rotated:
            raise ArgumentError("rotated must be left out where elements are floats, which are not, got True")
        return False
    if rotated is None and any(dim % _ROTATED == 0 for dim in head_dims):
        raise ArgumentError(
            "rotated must be given for codes of llama.cpp, which are rotated unless its process had "
            "LLAMA_ATTN_ROT_DISABLE=1: the bytes are the same"
        )
    return bool(rotated)


def kind_of_codes(name: str, rotated: bool, head_dim: int) -> str:
    """Kind of a ``CarriedSide`` whose vectors are codes of a type: those that are rotated have another."""
    return f"{name},rotated" if rotated and head_dim % _ROTATED == 0 else name
