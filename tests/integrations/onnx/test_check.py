"""Good models pass; bad ones are named, one sentence for each problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx", reason="makes models")

from onnx import ModelProto, helper
from oracles import bits
from oracles.onnx_models import Case, attention_cases, dynamic_cases, model_of, static_cases
from oracles.pmx_cases import Numerics, static_call

from kvloom.errors import ArgumentError, ModelError
from kvloom.integrations import onnx as kvonnx

INT8 = Numerics(torch.float32, torch.int8, torch.float16, bit=8)


def good(how: Numerics = INT8, **options: Any) -> ModelProto:
    """A model of the static operator."""
    return model_of(Case("static", static_call(how, 1, 1, bits.generator(0))), **options)


def fused() -> ModelProto:
    return model_of(next(attention_cases()), dynamic_axes=False)


@pytest.mark.parametrize("cases", [static_cases, dynamic_cases, attention_cases])
def test_every_model_of_the_grid_passes(cases: Callable[[], Any]) -> None:
    for number, case in enumerate(cases()):
        if number % 17 == 0:
            kvonnx.check(model_of(case, dynamic_axes=number % 2 == 0))


def with_attribute(name: str, value: Any) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        kept = [a for a in model.graph.node[0].attribute if a.name != name]
        del model.graph.node[0].attribute[:]
        model.graph.node[0].attribute.extend(kept)
        if value is not None:
            model.graph.node[0].attribute.append(helper.make_attribute(name, value))

    return change


def int4_with_odd_groups(model: ModelProto) -> None:
    with_attribute("quant_bit", 4)(model)
    with_attribute("quant_group", 1)(model)


def with_input(name: str, elem_type: int, dims: list[int]) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        (info,) = (x for x in model.graph.input if x.name == name)
        info.CopyFrom(helper.make_tensor_value_info(name, elem_type, dims))

    return change


def with_version(version: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        model.opset_import[1].version = version

    return change


def without_import(model: ModelProto) -> None:
    del model.opset_import[1]


def without_scale(model: ModelProto) -> None:
    model.graph.node[0].input.pop()


def without_cache(model: ModelProto) -> None:
    model.graph.node[0].input[3] = ""


def renamed(model: ModelProto) -> None:
    model.graph.node[0].op_type = "KVCache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_version(7), "domain opmx must be imported with version 1, got 7"),
        (without_import, "domain opmx must be one of the model.s opset imports, got"),
        (without_scale, "input scale must be given where quant_bit is 8, got none"),
        (without_cache, "input cache must be given, got none"),
        (renamed, "operator must be one of .*opmx::KeyValueCache.*, got KVCache"),
        (with_attribute("quant_bit", 5), r"attribute quant_bit must be one of \[0, 4, 8\], got 5"),
        (with_attribute("cache_layout", 2), r"attribute cache_layout must be in \[0, 2\), got 2"),
        (with_attribute("layer_idx", 2), r"attribute layer_idx must be in \[0, 2\), got 2"),
        (with_attribute("num_layer", 0), "attribute num_layer must be at least 1, got 0"),
        (with_attribute("num_repeat", 0), "attribute num_repeat must be at least 1, got 0"),
        (with_attribute("quant_group", "x"), "attribute quant_group must be an int"),
        (
            with_attribute("page_size", 4),
            r"attribute must be one of KeyValueCache.s \(num_layer, .*\), got page_size",
        ),
        (with_attribute("quant_group", 5), "attribute quant_group must divide the head dim 32, got 5"),
        (int4_with_odd_groups, "attribute quant_group must be even where quant_bit is 4, got 1"),
        (with_attribute("num_layer", 3), "input cache must be .* with L=3"),
        (with_input("cache", 1, [2, 3, 2, 2, 7, 32]), "input cache must be int8, got float"),
        (with_input("start_pos", 6, []), "input start_pos must be int64, got int32"),
        (with_input("start_pos", 7, [2]), "input start_pos must be a scalar"),
        (with_input("current_value", 10, [2, 3, 2, 32]), "input current_value must be float, got float16"),
        (with_input("current_value", 1, [2, 3, 1, 32]), "input current_value must be .* with .*H=2"),
        (with_input("cache", 3, [2, 3, 2, 2, 7, 16]), "input cache must be .* with .*D=32"),
        (with_input("cache", 3, [2, 3, 2, 7, 32]), "input cache must be .*, got rank 5"),
        (with_input("scale", 10, [2, 3, 2, 2, 7, 3]), "input scale must be .* with .*D=4"),
    ],
)
def test_a_bad_model_is_named(change: Callable[[ModelProto], None], message: str) -> None:
    model = good(dynamic_axes=False)
    kvonnx.check(model)
    change(model)
    with pytest.raises(ModelError, match=message):
        kvonnx.check(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_attribute("num_kv_heads", 3), "attribute num_kv_heads must divide num_heads"),
        (with_attribute("is_causal", None), "attribute is_causal must be given"),
        (with_attribute("cache_mode", 2), r"attribute cache_mode must be one of \[0, 1\]"),
        (with_input("query", 3, [10, 2, 16]), "input query must be float or float16 or bfloat16, got int8"),
        (with_input("query", 1, [10, 3, 16]), "input query must be .* with Hq=2"),
        (with_input("start_pos", 7, [4]), "input start_pos must be .*B=5"),
        (with_input("cachestarts", 7, [5, 2]), "input cachestarts must have rank 1"),
    ],
)
def test_a_bad_attention_is_named(change: Callable[[ModelProto], None], message: str) -> None:
    model = fused()
    kvonnx.check(model)
    change(model)
    with pytest.raises(ModelError, match=message):
        kvonnx.check(model)


def test_every_problem_has_a_sentence() -> None:
    model = good()
    with_attribute("quant_bit", 5)(model)
    with_attribute("num_repeat", 0)(model)
    assert len(kvonnx.problems(model)) == 2


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    data = good().SerializeToString()
    path = tmp_path / "step.onnx"
    for length in range(len(data)):
        with pytest.raises(ModelError):
            kvonnx.check(data[:length])
    path.write_bytes(data[:100])
    with pytest.raises(ModelError, match=r"step\.onnx"):
        kvonnx.check(path)
    path.write_bytes(data)
    kvonnx.check(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere"):
        kvonnx.check(tmp_path / "nowhere.onnx")


@pytest.mark.parametrize(
    ("attributes", "scale", "message"),
    [
        ({"quant_bit": 3}, "s", "quant_bit must be"),
        ({"quant_bit": 8}, "", "scale must be given"),
        ({"layer_idx": 1}, "", "layer_idx must be"),
        ({"cache_mode": 0}, "", "attribute must be one of .*, got cache_mode"),
        ({"domain": "mine"}, "", "domain must be one of"),
        ({"outputs": ("key",)}, "", "outputs must be"),
    ],
)
def test_builders_refuse_what_check_would(attributes: dict[str, Any], scale: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kvonnx.key_value_cache("k", "v", "p", "c", scale, **attributes)


def test_builders_keep_the_order_of_the_documents() -> None:
    inputs = [f"i{n}" for n in range(13)]
    node = kvonnx.multi_head_cache_attention(
        *inputs, num_kv_heads=2, is_causal=True, head_dim=8, num_heads=4, quant_bit=8, domain="pmx"
    )
    assert list(node.input) == inputs
    assert node.domain == "pmx.dynamic_batching"
    assert [a.name for a in node.attribute] == [
        "num_heads",
        "head_dim",
        "is_causal",
        "num_kv_heads",
        "quant_bit",
    ]
    without_scale = kvonnx.multi_head_cache_attention(
        *inputs[:11], attn_mask="m", num_heads=4, head_dim=8, is_causal=False
    )
    assert list(without_scale.input) == [*inputs[:11], "", "m"]
    assert list(kvonnx.dynamic_key_value_cache(*inputs[:9]).input) == inputs[:9]
