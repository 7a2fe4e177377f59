"""Masks for ``attn_implementation="kvloom"``: a few numbers where lengths and windows say all, else the mask.

Letters: B sequences, Q queries of each, N columns of keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function


def attention_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What attention must know beyond causality; arguments as transformers 4.57 to 5.23 give them.

    Returns:
        ``None`` where a query sees every key up to its own; a compact mask, ``[B, 1, 1, 2]`` int64 with the
        first visible column and the window (0: none), where it does but for left padding and a sliding
        window; otherwise a bool mask ``[B, 1, Q, N]``.
    """
    window = None if mask_function is causal_mask_function else kwargs.get("local_size")
    if mask_function is causal_mask_function or _slides(window, kwargs):
        fits, first = _left_padding(attention_mask, kv_length, kwargs)
        if fits:
            return _compact(
                first, None if window is None or kv_length < window else window, batch_size, kwargs
            )
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    if mask.shape[2] == 1 and not torch.compiler.is_compiling():
        fits, first = _leading_gap(mask[:, 0, 0])
        if fits:
            return _compact(first, None, batch_size, kwargs)
    return mask


def is_compact(mask: Tensor) -> bool:
    """Whether a mask is of the compact form; other masks are bool or float."""
    return mask.dtype == torch.int64


def window_of(mask: Tensor | None) -> int | None:
    """The window that a compact mask states; reads the tensor."""
    return (int(mask[0, 0, 0, 1]) or None) if mask is not None and is_compact(mask) else None


def visible(
    first: Tensor | None, causal: bool, window: int | None, query: Tensor, num_columns: int
) -> Tensor:
    """``[B or 1, 1, Q, N]`` bool: the columns that each query of ``[B, Hq, Q, D]`` sees."""
    column = torch.arange(num_columns, device=query.device)
    distance = column - (column[num_columns - query.shape[2] :].unsqueeze(1) if num_columns else 0)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if window is not None:
        seen &= distance > -window
    if first is None:
        return seen[None, None]
    return seen & (column >= first.view(-1, 1, 1, 1))


def _slides(window: int | None, kwargs: dict[str, Any]) -> bool:
    """Whether a mask of a local size is a sliding window and nothing else; chunks have a local size too."""
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    return window is not None and window != chunk and bool(kwargs.get("allow_is_causal_skip", True))


def _left_padding(
    padding: Tensor | None, kv_length: int, kwargs: dict[str, Any]
) -> tuple[bool, Tensor | None]:
    """Whether ``[B, tokens]`` pads on the left only, and ``[B]`` the first column of a sequence's own."""
    if padding is None:
        return True, None
    if torch.compiler.is_compiling():
        return False, None
    start = int(kwargs.get("kv_offset", 0))
    own = padding[:, start : start + kv_length].bool()
    if own.shape[1] < kv_length and start + own.shape[1] < _num_tokens(kwargs):
        return False, None
    return _leading_gap(own)


def _num_tokens(kwargs: dict[str, Any]) -> int:
    """Tokens of a sequence, the new ones included."""
    if "cache_position" in kwargs:
        return int(kwargs["cache_position"][-1]) + 1
    return int(kwargs["q_offset"]) + int(kwargs["q_length"])


def _leading_gap(seen: Tensor) -> tuple[bool, Tensor | None]:
    """Whether the true columns of ``[B, N]`` are the last ones, and ``[B]`` the first; ``None`` for all 0."""
    first = seen.shape[1] - seen.sum(1)
    fits = bool((seen == (torch.arange(seen.shape[1], device=seen.device) >= first[:, None])).all())
    return fits, first if fits and bool(first.any()) else None


def _compact(
    first: Tensor | None, window: int | None, batch_size: int, kwargs: dict[str, Any]
) -> Tensor | None:
    if first is None:
        if window is None:
            return None
        device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
        first = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return torch.stack([first, torch.full_like(first, window or 0)], -1)[:, None, None]
