"""Sizes that do not fit, memory that is shared, and memory that changes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ops.pools import INT4, INT8, PLAIN, Kind, make_pool, new_tokens
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.memory import shares_memory
from kvloom.core.views import KVView, Side
from kvloom.dialects import pmx
from kvloom.errors import ArgumentError, KVError, OutOfMemory, ShapeError
from kvloom.ops import Batch

pytestmark = pytest.mark.process

BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])
bare = torch.ops.kvloom
HND = CacheLayout("B H S D")
TESTS = str(Path(__file__).parents[1])


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- sizes --------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
@pytest.mark.parametrize(
    ("num_repeat", "error"), [(2**62, ArgumentError), (2**64, ArgumentError), (10**13, OutOfMemory)]
)
def test_load_refuses_more_than_memory_holds(
    num_repeat: int, error: type[KVError], kind: Kind, backend: str
) -> None:
    with pytest.raises(error, match=r"num_repeat must be|with num_repeat \d+ must fit memory, got"):
        ops.load(ints(0, 1), make_pool("L 2 T H D", kind).view(), num_repeat=num_repeat, backend=backend)


@pytest.mark.parametrize("num_repeat", [0, -1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("kind", [PLAIN, INT8, INT4], ids=str)
def test_bare_load_checks_its_sizes(kind: Kind, num_repeat: int) -> None:
    kv = make_pool("L 2 T H D", kind).view()
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        bare.load(ints(0, 1), *kv.tensors, torch.float32, num_repeat)


@BACKENDS
@pytest.mark.parametrize("num_repeat", [2**59, 2**60, 2**62, 2**63 - 1])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_load_of_nothing_refuses_strides_beyond_64_bits(
    shape: tuple[int, ...], num_repeat: int, backend: str
) -> None:
    slots = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"num_repeat must be at most \d+"):
        ops.load(slots, make_pool("L 2 T H D", PLAIN).view(), num_repeat=num_repeat, backend=backend)
    key, _ = ops.load(slots, make_pool("L 2 T H D", PLAIN).view(), num_repeat=3, backend=backend)
    assert key.numel() == 0


@BACKENDS
def test_attention_and_rotation_without_memory_are_refused_in_our_words(backend: str) -> None:
    """Expanded tensors, of which no result can be allocated."""
    count = 1 << 48
    with pytest.raises(OutOfMemory, match="must fit memory"):
        ops.rotate(torch.ones(1, 1, 8).expand(count, 1, 8), 8, backend=backend)
    with pytest.raises(OutOfMemory, match="must fit memory"):
        ops.rotate(torch.ones(1, 1, 16)[..., ::2].expand(count, 1, 8), 8, backend=backend)
    kv = KVView.split(HND, torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))
    batch = Batch(CacheIndex.offset(ints(0)), ints(0, count), ints(0, 3))
    query = torch.ones(1, 1, 8).expand(count, 1, 8)
    with pytest.raises(OutOfMemory, match="must fit memory"):
        ops.attend(query, kv, batch, ops.Scores(is_causal=False), backend=backend)


@BACKENDS
def test_heads_without_elements_are_loaded_and_copied(backend: str) -> None:
    sides = [Side(torch.zeros(3, 8, 1, 2, 0, 16)) for _ in range(2)]
    kv = KVView(*sides)
    key, value = ops.load(ints(0, 23), kv, backend=backend)
    assert key.shape == value.shape == (2, 2, 0)
    ops.copy(kv, ints(0, 23), kv, ints(5, 6), backend=backend)


@pytest.mark.parametrize("num_repeat", [2**62, 2**64, 10**13])
def test_pmx_stores_nothing_that_it_cannot_return(num_repeat: int) -> None:
    new, cache = torch.randn(1, 2, 2, 8), torch.zeros(1, 1, 2, 4, 2, 8)
    with pytest.raises(KVError, match=r"num_repeat|memory"):
        pmx.key_value_cache(new, new, 0, cache, num_repeat=num_repeat)
    ragged = {"seqstarts": ints(0, 2), "kvstarts": ints(0, 2), "cachestarts": ints(0), "start_pos": ints(0)}
    flat = torch.zeros(4, 1, 2, 2, 8)
    with pytest.raises(KVError, match=r"num_repeat|memory"):
        pmx.dynamic_batching.key_value_cache(
            new[0], new[0], max_seqlen=2, max_kvlen=2, cache=flat, num_repeat=num_repeat, **ragged
        )
    assert not cache.any() and not flat.any()


@BACKENDS
def test_keys_without_elements_are_refused(backend: str) -> None:
    kv = KVView.split(HND, torch.zeros(1, 2, 8, 0), torch.zeros(1, 2, 8, 16))
    batch = Batch(CacheIndex.offset(ints(0)), ints(0, 1), ints(0, 3))
    with pytest.raises(ShapeError, match="kv must have keys of a head dim of at least 1"):
        ops.attend(torch.zeros(1, 2, 0), kv, batch, backend=backend)


def test_few_tokens_over_many_need_little_memory() -> None:
    """Partial results of all splits would take 134 MB, so only a few splits have one of their own."""
    program = """
import resource, torch
from kvloom import ops
from kvloom.core.indexing import CacheIndex
from kvloom.core.layouts import CacheLayout
from kvloom.core.views import KVView
torch.set_num_threads(1)
kv = KVView.split(CacheLayout("B H S D"), *torch.randn(2, 1, 1, 512, 4))
query, starts = torch.randn(16, 64, 4), torch.tensor([0, 16])
def attend(num_tokens):
    index = CacheIndex.pages(torch.zeros(1, num_tokens // 512, dtype=torch.int64), 512)
    ops.attend(query, kv, ops.Batch(index, starts, torch.tensor([0, num_tokens])))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(-attend(1024) + attend(1 << 19))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80_000  # KiB


@pytest.mark.skipif(sys.platform == "win32", reason="no mprotect")
def test_no_kernel_touches_what_is_beside_a_tensor() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.fenced", "B S H D", "B H S D", "B H D/2 S D%2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, [*done.stdout.splitlines()[-1:], done.stderr]


# --- what is no slot, and what is no scale ------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.bool, torch.float64, torch.float32], ids=str
)
def test_bare_operators_take_slots_of_int64_and_int32_only(dtype: torch.dtype) -> None:
    kv = make_pool("L 2 T H D", PLAIN).view()
    sides = kv.tensors
    slots, new, before = ints(0, 1).to(dtype), torch.ones(2, 2, 8), kv.key.cache.clone()
    for call in (
        lambda: bare.store(new, new, slots, *sides),
        lambda: bare.load(slots, *sides, torch.float32, 1),
        lambda: bare.copy([kv.key.cache], slots, [kv.key.cache], ints(2, 3)),
        lambda: bare.copy([kv.key.cache], ints(2, 3), [kv.key.cache], slots),
    ):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            call()
    assert_same_bits(kv.key.cache, before, "key")


@pytest.mark.parametrize("kind", [INT8, INT4], ids=str)
def test_scales_without_slots_are_not_no_scales(kind: Kind) -> None:
    kv = make_pool("L 2 T H D", kind).view()
    key_cache, value_cache, key_scale, value_scale = kv.tensors
    assert key_scale is not None
    empty, new, before = key_scale[:, :0], torch.ones(2, 2, 8), kv.key.cache.clone()
    with pytest.raises(ShapeError, match="scale must have the axes of cache"):
        Side(key_cache, empty)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        bare.store(new, new, ints(0, 1), key_cache, value_cache, empty, value_scale)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        bare.load(ints(0, 1), key_cache, value_cache, empty, value_scale, torch.float32, 1)
    assert_same_bits(kv.key.cache, before, "key")


# --- memory that is shared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("operator", ["store", "copy"])
def test_slots_within_the_cache_are_what_they_were(operator: str, backend: str) -> None:
    """Their memory is overwritten by the call; what it names is what they said when it began."""

    def run(*, shared: bool) -> Tensor:
        memory = torch.zeros(1, 1, 16, 4)
        kv = KVView.split(HND, memory, torch.zeros(1, 1, 16, 4))
        slots = memory.view(-1).view(torch.int64)[:4] if shared else torch.zeros(4, dtype=torch.int64)
        slots.copy_(ints(0, 1, 9, 15))
        if not shared:
            memory.view(-1).view(torch.int64)[:4] = slots
        if operator == "store":
            new = torch.full((4, 1, 4), -3.5)
            ops.store(new, new, slots, kv, backend=backend)
        else:
            ops.copy(kv, ints(4, 5, 6, 7), kv, slots, backend=backend)
        return torch.cat([side.cache for side in kv.sides])

    assert_same_bits(run(shared=True), run(shared=False), "cache")


def test_slots_that_another_thread_changes_stay_within_the_cache() -> None:
    """A check that reads the slots and a kernel that reads them again would write far outside."""
    count = 4096
    room = torch.zeros(3, 1, 1, count, 8)  # the cache is the middle
    kv = KVView.split(HND, room[1], torch.zeros(1, 1, count, 8))
    slots, stop = torch.arange(count), threading.Event()

    def toggle() -> None:
        while not stop.is_set():
            slots[-1] = 2 * count - 1
            slots[-1] = count - 1

    thread = threading.Thread(target=toggle)
    thread.start()
    new, refused = torch.ones(count, 1, 8), 0
    try:
        for _ in range(300):
            for call in (lambda: ops.store(new, new, slots, kv), lambda: ops.copy(kv, slots, kv, slots)):
                try:
                    call()
                except ArgumentError:
                    refused += 1
    finally:
        stop.set()
        thread.join()
    assert not room[0].any() and not room[2].any()
    assert refused < 600


def good_store(kind: Kind) -> dict[str, Any]:
    pool = make_pool("L 2 T H D", kind)
    key, value = (new_tokens(3, pool, torch.float32, seed) for seed in (1, 2))
    return {"key": key, "value": value, "slots": ints(4, 0, 9), "kv": pool.view()}


def test_new_keys_in_the_memory_of_the_cache_are_refused_whatever_holds_it() -> None:
    """Two tensors over one numpy array have storages of their own."""
    array = torch.zeros(64).numpy()
    kv = KVView.split(HND, torch.from_numpy(array).view(1, 1, 16, 4), torch.zeros(1, 1, 16, 4))
    with pytest.raises(ShapeError, match="key must not overlap kv in memory"):
        ops.store(torch.from_numpy(array)[:8].view(2, 1, 4), torch.zeros(2, 1, 4), ints(0, 1), kv)


def test_sides_that_share_memory_are_not_written() -> None:
    cache, codes = torch.zeros(1, 1, 16, 4), torch.zeros(1, 1, 16, 8, dtype=torch.int8)
    scales = codes.view(-1).view(torch.float16)[:32].view(1, 1, 16, 2)
    new = torch.ones(2, 1, 4)
    with pytest.raises(ShapeError, match=r"kv\.key\.cache must not overlap kv\.value\.cache in memory"):
        ops.store(new, new, ints(0, 1), KVView.split(HND, cache, cache))
    kv = KVView.split(HND, codes, codes.clone(), scales, scales.clone())
    with pytest.raises(ShapeError, match=r"kv\.key\.cache must not overlap kv\.key\.scale in memory"):
        ops.store(torch.ones(2, 1, 8), torch.ones(2, 1, 8), ints(0, 1), kv)
    one_side = torch.zeros(1, 1, 16, 1, 4).expand(1, 2, 16, 1, 4)
    with pytest.raises(ShapeError, match=r"kv\.key\.cache must not overlap kv\.value\.cache in memory"):
        ops.store(new, new, ints(0, 1), KVView.joint(CacheLayout("B 2 S H D"), one_side))
    assert not cache.any() and not codes.any() and not one_side.any()


def test_sides_that_interleave_are_written() -> None:
    """One latent of which the keys are a part and the values another, and keys and values slot by slot."""
    latent = torch.zeros(1, 1, 16, 12)
    kv = KVView.split(HND, latent[..., :8], latent[..., 8:])
    ops.store(torch.ones(2, 1, 8), torch.full((2, 1, 4), 2.0), ints(3, 5), kv)
    assert latent.sum() == 2 * (8 + 8)
    for axes in ("T L 2 H D", "L H T 2 D"):
        assert KVView.joint(CacheLayout(axes), torch.zeros(2, 2, 2, 2, 2)).is_writable


def test_shared_memory_is_found_exactly() -> None:
    """Every pair of strided views of a small buffer, against the sets of their bytes."""
    generator, buffer = torch.Generator().manual_seed(0), torch.zeros(256, dtype=torch.uint8)

    def draw() -> tuple[Tensor, set[int]]:
        dtype = (torch.uint8, torch.int16, torch.float32)[int(torch.randint(3, (), generator=generator))]
        shape = torch.randint(1, 4, (2,), generator=generator).tolist()
        strides = torch.randint(0, 9, (2,), generator=generator).tolist()
        x = buffer.view(dtype).as_strided(shape, strides, int(torch.randint(0, 16, (), generator=generator)))
        first = x.storage_offset()
        places = {first + i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])}
        return x, {place * x.itemsize + byte for place in places for byte in range(x.itemsize)}

    shared = 0
    for _ in range(3000):
        (x, bytes_of_x), (y, bytes_of_y) = draw(), draw()
        expected = bool(bytes_of_x & bytes_of_y)
        assert shares_memory(x, y) == expected, (x.shape, x.stride(), y.shape, y.stride())
        shared += expected
    assert 300 < shared < 2700
