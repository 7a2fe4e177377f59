"""Operators of Ascend with torch_npu's names, argument order and defaults: change one import to port code.

As in torch_npu, and unlike ``kvloom.dialects.ascend``, the default ``cache_mode`` is ``"PA_NZ"``, and the
offsets are called ``compress_seq_offsets``. For keys only pass ``torch.empty(0)`` as values and their cache.
The format of a cache, which is a property of NPU tensors, follows from the shapes where no argument says it:
a 4-D cache whose last two axes are those of ``key`` is Norm, any other is PA_NZ.
"""

from torch import Tensor

from kvloom.core.checks import INDEX_DTYPES, can_read, expect, expect_tensor
from kvloom.core.indexing import check_slots
from kvloom.dialects.ascend.gather import gather_pa_kv_cache
from kvloom.dialects.ascend.scatter import scatter_pa_kv_cache


def _clone(x: Tensor) -> Tensor:
    """Copy of a tensor; anything else is returned for the operator to check."""
    return x.clone() if isinstance(x, Tensor) else x


def _mode(key: Tensor, key_cache: Tensor) -> str:
    """``cache_mode`` of a cache that tokens like ``key`` are in, by the shapes."""
    is_norm = key_cache.ndim == 4 and key_cache.shape[2:] == key.shape[1:]
    return "Norm" if is_norm else "PA_NZ"


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
    """``ascend.gather_pa_kv_cache``; ``cache_mode`` follows from the shapes."""
    gather_pa_kv_cache(
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        key,
        value,
        seq_offset=seq_offset,
        cache_mode=_mode(key, key_cache),
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


def _store(
    key: Tensor, value: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, slot_indices: Tensor
) -> None:
    expect("key", key, "T H D")
    expect_tensor("key_cache", key_cache)
    expect("slot_indices", slot_indices, "T", dtype=INDEX_DTYPES, device=key.device, T=key.shape[0])
    cache_mode = _mode(key, key_cache)
    if can_read(slot_indices) and key_cache.ndim in (4, 5):
        num_slots = key_cache.shape[0] * key_cache.shape[1 if cache_mode == "Norm" else -2]
        check_slots("slot_indices", slot_indices, num_slots, skip_negative=True)
    scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_indices, cache_mode=cache_mode)


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """``ascend.scatter_pa_kv_cache`` of plain tokens; ``cache_mode`` follows from the shapes.

    This is ATB's ReshapeAndCache, which vllm-ascend calls by this name.

    Args:
        key: ``[T, H, Dk]``.
        value: ``[T, H, Dv]``.
        key_cache: ``[nb, bs, H, Dk]``, or PA_NZ as ``ascend.scatter_pa_kv_cache`` has it.
        value_cache: The same for values.
        slot_indices: ``[T]``, slot of each token; negative: skip.

    Raises:
        KVError: an argument does not fit; neither cache was written.
    """
    _store(key, value, key_cache, value_cache, slot_indices)


def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """``_npu_reshape_and_cache`` of keys only, as latents: ``[T, 1, D]`` into ``[nb, bs, 1, D]``."""
    _store(key, None, key_cache, None, slot_indices)
