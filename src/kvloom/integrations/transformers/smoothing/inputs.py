"""Pseudo-random tokens by which a model is asked how its keys are to be smoothed, wherever it is loaded."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.errors import UnsupportedError

TOKENS: Final = 256
SHIFT: Final = 1000
"""How much further on in a text the second row is, where a model has as many positions."""
_FEWEST: Final = 16
_SEED: Final = 20


def rows(longest: int, turns: bool) -> tuple[int, int]:
    """Tokens that a model reads in a row, and the shift of the second row's positions, 0 for no such row.

    Args:
        longest: Tokens up to which it reads with the frequencies that short texts have.
        turns: Whether it has RoPE, and reads tokens at any positions.

    Raises:
        UnsupportedError: it reads too few.
    """
    num_tokens = min(TOKENS, longest * 3 // 4 if turns else longest)
    if num_tokens < _FEWEST:
        raise UnsupportedError(f"model must have positions for {_FEWEST} tokens, got {longest}")
    return num_tokens, min(SHIFT, longest - num_tokens) if turns else 0


def longest_of(config: Any) -> int:
    """Tokens that a model has positions for, as the configuration of its text part says."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else TOKENS + SHIFT


def token_ids(size: int, holders: Iterable[Any], num_tokens: int) -> Tensor:
    """``[T]`` int64, the same for all models of a vocabulary, none of them with a meaning of its own.

    Args:
        size: Of the vocabulary.
        holders: Configurations whose attributes name tokens with a meaning; ``None`` names none.
        num_tokens: T.
    """
    is_plain = torch.ones(size, dtype=torch.bool)
    for holder in holders:
        for name, value in vars(holder).items() if holder is not None else ():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, int) and 0 <= x < size:
                        is_plain[x] = False
    plain = is_plain.nonzero()[:, 0]
    return plain[torch.randint(len(plain), (num_tokens,), generator=torch.Generator().manual_seed(_SEED))]
