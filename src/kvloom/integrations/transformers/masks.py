"""Masks for ``attn_implementation="kvloom"``: a few numbers where lengths and windows say all, else the mask.

Letters: B sequences, Q queries of each, N columns of keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from kvloom.caches import Placement


def attention_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What attention must know beyond causality; arguments as transformers 4.57 to 5.23 give them.

    Returns:
        ``None`` where the last query sees every column, and each other one those up to its own; a compact
        mask, ``[B, 1, 1, 3]`` int64, where that is so but for left padding, columns that are still free and a
        sliding window; otherwise a bool mask ``[B, 1, Q, N]``. The numbers are the first visible column, how
        many columns are taken, and the window (0: none).
    """
    window = None if mask_function is causal_mask_function else kwargs.get("local_size")
    if mask_function is causal_mask_function or _slides(window, kwargs):
        fits, first = _left_padding(attention_mask, kv_length, kwargs)
        if fits:
            limit = 0 if window is None or kv_length < window else window
            taken = _num_taken(kv_length, kwargs)
            return _compact(first, taken, limit, batch_size, kv_length, kwargs)
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
            return _compact(first, None, 0, batch_size, kv_length, kwargs)
    return mask


def is_compact(mask: Tensor) -> bool:
    """Whether a mask is of the compact form; other masks are bool or float."""
    return mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, 3)


def taken_by(mask: Tensor | None) -> Tensor | None:
    """``[B]``, the columns that a compact mask says are taken; ``None`` for all."""
    return mask[:, 0, 0, 1] if mask is not None and is_compact(mask) else None


def window_of(mask: Tensor | None) -> int | None:
    """The window that a compact mask states; reads the tensor."""
    return (int(mask[0, 0, 0, 2]) or None) if mask is not None and is_compact(mask) else None


def visible(
    first: Tensor | None, causal: bool, window: int | None, num_new: int, placement: Placement
) -> Tensor:
    """``[B, 1, Q, N]`` bool: the columns that each of the last ``num_new`` tokens sees."""
    end = placement.lengths if placement.origins is None else placement.lengths - placement.origins
    end = end.view(-1, 1, 1, 1)
    column = torch.arange(placement.num_columns, device=end.device)
    position = end + torch.arange(-num_new, 0, device=end.device).unsqueeze(1)
    seen = (column < end).expand(-1, -1, num_new, -1)
    if causal:
        seen = seen & (column <= position)
    if window is not None:
        seen = seen & (column > position - window)
    return seen if first is None else seen & (column >= first.view(-1, 1, 1, 1))


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
    if own.shape[1] < kv_length and start + own.shape[1] < int(_num_tokens(kwargs)):
        return False, None
    return _leading_gap(own)


def _leading_gap(seen: Tensor) -> tuple[bool, Tensor | None]:
    """Whether the true columns of ``[B, N]`` are the last ones, and ``[B]`` the first; ``None`` for all 0."""
    first = seen.shape[1] - seen.sum(1)
    fits = bool((seen == (torch.arange(seen.shape[1], device=seen.device) >= first[:, None])).all())
    return fits, first if fits and bool(first.any()) else None


def _num_tokens(kwargs: dict[str, Any]) -> int | Tensor:
    """Tokens of a sequence, the new ones included; a tensor where the cache counts in one."""
    if "cache_position" in kwargs:
        end: Tensor = kwargs["cache_position"][-1] + 1
        return end if torch.compiler.is_compiling() else int(end)
    total: int | Tensor = kwargs["q_offset"] + kwargs["q_length"]
    return total


def _num_taken(kv_length: int, kwargs: dict[str, Any]) -> int | Tensor | None:
    """How many of the columns hold tokens; ``None`` for all."""
    taken = _num_tokens(kwargs) - int(kwargs.get("kv_offset", 0))
    return taken if isinstance(taken, Tensor) or taken < kv_length else None


def _compact(
    first: Tensor | None,
    taken: int | Tensor | None,
    window: int,
    batch_size: int,
    kv_length: int,
    kwargs: dict[str, Any],
) -> Tensor | None:
    if first is None and taken is None and window == 0:
        return None
    device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
    mask = torch.zeros(batch_size, 1, 1, 3, dtype=torch.int64, device=device)
    if first is not None:
        mask[:, 0, 0, 0] = first
    mask[..., 1] = kv_length if taken is None else taken
    mask[..., 2] = window
    return mask
