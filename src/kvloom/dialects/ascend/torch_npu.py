"""Operators of Ascend with torch_npu's names, argument order and defaults: change one import to port code.

As in torch_npu, and unlike ``kvloom.dialects.ascend``, the default ``cache_mode`` is ``"PA_NZ"``, and the
offsets are called ``compress_seq_offsets``. For keys only pass ``torch.empty(0)`` as values and their cache.
"""

from torch import Tensor

from kvloom.dialects.ascend.gather import gather_pa_kv_cache
from kvloom.dialects.ascend.scatter import scatter_pa_kv_cache


def _clone(x: Tensor) -> Tensor:
    """Copy of a tensor; anything else is returned for the operator to check."""
    return x.clone() if isinstance(x, Tensor) else x


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """``ascend.scatter_pa_kv_cache`` with ``scatter_mode="None"``; ``cache_mode=None`` is Norm."""
    scatter_pa_kv_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offset=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )


def npu_scatter_pa_kv_cache_functional(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:
    """``npu_scatter_pa_kv_cache`` on copies of the caches, which are returned."""
    key_cache, value_cache = _clone(key_cache), _clone(value_cache)
    npu_scatter_pa_kv_cache(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )
    return key_cache, value_cache


def npu_scatter_pa_cache(
    key: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    key_cache: Tensor,
) -> Tensor:
    """Keys only, in Norm; returns ``key_cache`` itself, as torch_npu does."""
    scatter_pa_kv_cache(
        key,
        None,
        key_cache,
        None,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offset=compress_seq_offsets,
        seq_lens=seq_lens,
    )
    return key_cache


def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """``ascend.gather_pa_kv_cache``; the format, a property of NPU tensors, follows from the shapes.

    A 4-D cache whose last two axes are those of ``key`` is Norm; any other is PA_NZ.
    """
    norm = key_cache.ndim == 4 and key_cache.shape[2:] == key.shape[1:]
    gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        key,
        value,
        seq_offset=seq_offset,
        cache_mode="Norm" if norm else "PA_NZ",
        is_seq_lens_cumsum=is_seq_lens_cumsum,
    )


def npu_gather_pa_kv_cache_functional(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:
    """``npu_gather_pa_kv_cache`` to copies of ``key`` and ``value``, which are returned."""
    key, value = _clone(key), _clone(value)
    npu_gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        key,
        value,
        seq_offset=seq_offset,
        is_seq_lens_cumsum=is_seq_lens_cumsum,
    )
    return key, value
