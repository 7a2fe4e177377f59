"""How the compiled library is found, chosen, and missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvloom import CacheIndex, KVSpec, QuantSpec, ops
from kvloom.caches.tensors.storage import Storage
from kvloom.errors import ConfigError
from kvloom.ops.impl import cpu

compiled = pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled backend: {cpu.WHY_NOT}")

STORE = """
import torch
from kvloom import KVSpec, KVView, ops
spec = KVSpec(1, 2, 8, torch.float32)
kv = KVView.joint(spec.axes, spec.empty(4)[0])
x = torch.ones(1, 2, 8)
ops.store(x, x, torch.tensor([2]), kv)
assert torch.equal(ops.load(torch.tensor([2]), kv)[0], x)
"""

LAYERS = """
import torch
from kvloom.caches import CacheFormat, PagedLayer, Sequences
format = CacheFormat(page_size=4)
sequences = Sequences(format)
layers = [PagedLayer(format, sequences, i) for i in range(3)]
stored = [torch.zeros(2, 2, 0, 8) for _ in layers]
for num_new in (5, 2, 1, 3, 2):  # as many tokens as there are heads, too
    for i, layer in enumerate(layers):
        x = torch.randn(2, 2, num_new, 8)
        stored[i] = torch.cat([stored[i], x], dim=2)
        for kept in layer.append(x, x).gather(torch.float32):
            assert torch.equal(kept, stored[i]), (num_new, i)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@compiled
def test_the_chosen_instruction_set_is_the_one_asked_for() -> None:
    assert os.environ.get("KVLOOM_ISA") in (None, "", cpu.ISA)
    assert cpu.ISA in cpu.ISAS
    assert (cpu.WHY_NO_AMX is None) == (cpu.ISA == "amx")


@compiled
@pytest.mark.parametrize("name", cpu.COMPILED)
def test_kernels_stand_under_the_dispatch_key_of_the_cpu(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvloom::{name}", "CPU")


@pytest.mark.process
@compiled
def test_every_machine_can_be_told_to_use_the_baseline() -> None:
    done = run(STORE + "from kvloom.ops.impl import cpu\nprint(cpu.ISA)", KVLOOM_ISA="baseline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "baseline"
    assert done.stderr == ""


@compiled
def test_unknown_instruction_set_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_ISA", "sse9")
    known = "baseline, neon, avx2, avx512, amx or amx-emulated"
    with pytest.raises(ConfigError, match=f"KVLOOM_ISA must be {known}, got 'sse9'"):
        cpu.load_library()


@compiled
@pytest.mark.parametrize("prefetch", cpu.PREFETCHES)
def test_the_environment_says_where_attention_prefetches(
    prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.PREFETCH is not None
    monkeypatch.setenv("KVLOOM_PREFETCH", prefetch)
    try:
        library = cpu.load_library()
        assert library.handle is not None
        assert library.prefetch == prefetch
        assert library.handle.kvloom_prefetch_to_l2(-1) == cpu.PREFETCHES.index(prefetch)
    finally:
        cpu.choose_prefetch(cpu.PREFETCH)


@compiled
def test_unknown_cache_to_prefetch_to_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_PREFETCH", "l3")
    with pytest.raises(ConfigError, match="KVLOOM_PREFETCH must be l1 or l2, got 'l3'"):
        cpu.load_library()
    with pytest.raises(ConfigError, match="prefetch must be l1 or l2, got 'l3'"):
        cpu.choose_prefetch("l3")


@compiled
@pytest.mark.parametrize("quant", [None, QuantSpec(8, 16), QuantSpec(4, 32)], ids=str)
@pytest.mark.parametrize("layout", ["auto", "NHD", "HND"])
def test_bits_do_not_depend_on_where_attention_prefetches(quant: QuantSpec | None, layout: str) -> None:
    assert cpu.PREFETCH is not None
    spec = KVSpec(1, 2, 64, torch.bfloat16, quant=quant)
    storage = Storage(spec, spec, 16, torch.device("cpu"), layout)
    storage.reserve(1, 9)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 140, 2, 64, generator=generator).bfloat16()
    storage.store(key, value, torch.arange(140))
    query = torch.randn(1, 8, 64, generator=generator).bfloat16()
    index = CacheIndex.pages(torch.arange(9)[None] * 16, 16)
    batch = ops.Batch(index, torch.tensor([0, 1]), torch.tensor([0, 140]))
    try:
        found = []
        for prefetch in cpu.PREFETCHES:
            cpu.choose_prefetch(prefetch)
            found.append(ops.attend(query, storage.view, batch))
    finally:
        cpu.choose_prefetch(cpu.PREFETCH)
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.process
def test_without_a_library_a_warning_says_so_once_and_all_but_the_named_backend_works() -> None:
    code = f"""{STORE}
import kvloom.dialects.pmx, kvloom.ops.impl.cpu as cpu
assert cpu.ISA is None
try:
    ops.store(x, x, torch.tensor([2]), kv, backend="cpu")
except NotImplementedError as error:
    print(type(error).__name__, error)
"""
    done = run(code, KVLOOM_LIBRARY="/nowhere/libkvloom_cpu.so", KVLOOM_ISA="")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("store, load, copy and attend run in plain torch") == 1
    assert "pip install --force-reinstall --no-deps ." in done.stderr
    assert done.stdout.startswith(
        "UnsupportedError backend 'cpu' cannot run: the compiled kernels do not load"
    ), done


@pytest.mark.process
def test_without_a_library_layers_store_any_number_of_tokens() -> None:
    done = run(LAYERS, KVLOOM_LIBRARY="/nowhere/libkvloom_cpu.so", KVLOOM_ISA="")
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_library_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_LIBRARY", raising=False)
    assert cpu.find_library([str(tmp_path)]) is None
    monkeypatch.setattr(cpu, "find_library", lambda folders: None)
    library = cpu.load_library()
    assert library.isa is None
    assert library.why_no_amx is None
    assert library.handle is None
    assert library.max_head_dim == 0
    assert library.why_not is not None
    assert "no compiled kernels" in library.why_not
