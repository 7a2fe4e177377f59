"""Every kernel compiles for compute capability 9.0, in the pinned configurations, into what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ops import kernels

pytestmark = [*kernels.pytestmark, pytest.mark.process]

SHARED_OF_A_BLOCK = 227 << 10
SHARED_OF_A_BLOCK_OF_BEFORE = 163 << 10  # compute capability 8.0
ATTEND = ["attend_kernel", "attend_kernel", "merge_kernel"]  # many new tokens, few of them

CASES = {
    "Llama-3-8B": "--ratio 4",
    "Llama-3-8B int8": "--ratio 4 --kind int8",
    "Llama-3-8B int4": "--ratio 4 --kind int4",
    "Llama-3-8B int2": "--ratio 4 --kind int2",
    "Llama-3-70B": "--ratio 8",
    "Llama-3-70B int8": "--ratio 8 --kind int8",
    "Llama-3-70B int4": "--ratio 8 --kind int4",
    "float16": "--dtype float16",
    "float16 int4": "--dtype float16 --kind int4",
    "float32": "--dtype float32",
    "64": "--head-dim 64",
    "80": "--head-dim 80",
    "96": "--head-dim 96 --ratio 1",
    "192/128": "--head-dim 192 --value-dim 128",
    "256": "--head-dim 256",
    "256 float32": "--head-dim 256 --dtype float32",
    "groups of 8": "--kind int8_g8",
    "everything": "--everything --pairs 4",
    "positional bias": "--pairs 4",
    "positional bias int4": "--pairs 4 --kind int4",
    "positional bias of 17 pairs": "--pairs 17 --kind int8",
    "latents": "--latent --head-dim 512 --value-dim 64 --ratio 16",
    "latents and wide rope keys": "--latent --head-dim 512 --value-dim 256 --ratio 128",
    "latents of many heads": "--latent --head-dim 512 --value-dim 64 --ratio 128",
    "latents int4": "--latent --head-dim 256 --value-dim 64 --ratio 128 --kind int4",
    "a cache of one slot": "--slots 1",
    "split heads and blocks": "--layout B_(H_D/16)_S_D%16",
}


Compile = Callable[[str], list[dict[str, object]]]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compile]:
    """What a process compiles, in which kernels are not interpreted."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, script]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def compile_case(options: str) -> list[dict[str, object]]:
            process.stdin.write(options + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, "the process has ended, and said why"
            kernels: list[dict[str, object]] = json.loads(line)
            return kernels

        yield compile_case


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile(case: str, compiled: Compile) -> None:
    kernels = compiled(CASES[case])
    assert [x["kernel"] for x in kernels] == ["_store_kernel", "_load_kernel", "_plan_kernel", *ATTEND]
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_OF_A_BLOCK, kernel
    assert kernels[0]["exact_division"]
    if case not in ("groups of 8", "split heads and blocks"):
        # Load reads as many numbers as it writes, in fewer bytes.
        assert kernels[0]["wide_loads"]
        assert kernels[1]["wide_stores"]
        assert kernels[4]["wide_loads"]
    if "float32" not in CASES[case]:
        assert all(x["tensor_cores"] for x in kernels[3:5])


@pytest.mark.parametrize(
    "options", ["--pairs 9", "--head-dim 80", "--pairs 4 --dtype float16 --head-dim 256"]
)
def test_vectors_are_smoothed_and_rotated_without_spills_for_any_number(
    options: str, compiled: Compile
) -> None:
    steps = [compiled(f"--vectors {options} --tokens {tokens}") for tokens in (2, 5, 48)]
    assert [x["kernel"] for x in steps[0]] == ["_vectors_kernel"] * 4
    # Angles are reduced in an array of some bytes, as CUDA's own cosine does.
    assert all(int(str(x["stack"])) <= 64 for x in steps[0][:2])
    assert all(x["stack"] == 0 for x in steps[0][2:])
    assert len({tuple(x["hash"] for x in step) for step in steps}) == 1


@pytest.mark.parametrize("options", ["--kind int4", "--everything"])
def test_steps_of_all_sizes_run_the_same_machine_code(options: str, compiled: Compile) -> None:
    """Compiling takes seconds, in which a server answers nobody."""
    sizes = ["--sequences 1 --pages 7 --tokens 1", "--sequences 3 --pages 33 --tokens 5",
             "--sequences 16 --pages 48 --tokens 48"]  # fmt: skip
    steps = [compiled(f"{options} {size}") for size in sizes]
    for few in ("_store_kernel", "_load_kernel", "_plan_kernel", "attend_kernel", "merge_kernel"):
        assert len({[x for x in step if x["kernel"] == few][-1]["hash"] for step in steps}) == 1, few
    assert len({step[3]["hash"] for step in steps[1:]}) == 1, "of many new tokens"


@pytest.mark.parametrize(
    "case", ["Llama-3-8B", "Llama-3-8B int8", "Llama-3-8B int4", "positional bias", "positional bias int4"]
)
def test_a_decode_step_of_bfloat16_spills_few_registers(case: str, compiled: Compile) -> None:
    """A warp has all that a thread can have, 255 of four bytes; what is spilled is not in the loop."""
    assert int(str(compiled(CASES[case])[4]["stack"])) < 256


def test_a_decode_step_over_latents_spills_where_care_is_needed(compiled: Compile) -> None:
    """Sums of 16 rows take 64 registers of a thread; a second look at NaN takes twice as many."""
    assert int(str(compiled(CASES["latents"])[4]["stack"])) < 512


@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_storing_codes_divides_once_for_a_group(dtype: str, kind: str, compiled: Compile) -> None:
    """A thread has at most two groups; a function for rare operands has a reciprocal of its own."""
    kernel = compiled(f"--dtype {dtype} --kind {kind}")[0]
    assert int(str(kernel["reciprocals"])) <= 3
    assert kernel["stack"] == 0


def test_devices_of_before_get_kernels_too(compiled: Compile) -> None:
    kernels = compiled("--capability 80 --ratio 4 --kind int4")
    assert all(x["tensor_cores"] for x in kernels[3:5])
    assert all(int(str(x["shared"])) <= SHARED_OF_A_BLOCK_OF_BEFORE for x in kernels)
