"""Each way to name a target: a callable, ONNX, a shared library, a command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("onnxruntime")
import onnx
from conform.known_differences import known
from onnx import TensorProto, helper

import kvloom.conform
from kvloom.cli import main
from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.operators import OPERATORS
from kvloom.conform.outcomes import CallRefused
from kvloom.conform.running import run
from kvloom.conform.targets import open_target
from kvloom.conform.vectors import Vector, published, read
from kvloom.errors import ArgumentError

HERE = Path(__file__).parent
PEERS = {
    "pmx.key_value_cache": "key_value_cache",
    "pmx.dynamic_batching.key_value_cache": "dynamic_key_value_cache",
    "pmx.dynamic_batching.multi_head_cache_attention": "multi_head_cache_attention",
    "opmx.dynamic_batching.multi_head_cache_attention": "opmx_multi_head_cache_attention",
    "ascend.scatter_pa_kv_cache": "scatter_pa_kv_cache",
    "ascend.gather_pa_kv_cache": "gather_pa_kv_cache",
    "microsoft.paged_attention": "paged_attention",
    "vllm.reshape_and_cache": "reshape_and_cache",
    "vllm.reshape_and_cache_flash": "reshape_and_cache_flash",
    "vllm.copy_blocks": "copy_blocks",
    "flashinfer.append_paged_kv_cache": "append_paged_kv_cache",
    "transformers.cache_update": "kvloom_cache_update",
    "onnx.linear_attention": "linear_attention",
    "onnx.causal_conv_with_state": "causal_conv_with_state",
}


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compiled(folder: Path, *more: str) -> Path:
    """The library of ``target.c``."""
    library, header = folder / "target.so", Path(kvloom.conform.__file__).parent
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-I{header}", *more]
    subprocess.run(["cc", *flags, str(HERE / "target.c"), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize("dialect", PEERS)
def test_kvloom_conforms(dialect: str) -> None:
    report = run(open_target(f"kvloom.conform.peers:{PEERS[dialect]}"), read(published(), dialect))
    assert [outcome.message for outcome in report.failures] == []
    assert report.count("skipped") == 0 and report.passed


@pytest.mark.parametrize(
    "dialect", [name for name, each in OPERATORS.items() if each.domain in ("", "com.microsoft")]
)
@pytest.mark.parametrize("target", ["onnxruntime", "onnx.reference"])
def test_onnx_agrees_with_the_oracles_on_every_legal_call_it_runs(dialect: str, target: str) -> None:
    legal = [vector for vector in read(published(), dialect) if vector.expected is not None]
    report = run(open_target(target), [v for v in legal if not known(target, dialect, v.call)])
    assert [outcome.message for outcome in report.failures] == []
    assert report.passed or (target, dialect[:9]) == ("onnx.reference", "microsoft")


@pytest.mark.parametrize("dialect", ["onnx.linear_attention", "onnx.causal_conv_with_state"])
def test_kernels_of_onnx_runtime_agree_with_the_oracles_of_operators_that_it_had_before(dialect: str) -> None:
    """``com.microsoft`` has kernels of these names; those of ONNX are bodies of standard operators there."""
    inner, twin = open_target("onnxruntime"), replace(OPERATORS[dialect], domain="com.microsoft")
    legal = [vector for vector in read(published(), dialect) if vector.expected is not None]
    report = run(lambda operator, vector, call: inner(twin, vector, call), legal)
    assert [outcome.message for outcome in report.failures] == []
    assert report.count("passed") > len(legal) / 2
    assert {outcome.message.split()[0] for outcome in report.outcomes if outcome.status == "skipped"} == {
        "bfloat16"
    }


def test_a_state_in_another_dtype_than_it_came_in_is_wrong() -> None:
    inner = open_target("kvloom.conform.peers:linear_attention")

    def halved(operator: Operator, vector: Vector, call: Call) -> Results:
        results = inner(operator, vector, call)
        return {**results, "present_state": results["present_state"].to(call["query"].dtype)}

    legal = [vector for vector in read(published(), "onnx.linear_attention") if vector.expected is not None]
    report = run(halved, legal)
    mixed = [v for v in legal if v.expected and v.expected["present_state"].dtype != v.call["query"].dtype]
    failed = [outcome.vector.name for outcome in report.failures]
    assert len(mixed) > 20 and sorted(failed) == sorted(v.name for v in mixed)
    assert all(o.message.startswith("present_state must be float32 [") for o in report.failures)


def test_an_onnx_runtime_that_is_older_than_the_operator_skips_it() -> None:
    later = replace(OPERATORS["onnx.causal_conv_with_state"], opset=99)
    inner = open_target("onnxruntime")
    legal = [vector for vector in read(published(), later.name) if vector.expected is not None]
    vectors = [vector for vector in legal if vector.call["input"].dtype == torch.float32][:3]
    report = run(lambda operator, vector, call: inner(later, vector, call), vectors)
    assert {outcome.message for outcome in report.outcomes} == {"this ONNX Runtime has no opset 99"}
    assert report.count("skipped") == 3 and not report.passed


def test_transformers_agrees_with_the_oracle() -> None:
    pytest.importorskip("transformers")
    report = run(
        open_target("kvloom.conform.peers:cache_update"), read(published(), "transformers.cache_update")
    )
    assert report.passed


@pytest.mark.process
@needs_cc
@pytest.mark.parametrize("bug", [False, True])
def test_a_c_function_is_judged(tmp_path: Path, bug: bool) -> None:
    library = compiled(tmp_path, *(["-DBUG"] if bug else []))
    report = run(
        open_target(f"{library}:reshape_and_cache_flash"), read(published(), "vllm.reshape_and_cache_flash")
    )
    assert report.passed != bug and report.count("skipped") == 0
    assert (report.cause is not None and report.cause.name == "value for key") == bug


def half(vector: Vector) -> bool:
    return vector.expected is not None and vector.call["key"].dtype == torch.float16


@pytest.mark.process
@needs_cc
def test_what_a_c_function_does_not_do_is_skipped(tmp_path: Path) -> None:
    vectors = list(read(published(), "vllm.reshape_and_cache_flash"))
    report = run(open_target(f"{compiled(tmp_path)}:only_float16"), vectors)
    assert report.passed and {o.status for o in report.outcomes if half(o.vector)} == {"passed"}
    skipped = [outcome for outcome in report.outcomes if outcome.status == "skipped"]
    assert skipped and {outcome.message for outcome in skipped} == {"there is a kernel for float16 only"}


def test_what_a_callable_does_not_do_is_skipped_and_nothing_else_is_no_pass() -> None:
    from kvloom.conform.targets import python_target

    def none(**call: torch.Tensor) -> None:
        raise NotImplementedError("float16 only" if "slot_mapping" in call else "")

    vectors = list(read(published(), "vllm.reshape_and_cache_flash"))
    legal = run(python_target(none), [vector for vector in vectors if vector.expected is not None])
    assert legal.count("skipped") == len(legal.outcomes) and not legal.passed

    def refuses_or_does_not(**call: torch.Tensor) -> None:
        raise NotImplementedError if call.get("key") is not None and call["key"].dim() == 3 else ValueError

    assert not run(python_target(refuses_or_does_not), vectors).passed


@pytest.mark.process
@needs_cc
def test_outputs_are_there_for_calls_that_must_be_refused(tmp_path: Path) -> None:
    target = open_target(f"{compiled(tmp_path)}:writes_then_refuses")
    refused = [v for v in read(published(), "pmx.key_value_cache") if v.expected is None]
    for vector in refused:
        with pytest.raises(CallRefused, match="two outputs"):
            target(OPERATORS[vector.dialect], vector, dict(vector.call))


@pytest.mark.process
def test_a_command_is_judged() -> None:
    vectors = list(read(published(), "vllm.copy_blocks"))
    target = open_target(f"command:{sys.executable} {HERE / 'command.py'}")
    assert run(target, vectors[:3]).passed
    refused = [
        v for v in vectors if v.expected is None and v.refused == "block_mapping" and "axis 1" in v.about
    ]
    assert run(target, refused).passed


def model(path: Path, mode: str) -> Path:
    """``TensorScatter`` of float32, its mode fixed."""
    node = helper.make_node(
        "TensorScatter", ["past_cache", "update", "write_indices"], ["present_cache"], mode=mode, axis=-2
    )
    shape = [None] * 4
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("past_cache", "update")]
    inputs.append(helper.make_tensor_value_info("write_indices", TensorProto.INT64, [None]))
    outputs = [helper.make_tensor_value_info("present_cache", TensorProto.FLOAT, shape)]
    graph = helper.make_graph([node], "scatter", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), str(path))
    return path


def test_an_onnx_model_is_judged_by_the_vectors_that_fit_it(tmp_path: Path) -> None:
    vectors = [v for v in read(published(), "onnx.tensor_scatter") if v.expected is not None]
    report = run(open_target(str(model(tmp_path / "m.onnx", "circular"))), vectors)
    assert report.passed and report.count("skipped")
    reasons = {outcome.message for outcome in report.outcomes if outcome.status == "skipped"}
    assert "the model has mode = b'circular', not 'linear'" in reasons


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nonsense", "TARGET must be package.module:function"),
        ("kvloom.conform.nowhere:f", "TARGET must be a callable, got kvloom.conform.nowhere:f"),
        ("kvloom.conform.peers:nothing", "has no attribute 'nothing'"),
        ("kvloom.conform.peers:__doc__", "TARGET must be a callable"),
        ("missing.so:f", "TARGET must be a shared library and a function of it"),
        ("missing.so", "TARGET must be a library of custom operators"),
        ("missing.onnx", "TARGET must be a model that ONNX Runtime loads"),
    ],
)
def test_what_is_no_target_is_refused(target: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_target(target)


@pytest.mark.process
def test_a_command_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "run", "--dialect", "vllm.copy_blocks", "command:/nowhere"]) == 2
    assert "TARGET must be a command" in capsys.readouterr().err


def test_an_input_that_was_changed_is_a_failure() -> None:
    from kvloom.conform import peers
    from kvloom.conform.targets import python_target

    def writes_its_input(**call: torch.Tensor) -> None:
        peers.reshape_and_cache_flash(**call)
        call["key"].zero_()

    def named(vector: Vector) -> bool:
        return vector.expected is not None and bool(vector.call["key"].numel())

    vectors = [v for v in read(published(), "vllm.reshape_and_cache_flash") if named(v)]
    report = run(python_target(writes_its_input), vectors[:5])
    assert report.failures and "key was changed, which this call must not do" in report.failures[0].message
