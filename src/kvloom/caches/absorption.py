"""When latents (MLA) are expanded, and when queries are multiplied by the weight instead."""

from typing import NamedTuple


class LatentSizes(NamedTuple):
    """Elements of a layer's vectors.

    Attributes:
        rank: Of a latent.
        nope: Of a query without positions, of one head.
        rope: Of a query with positions, and of a rope key.
        v: Of a value of one head.
    """

    rank: int
    nope: int
    rope: int
    v: int


def is_faster_expanded(
    num_new: int, num_tokens: int, sizes: LatentSizes, num_read: int | None = None
) -> bool:
    """Whether it takes fewer multiplications to expand the latents.

    A token then costs its expansion, once for all queries, and each pair of a query and a token less. Where
    no token is older than the queries, the queries' own products cost what the expansion does. Of expanded
    tokens all are multiplied, also where fewer are read as latents.

    Args:
        num_new: Queries of a sequence.
        num_tokens: Its latents, those of the queries' own tokens among them.
        sizes: Of the layer.
        num_read: Latents that each query reads, as they are chosen for it; ``None`` for all.
    """
    rank, nope, rope, v = sizes
    if num_read is not None and num_read < num_tokens:
        of_latents = num_new * (rank * (nope + v) + num_read * (2 * rank + rope))
        return num_tokens * (rank * (nope + v) + num_new * (nope + rope + v)) < of_latents
    if num_new == num_tokens:
        return num_new > 1
    spared = (2 * rank + rope) - (nope + rope + v)
    return num_new * spared > rank * (nope + v)
