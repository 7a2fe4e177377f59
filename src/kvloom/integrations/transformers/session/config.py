"""Checks of configurations of continuous batching, and of token ids."""

import operator
from collections.abc import Sequence, Sized
from typing import Any, Final

from transformers import ContinuousBatchingConfig

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.models.text_config import num_tokens_of

# Fields of a ContinuousBatchingConfig that are not supported unless they are None, False or 0.
_REFUSED: Final = (
    "cpu_offload_space",
    "use_cuda_graph",
    "use_async_batching",
    "q_padding_interval_size",
    "kv_padding_interval_size",
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
)


def expect_config(config: Any) -> None:
    """Raise ArgumentError or UnsupportedError for a configuration that is invalid or not supported."""
    if not isinstance(config, ContinuousBatchingConfig):
        raise ArgumentError(
            f"continuous_batching_config must be a ContinuousBatchingConfig, got {type(config).__name__}"
        )
    for name in ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch"):
        _expect_positive(name, getattr(config, name))
    for name in _REFUSED:
        value = getattr(config, name, None)
        if value is None and name == "cpu_offload_space":
            value = "None, which is as much as there is"
        if value and value != (False, False):
            raise UnsupportedError(f"{name} must be left at its default, as there is none here, got {value}")


def _expect_positive(name: str, value: Any) -> None:
    """Raise ArgumentError unless ``value`` is a positive int or ``None``."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name} must be a positive int, got {value!r}")


def expect_prompt(tokens: Any, least: int, model: Any) -> None:
    """Raise ArgumentError, of ``input_ids``, for what is no list of at least ``least`` ids of tokens."""
    if not isinstance(tokens, Sized):
        raise ArgumentError(f"input_ids must be a list of token ids, got {tokens!r}")
    if len(tokens) < least:
        raise ArgumentError(f"input_ids must be at least {least} tokens, got {len(tokens)}")
    expect_known("input_ids", tokens, model)  # type: ignore[arg-type]


def expect_known(name: str, tokens: Sequence[int], model: Any) -> None:
    """Raise ArgumentError, with the argument ``name``, unless each is the id of a row of the embedding."""
    for token in [] if set(map(type, tokens)) == {int} else tokens:
        if isinstance(token, bool) or not _is_integer(token):
            raise ArgumentError(f"{name} must be token ids, which are ints, got {token!r}")
    num_rows = num_tokens_of(model)
    for token in {min(tokens), max(tokens)}:
        if not 0 <= token < num_rows:
            raise ArgumentError(
                f"{name} must be token ids from 0 to {num_rows - 1}, as the model's embedding has {num_rows} "
                f"rows, got {token}"
            )


def _is_integer(value: Any) -> bool:
    """Whether a number is one of Python, NumPy or torch without a fraction's type."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
