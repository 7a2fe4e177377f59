"""One chunk of linear attention, by products of matrices.

Shapes: ``B`` sequences, ``H`` states of a sequence, ``R`` query heads that read one state, ``C`` tokens of
the chunk, ``K`` and ``V`` elements of a key and a value.
"""

import torch
from torch import Tensor


def attend_chunk(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, decay: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs of the tokens of a chunk, and the state after the last one.

    The state after token i is a sum: the state before the chunk and the outer products of keys and values up
    to i, each decayed by all tokens between. A delta rule replaces v_i by u_i, which depends on the earlier
    u_j:

        u_i + beta_i * sum over j < i of (k_i . k_j, decayed) u_j = beta_i * (v_i - k_i . state, decayed)

    so all u are the solution of one unit lower triangular system.

    Args:
        query: ``[B, H, R, C, K]`` float32, scaled.
        key: ``[B, H, 1, C, K]`` float32.
        value: ``[B, H, 1, C, V]`` float32.
        state: ``[B, H, 1, K, V]`` float32, before the chunk.
        decay: Logarithms ``[B, H, 1, C, K]``, or ``[B, H, 1, C, 1]`` for all elements of a key; ``None``:
        none.
        beta: Update rates ``[B, H, 1, C, 1]`` of a delta rule, ``None`` without.

    Returns:
        ``[B, H, R, C, V]`` and ``[B, H, 1, K, V]``.
    """
    if decay is None:
        decay = key.new_zeros(key.shape[3], 1)
    spans = decay_spans(decay)
    of_state, of_tokens = spans[..., 0, :], spans[..., 1:, :]
    if beta is not None:
        system = beta * decayed_products(key, key, of_tokens)
        target = beta * (value - (key * of_state) @ state)
        value = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    output = (query * of_state) @ state + decayed_products(query, key, of_tokens) @ value
    kept = of_state[..., -1, :].unsqueeze(-1) * state
    return output, kept + (key * of_tokens[..., -1, :, :]).mT @ value


def decay_spans(decay: Tensor) -> Tensor:
    """Decay until token i of the state before the chunk (column 0) and of token j (column j + 1).

    Each is the exponential of a sum of the decays between, never of a difference of sums: differences of
    large sums cancel, and one token that forgets all (minus infinity) would make the rest of its chunk NaN.

    Args:
        decay: Logarithms ``[..., C, K]``.

    Returns:
        ``[..., C, C + 1, K]``, 0 if token j is after token i.
    """
    count = decay.shape[-2]
    grid = torch.ones(count, count + 1, dtype=torch.bool, device=decay.device)
    is_between, is_visible = grid.tril().unsqueeze(-1), grid.tril(1).unsqueeze(-1)
    sums = torch.where(is_between, decay.unsqueeze(-2), 0.0).cumsum(dim=-3)
    return torch.where(is_visible, sums.exp(), 0.0)


def decayed_products(x: Tensor, key: Tensor, spans: Tensor) -> Tensor:
    """Products ``[..., i, j]`` of rows of ``x`` with keys, decayed from j to i by element or as a whole."""
    if spans.shape[-1] == 1:
        return (x @ key.mT) * spans.squeeze(-1)
    return torch.einsum("...id,...jd,...ijd->...ij", x, key, spans)
