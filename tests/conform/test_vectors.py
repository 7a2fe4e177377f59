"""The published vectors: how many, of what, the same from their seed, and in the schema that is published."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
from torch import Tensor

from kvloom.cli import main
from kvloom.conform.comparing import words
from kvloom.conform.describe import problems, result_shape
from kvloom.conform.judging import named
from kvloom.conform.operators import OPERATORS
from kvloom.conform.vectors import PUBLISHED, Vector, make, read
from kvloom.errors import ArgumentError

COUNT = None if os.environ.get("KVLOOM_PRODUCTS", "0") != "0" else 30
"""Legal vectors of each dialect that are made again; ``make slow`` makes all."""
INDEX = json.loads((PUBLISHED / "index.json").read_text(encoding="utf-8"))


def test_there_are_enough_and_they_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    legal, refused = (sum(each[k] for each in INDEX["dialects"].values()) for k in ("legal", "refused"))
    assert set(INDEX["dialects"]) == set(OPERATORS) and len(OPERATORS) >= 10
    assert legal + refused >= 1500 and refused >= 200
    nbytes = sum(file.stat().st_size for file in PUBLISHED.iterdir())
    assert nbytes <= 20e6
    assert main(["conform", "list"]) == 0
    out = capsys.readouterr().out
    assert f"{len(OPERATORS)} dialects, {legal + refused:,} vectors, {refused} of them calls" in out


@pytest.mark.parametrize("dialect", OPERATORS)
def test_they_come_from_their_seed_and_the_description_agrees(dialect: str) -> None:
    operator, every = OPERATORS[dialect], [*read(PUBLISHED, dialect)]
    assert all(bool(problems(operator, x.call)) == (x.expected is None) for x in every)
    legal, refused = ([x for x in every if (x.expected is None) == y] for y in (False, True))
    for stored, new in zip(legal[:COUNT] + refused, make(dialect, count=COUNT), strict=True):
        assert (stored.about, stored.refused) == (new.about, new.refused)
        assert stored.name == new.name or new.expected is None
        for x, y in ((stored.call, new.call), (stored.expected or {}, new.expected or {})):
            a, b = named(x), named(y)
            assert a.keys() == b.keys()
            for name, value in a.items():
                if isinstance(value, Tensor):
                    other = (
                        b[name].float()
                        if b[name].dtype == torch.float64 and x is not stored.call
                        else b[name]
                    )
                    assert value.stride() == other.stride() or x is not stored.call
                    assert torch.equal(words(value), words(other)), f"{stored.name} {name}"
                else:
                    assert value == b[name]


@pytest.mark.parametrize("dialect", OPERATORS)
def test_manifests_are_in_the_schema(dialect: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((PUBLISHED.parent / "schema.json").read_text(encoding="utf-8"))
    manifest = json.loads((PUBLISHED / f"{dialect}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(manifest)


def test_there_are_edge_values_strides_and_codes() -> None:
    found = set()
    for vector in read(PUBLISHED, "pmx.key_value_cache"):
        new = vector.call.get("current_key")
        if vector.expected is None or not isinstance(new, Tensor):
            continue
        found |= {f"int{vector.call.get('quant_bit', 0)}"} | (
            {"strided"} if not new.is_contiguous() else set()
        )
        if new.is_floating_point():
            tiny = torch.finfo(new.dtype).tiny
            x = new.double()
            kinds = {"nan": x.isnan(), "inf": x.isinf(), "subnormal": (x != 0) & (x.abs() < tiny)}
            kinds["largest"] = x.abs() == torch.finfo(new.dtype).max
            kinds["-0"] = (new == 0) & new.signbit()
            found |= {name for name, has in kinds.items() if bool(has.any())}
    assert found >= {"int0", "int4", "int8", "strided", "nan", "inf", "subnormal", "largest", "-0"}


def test_more_come_from_another_seed(tmp_path: Path) -> None:
    options = ["--dialect", "onnx.tensor_scatter", "--seed", "7", "--count", "5"]
    assert main(["conform", "vectors", str(tmp_path), *options]) == 0
    vectors = list(read(tmp_path, "onnx.tensor_scatter"))
    assert sum(vector.expected is not None for vector in vectors) == 5
    first = next(iter(read(PUBLISHED, "onnx.tensor_scatter")))
    assert (
        vectors[0].about != first.about
        or vectors[0].call["past_cache"].shape != first.call["past_cache"].shape
    )


def test_files_that_were_changed_are_refused(tmp_path: Path) -> None:
    assert main(["conform", "vectors", str(tmp_path), "--dialect", "vllm.copy_blocks", "--count", "2"]) == 0
    file = tmp_path / "vllm.copy_blocks.json"
    file.write_text(file.read_text(encoding="utf-8").replace("layers", "layer_"), encoding="utf-8")
    with pytest.raises(ArgumentError, match="the hash of the manifest differs"):
        list(read(tmp_path, "vllm.copy_blocks"))
    with pytest.raises(ArgumentError, match="dialect must be one of"):
        list(read(tmp_path, "onnx.attention"))


@pytest.mark.parametrize("dialect", OPERATORS)
def test_every_operator_is_described(dialect: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "describe", dialect]) == 0
    out = capsys.readouterr().out
    assert all(argument.name in out for argument in OPERATORS[dialect].arguments)
    assert all(f"-> {name}" in out for name in (*OPERATORS[dialect].outputs, *OPERATORS[dialect].updated))


@pytest.mark.parametrize("dialect", OPERATORS)
def test_results_have_the_axes_that_are_described(dialect: str) -> None:
    operator = OPERATORS[dialect]
    for vector in read(PUBLISHED, dialect):
        for name, x in (vector.expected or {}).items():
            base = name.partition(".")[0]
            if "@" in name or base not in operator.outputs:
                continue
            assert any(len(form.split()) == x.ndim for form in operator.axes[base].split("|"))
            if base == name:
                assert result_shape(operator, name, vector.call) == list(x.shape), vector.name


def test_described_shapes_count_history_and_repeated_heads(capsys: pytest.CaptureFixture[str]) -> None:
    main(["conform", "describe", "pmx.key_value_cache"])
    main(["conform", "describe", "pmx.dynamic_batching.key_value_cache"])
    main(["conform", "describe", "microsoft.group_query_attention"])
    out = capsys.readouterr().out
    assert "[B start_pos+S H*num_repeat D]" in out and "[kvstarts[B] H*num_repeat D]" in out
    assert "where a row has no token, 0 is right, too" in out


def legal(dialect: str) -> list[Vector]:
    return [vector for vector in read(PUBLISHED, dialect) if vector.expected is not None]


def test_pages_start_at_any_slot_and_offsets_come_in_any_order() -> None:
    calls = [v.call for v in legal("pmx.dynamic_batching.key_value_cache")]
    tables = [(call["cachestarts"], call["page_size"]) for call in calls]
    firsts = [(x[(x >= 0) & (x < 1 << 40)], size) for x, size in tables if x.ndim == 2]
    assert sum(bool((x % size).any()) for x, size in firsts) > 20
    assert sum(bool((x.diff() < 0).any()) for x, _ in tables if x.ndim == 1) > 20


def test_entries_read_what_entries_behind_them_write() -> None:
    for dialect in OPERATORS:
        if "dynamic_batching" in dialect:
            assert sum(" reads what entry " in v.about for v in legal(dialect)) > 20


def test_negative_slots_are_others_than_minus_one() -> None:
    for dialect in ("ascend.scatter_pa_kv_cache", "vllm.reshape_and_cache", "vllm.reshape_and_cache_flash"):
        slots = torch.cat([v.call["slot_mapping"].reshape(-1).long() for v in legal(dialect)])
        assert len(slots[slots < 0].unique()) > 3


def test_attributes_are_left_out_and_given_other_values() -> None:
    vectors = legal("microsoft.group_query_attention")
    assert sum(v.call.get("softcap", 0.0) > 0 for v in vectors) > 20
    assert sum("scale" in v.call for v in vectors) > 10
    calls = [v.call for v in legal("pmx.key_value_cache")]
    for name, default in (("num_layer", 1), ("layer_idx", 0), ("quant_bit", 0), ("num_repeat", 1)):
        assert any(name not in call for call in calls)
        assert any(call.get(name, default) != default for call in calls)
