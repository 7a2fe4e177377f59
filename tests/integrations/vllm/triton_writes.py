"""vLLM's Triton kernel that writes pages, interpreted on the CPU, judged by the vectors of its two layouts.

Run in a process of its own with ``TRITON_INTERPRET=1``: writes a JSON line of how many passed and failed, by
whether the heads of keys and values lie one behind the other. Calls that must be refused are left out, since
the kernel checks nothing and would write beyond its caches.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
import vllm.triton_utils

from kvloom.conform.running import run
from kvloom.conform.targets import python_target
from kvloom.conform.vectors import Vector, published, read


def make_store() -> Callable[..., None]:
    """What is called as ``vllm.reshape_and_cache`` and ``vllm.reshape_and_cache_flash`` are."""
    # vLLM hides Triton where it has no CPU backend, and asks the device which tiles and dtypes to take.
    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as kernels

    kernels._is_supported_kv_cache_dtype = lambda _: True

    def store(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, **_: Any) -> None:
        one = torch.ones(1)
        kernels.triton_reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, "auto", one, one
        )

    return store


def has_gaps(vector: Vector) -> bool:
    """Whether heads that are stored do not lie one behind the other, as the kernel takes them to do."""
    key, value, slots = (vector.call[name] for name in ("key", "value", "slot_mapping"))
    is_stored = key.shape[1] > 1 and bool((slots >= 0).any())
    return is_stored and any(x.stride(1) != x.shape[2] for x in (key, value))


def main() -> None:
    """Judge and write."""
    target, found = python_target(make_store()), Counter[str]()
    for dialect in ("vllm.reshape_and_cache", "vllm.reshape_and_cache_flash"):
        for vector in read(published(), dialect):
            if vector.expected is not None:
                shape = "gaps" if has_gaps(vector) else "whole"
                outcome = "passed" if run(target, [vector]).passed else "failed"
                found[f"{dialect} {shape} {outcome}"] += 1
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
