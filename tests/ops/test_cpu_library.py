"""How the compiled library is found, chosen, and missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@compiled
def test_every_machine_can_be_told_to_use_the_baseline() -> None:
    done = run(STORE + "from kvloom.ops.impl import cpu\nprint(cpu.ISA)", KVLOOM_ISA="baseline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "baseline"
    assert done.stderr == ""


@compiled
def test_unknown_instruction_set_is_a_clear_error() -> None:
    done = run("import kvloom.ops", KVLOOM_ISA="sse9")
    assert done.returncode != 0
    assert (
        "ConfigError: KVLOOM_ISA must be baseline, avx2, avx512, amx or amx-emulated, got 'sse9'"
        in done.stderr
    )


def test_without_a_library_a_warning_says_so_once_and_everything_works() -> None:
    code = f"{STORE}\nimport kvloom.dialects.pmx, kvloom.ops.impl.cpu as cpu\nassert cpu.ISA is None"
    done = run(code, KVLOOM_LIBRARY="/nowhere/libkvloom_cpu.so", KVLOOM_ISA="")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("store, load, copy and attend run in plain torch") == 1
    assert "pip install --force-reinstall --no-deps ." in done.stderr


def test_without_a_library_the_named_backend_says_why_not() -> None:
    code = f"""{STORE}
try:
    ops.store(x, x, torch.tensor([2]), kv, backend="cpu")
except NotImplementedError as error:
    print(type(error).__name__, error)
"""
    done = run(code, KVLOOM_LIBRARY="/nowhere/libkvloom_cpu.so", KVLOOM_ISA="")
    assert done.stdout.startswith(
        "UnsupportedError backend 'cpu' cannot run: the compiled kernels do not load"
    ), done


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
