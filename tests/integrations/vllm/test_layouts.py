"""Pages of vLLM's own attention are in the layouts that are named for them."""

from __future__ import annotations

import pytest
import torch
from integrations.vllm.engines import needs_vllm
from torch import Tensor

from kvloom.layouts import KVTensors, convert

needs_vllm()

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of what vLLM imports

B, H, S, D = 3, 2, 32, 64
LAYOUT_OF = {"vec": "vllm_cpu", "vec16": "vllm_cpu", "amx": "vllm_cpu_amx"}
"""Layout of the pages of each kernel of the CPU backend."""


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and slots of as many tokens as there are slots, in any order."""
    rng = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, B * S, H, D, generator=rng).to(dtype)
    return key, value, torch.randperm(B * S, generator=rng)


def sides(pages: Tensor, layout: str) -> dict[str, Tensor]:
    """The two tensors of ``[B, H, S, 2 D]``: of each head of a block the keys, then the values."""
    key, value = pages.flatten(2).chunk(2, dim=2)
    if layout == "vllm_cpu":
        return {"key": key.unflatten(2, (D, S)), "value": value.unflatten(2, (S, D))}
    return {
        "key": key.unflatten(2, (S // 16, D // 2, 16, 2)),
        "value": value.unflatten(2, (D // 16, S // 2, 16, 2)),
    }


def assert_holds(read: KVTensors, key: Tensor, value: Tensor, slots: Tensor) -> None:
    found = convert(read, "T H D").tensors
    assert torch.equal(found["key"][slots], key) and torch.equal(found["value"][slots], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", LAYOUT_OF)
def test_kernels_of_cpus_write_the_named_layouts(isa: str, dtype: torch.dtype) -> None:
    from vllm import _custom_ops

    if isa == "amx" and dtype == torch.float32:
        pytest.skip("vLLM takes amx for bfloat16 alone")
    key, value, slots = tokens(dtype)
    pages = torch.zeros(B, H, S, 2 * D, dtype=dtype)
    caches = pages.view(B, H, 2 * S, D).chunk(2, dim=2)
    try:
        _custom_ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa)
    except RuntimeError as error:
        if isa != "amx" or "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip(f"vLLM loads no kernel with AMX on this machine: {error}")
    layout = LAYOUT_OF[isa]
    assert_holds(KVTensors(sides(pages, layout), layout), key, value, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [64, 80])
def test_this_processor_has_a_kernel_that_is_named(dtype: torch.dtype, head_size: int) -> None:
    from vllm.platforms import CpuArchEnum, current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, 128, head_size)
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        pytest.skip(f"{isa} is no kernel of x86")
    assert isa in LAYOUT_OF


@pytest.mark.parametrize(("member", "layout"), [("LBNHC", "vllm_gpu"), ("LBHNC", "vllm_gpu_hnd")])
def test_pages_of_gpus_are_in_the_named_layouts(member: str, layout: str) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[member].layer_view_order
    memory = torch.zeros([(B, H, S, 2 * D)[axis] for axis in order], dtype=torch.float16)
    pages = memory.permute([order.index(axis) for axis in range(4)])
    key_cache, value_cache = pages.transpose(1, 2).split(D, dim=-1)  # as its FlashAttention takes them
    key, value, slots = tokens(torch.float16)
    key_cache[slots // S, slots % S], value_cache[slots // S, slots % S] = key, value
    assert_holds(KVTensors({"cache": memory.unflatten(-1, (2, D))}, layout), key, value, slots)
