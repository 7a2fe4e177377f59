"""Masks for ``attn_implementation="kvloom"``: a ``CompactMask`` where possible, else a tensor.

Shapes: B sequences, Q queries of each, N columns of keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.attention.lazy_tensor import LazyTensor
from kvloom.integrations.transformers.models.text_config import works_with_sdpa


class CompactMask(LazyTensor):
    """A causal mask ``[B, 1, Q, N]`` described by a few numbers.

    Args:
        shape: ``(B, 1, Q, N)``.
        device: Device of the mask.
        first: ``[B]`` int64, the first visible column of each sequence; 0 if ``None``.
        firsts: The same on the host; ``None`` if they are not known there.
        taken: Number of columns that hold tokens, the last of which are the queries; all if ``None``.
        window: Columns that a query sees, its own included; ``None`` for all before it.
        dtype: Dtype of the mask: bool, true is visible, or that of a mask that is added to scores.
    """

    ndim = 4

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        device: torch.device,
        first: Tensor | None = None,
        taken: int | Tensor | None = None,
        window: int | None = None,
        dtype: torch.dtype = torch.bool,
        firsts: tuple[int, ...] | None = None,
    ) -> None:
        self.sizes = shape
        self.dtype = dtype
        self.device = device
        self.first = first
        self.firsts = firsts
        self.taken = taken
        self.window = window

    @property
    def shape(self) -> torch.Size:
        """``[B, 1, Q, N]``."""
        return torch.Size(self.sizes)

    @property
    def is_causal_only(self) -> bool:
        """Whether it hides the columns after each query and nothing else, for any number of columns."""
        return self.first is None and self.taken is None and self.window is None

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64, number of columns that hold tokens."""
        rows, _, _, num_columns = self.sizes
        if isinstance(self.taken, Tensor):
            return self.taken.to(self.device).expand(rows)
        return torch.full((rows,), num_columns if self.taken is None else self.taken, device=self.device)

    def gather(self) -> Tensor:
        """The mask as a tensor."""
        _, _, num_new, num_columns = self.sizes
        seen = visible(self.lengths, num_new, num_columns, first=self.first, window=self.window)
        if self.dtype == torch.bool:
            return seen
        added = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return added.masked_fill(~seen, torch.finfo(self.dtype).min)

    def to(self, device: torch.device | str, **kwargs: Any) -> "CompactMask":
        """The same mask on another device."""
        first = None if self.first is None else self.first.to(device)
        own = self.taken, self.window, self.dtype, self.firsts
        return CompactMask(self.sizes, torch.device(device), first, *own)

    def contiguous(self) -> "CompactMask":
        """The mask itself; ``generate`` calls this when it makes masks before a compiled step."""
        return self

    def __repr__(self) -> str:
        return f"CompactMask({self.sizes}, first={self.first}, taken={self.taken}, window={self.window})"


def attention_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | CompactMask | None = None,
    **kwargs: Any,
) -> Tensor | CompactMask | None:
    """Make the mask of a forward; arguments are those of transformers 4.57 to 5.24.

    A compact mask given as ``attention_mask`` is returned unchanged.

    Raises:
        ArgumentError: ``attention_mask`` has fewer columns than there are tokens.

    Returns:
        ``None`` where ``sdpa`` takes ``None``: a single query sees every column, and for a whole text the
        module says whether it is causal. A compact mask if a query sees the columns up to its own, except
        left padding, free columns and columns outside a sliding window. Else a bool mask ``[B, 1, Q, N]``,
        or that of eager attention for a model that does not work with ``sdpa``.
    """
    if isinstance(attention_mask, CompactMask):
        return attention_mask
    num_new = _num_new(kwargs)
    window = None if mask_function is causal_mask_function else kwargs.get("local_size")
    is_optional = kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip", False)

    is_of_sdpa = works_with_sdpa(kwargs.get("config"))
    dtype = torch.bool if is_of_sdpa else kwargs.get("dtype", torch.float32)

    def compact(
        firsts: tuple[int, ...], first: Tensor | None, taken: int | Tensor | None, limit: int | None
    ) -> CompactMask | None:
        says_nothing = first is None and taken is None and limit is None
        if is_optional and says_nothing and num_new in ((1, kv_length) if is_of_sdpa else (1,)):
            return None
        device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
        sizes = batch_size, 1, num_new, kv_length
        return CompactMask(sizes, device, first, taken, limit, dtype, firsts if first is not None else None)

    if mask_function is causal_mask_function or _slides(window, kwargs):
        firsts, first = _left_padding(attention_mask, kv_length, kwargs)
        if firsts is not None:
            limit = None if window is None or kv_length < window else window
            return compact(firsts, first, _num_taken(kv_length, kwargs), limit)
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    if num_new == 1 and not torch.compiler.is_compiling():
        firsts, first = _leading_gap(mask[:, 0, 0])
        if firsts is not None:
            return compact(firsts, first, None, None)
    if is_of_sdpa:
        return mask
    added: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["eager"](
        batch_size=batch_size,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return added


def visible(
    lengths: Tensor,
    num_new: int,
    num_columns: int,
    *,
    first: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """``[B, 1, Q, N]`` bool: the columns that each of the last ``num_new`` tokens sees.

    Args:
        lengths: ``[B]``, number of columns that hold tokens.
        num_new: Q.
        num_columns: N.
        first: ``[B]``, the first visible column; 0 if ``None``.
        causal: Whether a token sees no later one.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
    """
    end = lengths.view(-1, 1, 1, 1)
    column = torch.arange(num_columns, device=end.device)
    position = end + torch.arange(-num_new, 0, device=end.device).unsqueeze(1)
    seen = (column < end).expand(-1, -1, num_new, -1)
    if causal:
        seen = seen & (column <= position)
    if window is not None:
        seen = seen & (column > position - window)
    return seen if first is None else seen & (column >= first.view(-1, 1, 1, 1))


def _slides(window: int | None, kwargs: dict[str, Any]) -> bool:
    """Whether a mask with a local size is a plain sliding window; chunks also have a local size."""
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    return window is not None and window != chunk and bool(kwargs.get("allow_is_causal_skip", True))


def _left_padding(
    padding: Tensor | None, kv_length: int, kwargs: dict[str, Any]
) -> tuple[tuple[int, ...] | None, Tensor | None]:
    """First columns of sequences that a mask ``[B, tokens]`` pads on the left, as ``_leading_gap``."""
    if padding is None:
        return (), None
    if torch.compiler.is_compiling():
        return None, None
    start = int(kwargs.get("kv_offset", 0))
    own = padding[:, start : start + kv_length].bool()
    num_tokens = int(_num_tokens(kwargs))
    if own.shape[1] < kv_length and start + own.shape[1] < num_tokens:
        raise ArgumentError(
            f"attention_mask must have a column for each of {num_tokens} tokens, those of the cache "
            f"included, got {padding.shape[1]}"
        )
    return _leading_gap(own)


def _leading_gap(seen: Tensor) -> tuple[tuple[int, ...] | None, Tensor | None]:
    """First true columns of ``[B, N]``, on the host and as a tensor ``[B]``, ``None`` if all are 0.

    The former are ``None`` if a column after the first true one is false. Both are read at once, for which a
    device is waited for once in a forward, as by the masks of transformers.
    """
    first = seen.shape[1] - seen.sum(1)
    fits = (seen == (torch.arange(seen.shape[1], device=seen.device) >= first[:, None])).all()
    *firsts, is_fit = torch.cat((first, fits.view(1).long())).tolist()
    if not is_fit:
        return None, None
    return tuple(firsts), first if any(firsts) else None


def _num_new(kwargs: dict[str, Any]) -> int:
    """Q."""
    num_new: int = kwargs["cache_position"].shape[0] if "cache_position" in kwargs else kwargs["q_length"]
    return num_new


def _num_tokens(kwargs: dict[str, Any]) -> int | Tensor:
    """Number of tokens of a sequence, new ones included; a tensor if the cache counts in one."""
    if "cache_position" in kwargs:
        end: Tensor = kwargs["cache_position"][-1] + 1
        return end if torch.compiler.is_compiling() else int(end)
    total: int | Tensor = kwargs["q_offset"] + kwargs["q_length"]
    return total


def _num_taken(kv_length: int, kwargs: dict[str, Any]) -> int | Tensor | None:
    """Number of columns that hold tokens; ``None`` for all."""
    taken = _num_tokens(kwargs) - int(kwargs.get("kv_offset", 0))
    return taken if isinstance(taken, Tensor) or taken < kv_length else None
