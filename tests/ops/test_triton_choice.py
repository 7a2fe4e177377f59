"""When Triton's kernels run, what is said when they do not, and that nobody waits for them otherwise."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from ops.attention import make_case
from ops.latents import latent_case
from oracles.bits import assert_same_bits

from kvloom import ops
from kvloom.errors import UnsupportedError
from kvloom.ops import api, cuda_kernels, schemas
from kvloom.ops.impl import triton

pytestmark = pytest.mark.process


def run(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh process that interprets no kernels unless told to."""
    own = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**own, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_operators_on_the_cpu_import_no_triton() -> None:
    code = """
import sys, torch
had = "triton" in sys.modules
from kvloom import KVSpec, KVView, ops
spec = KVSpec(1, 2, 8, torch.float32)
kv = KVView.joint(spec.axes, spec.empty(4)[0])
ops.load(torch.tensor([2]), kv)
print(had or "triton" not in sys.modules)
"""
    assert run(code) == "True"


def test_tensors_on_the_cpu_are_refused_by_name() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
import torch
from kvloom import KVSpec, KVView, ops
spec = KVSpec(1, 2, 8, torch.float32)
kv = KVView.joint(spec.axes, spec.empty(4)[0])
try:
    ops.store(torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([2]), kv, backend="triton")
except NotImplementedError as error:
    print(error, kv.key.cache.any().item())
"""
    assert run(code) == (
        "backend 'triton' needs tensors on a CUDA device (or TRITON_INTERPRET=1 in the environment), "
        "got cpu; use 'auto' or 'reference' False"
    )


def test_a_missing_triton_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "why_not_installed", lambda: "needs Triton: pip install triton numpy")
    case = make_case([1], [3])
    with pytest.raises(UnsupportedError, match=r"backend 'triton' needs Triton: pip install triton numpy"):
        ops.attend(case.query, case.kv, case.batch(), backend="triton")
    assert cuda_kernels() is None


def test_every_operator_is_there_for_cuda() -> None:
    for name in triton.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvloom::{name}", "CUDA")


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_latents_have_kernels_of_their_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name they are refused by the limits of latents, and on a device computed by their reference."""
    asked = []
    monkeypatch.setattr(triton, "why_not", lambda name, device, *args: asked.append(name) or "rests today")
    case = latent_case(16, 8)
    for call, overload in ((ops.attend, "attend.latent"), (ops.attend_part, "attend_part.latent")):
        if backend == "triton":
            with pytest.raises(UnsupportedError, match="backend 'triton' rests today; use 'auto'"):
                call(case.query, case.kv, case.batch(), is_latent=True, backend=backend)
            continue
        more = (None,) * 4 if call is ops.attend_part else ()
        arguments = (*api.attend_arguments(case.query, case.kv, case.batch(), ops.Scores(), 24), *more)
        found = schemas._on_cuda(triton.OPERATORS[overload])(*arguments)
        expected = call(case.query, case.kv, case.batch(), is_latent=True, backend="reference")
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b, overload)
    assert asked == ["attend_latent", "attend_latent_part"]


def test_the_dispatched_operator_falls_back_to_the_reference_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "why_not", lambda name, device, *args: f"has no {name} today")
    case = make_case([2, 1], [7, 5])
    arguments = api.attend_arguments(case.query, case.kv, case.batch(), ops.Scores(), 8)
    with caplog.at_level(logging.WARNING, logger="kvloom"):
        outs = [schemas._on_cuda("attend")(*arguments) for _ in range(3)]
    expected = ops.attend(case.query, case.kv, case.batch(), backend="reference")
    for out in outs:
        assert_same_bits(out, expected, "output")
    said = [x.getMessage() for x in caplog.records if "today" in x.getMessage()]
    assert said == ["attend runs in plain torch, slowly: backend 'triton' has no attend today"]


@pytest.mark.parametrize(
    ("width", "group", "why"),
    [
        (8192, None, "moves groups, or head vectors without scales, of at most 4096 elements, got 8192"),
        (8192, 64, None),
        (128, None, None),
    ],
)
def test_limits_of_movement_are_said(width: int, group: int | None, why: str | None) -> None:
    sides = pytest.importorskip("kvloom.ops.impl.triton.sides", reason="Triton is not installed")
    cache = torch.zeros(1, 1, 1, 1, 1, width, dtype=torch.int8)
    scale = None if group is None else torch.zeros(1, 1, 1, 1, 1, width // group)
    assert sides.why_not(cache, scale) == why
    assert sides.why_not(None, None) is None


def test_elements_that_no_kernel_moves_are_left_to_the_reference() -> None:
    sides = pytest.importorskip("kvloom.ops.impl.triton.sides", reason="Triton is not installed")
    cache = torch.zeros(1, 1, 1, 1, 1, 8, dtype=torch.complex128)
    assert sides.why_not(cache, None) == "moves elements of at most 8 bytes, got torch.complex128"
