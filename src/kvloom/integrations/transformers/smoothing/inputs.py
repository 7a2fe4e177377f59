"""Pseudo-random tokens for the calibration of key smoothing."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.text_config import token_ids_in

TOKENS: Final = 256
SHIFT: Final = 1000
"""Shift of the second row's positions, if the model has as many positions."""
_FEWEST: Final = 16
_SEED: Final = 20


def rows(longest: int, turns: bool) -> tuple[int, int]:
    """Number of tokens in a row, and the shift of the second row's positions, 0 without a second row.

    Args:
        longest: Number of tokens up to which a text has the RoPE frequencies of short texts.
        turns: Whether the model has RoPE, and takes positions as an argument.

    Raises:
        UnsupportedError: the model has positions for fewer than 16 tokens.
    """
    num_tokens = min(TOKENS, longest * 3 // 4 if turns else longest)
    if num_tokens < _FEWEST:
        raise UnsupportedError(f"model must have positions for {_FEWEST} tokens, got {longest}")
    return num_tokens, min(SHIFT, longest - num_tokens) if turns else 0


def longest_of(config: Any) -> int:
    """Number of a model's positions by its text configuration."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else TOKENS + SHIFT


def token_ids(size: int, holders: Iterable[Any], num_tokens: int) -> Tensor:
    """Ids ``[T]`` int64 without special tokens, the same for all models of a vocabulary.

    Args:
        size: Size of the vocabulary.
        holders: Configurations whose attributes name special tokens, or ``None``.
        num_tokens: T.
    """
    is_plain = torch.ones(size, dtype=torch.bool)
    for holder in holders:
        for name, value in vars(holder).items() if holder is not None else ():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                is_plain[[x for x in token_ids_in(value) if 0 <= x < size]] = False
    plain = is_plain.nonzero()[:, 0]
    return plain[torch.randint(len(plain), (num_tokens,), generator=torch.Generator().manual_seed(_SEED))]
