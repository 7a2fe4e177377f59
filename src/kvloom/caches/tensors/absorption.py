"""Choice for latents (MLA): expand them, or absorb the weight into the queries."""

from typing import NamedTuple


class LatentSizes(NamedTuple):
    """Numbers of elements of a layer's vectors.

    Attributes:
        rank: Elements of a latent.
        nope: Elements of one head's query without positions.
        rope: Elements of one head's query with positions, and of a rope key.
        v: Elements of one head's value.
    """

    rank: int
    nope: int
    rope: int
    v: int


def is_faster_expanded(
    num_new: int, num_tokens: int, sizes: LatentSizes, num_read: int | None = None
) -> bool:
    """Whether it takes fewer multiplications to expand the latents.

    Expansion costs once for each token, and then each pair of a query and a token costs less. Without earlier
    tokens, absorption into the queries costs as much as expansion. Expanded tokens are all multiplied, even
    if each query reads fewer as latents.

    Args:
        num_new: Queries of a sequence.
        num_tokens: Latents of the sequence, those of the queries' tokens included.
        sizes: Sizes of the layer's vectors.
        num_read: Number of latents that are chosen for each query; ``None`` for all.
    """
    rank, nope, rope, v = sizes
    if num_read is not None and num_read < num_tokens:
        of_latents = num_new * (rank * (nope + v) + num_read * (2 * rank + rope))
        return num_tokens * (rank * (nope + v) + num_new * (nope + rope + v)) < of_latents
    if num_new == num_tokens:
        return num_new > 1
    spared = (2 * rank + rope) - (nope + rope + v)
    return num_new * spared > rank * (nope + v)
