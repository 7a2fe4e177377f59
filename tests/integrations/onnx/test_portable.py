"""The portable form: PyTorch, ``onnx.reference`` and ONNX Runtime agree on every call of the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="runs models")

import onnx.inliner
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator
from oracles import bits
from oracles.attention import assert_as_good_as_plain, plain_attention
from oracles.onnx_models import Case, attention_cases, dynamic_cases, in_torch, model_of, static_cases
from oracles.pmx_attention import unfused_call
from oracles.pmx_cases import Numerics, static_call
from torch import Tensor

from kvloom.conform.oracles import pmx as pmx_golden
from kvloom.dialects import pmx
from kvloom.errors import ArgumentError, ModelError
from kvloom.integrations import onnx as kvonnx
from kvloom.integrations.onnx.session import to_numpy, to_torch

OPERATORS = {
    "static": pmx.key_value_cache,
    "dynamic": pmx.dynamic_batching.key_value_cache,
    "attention": pmx.dynamic_batching.multi_head_cache_attention,
}
GRID = pytest.mark.parametrize("cases", [static_cases, dynamic_cases, attention_cases])
Cases = Callable[[], Iterator[Case]]


def assert_outputs(case: Case, outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Caches, scales, keys and values have the same bits; attention is within the error rule."""
    for name, want in expected.items():
        if name != "attn_output":
            bits.assert_same_bits(outputs[name], want, name)
    if case.kind == "attention":
        golden = pmx_golden.multi_head_cache_attention(**case.call)
        plain = plain_attention(**unfused_call(case.call, golden.key, golden.value))
        assert_as_good_as_plain(outputs["attn_output"], golden.output, plain)


def by_standard_operators(model: ModelProto, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inlined model in ``onnx.reference``: numpy, and no operator that is not of the standard."""
    inlined = onnx.inliner.inline_local_functions(model)
    assert {node.domain for node in inlined.graph.node} == {""}
    evaluator = ReferenceEvaluator(inlined)
    made = evaluator.run(None, {name: to_numpy(x) for name, x in feeds.items()})
    return dict(zip(evaluator.output_names, map(to_torch, made), strict=True))


@GRID
def test_onnx_runtime_agrees_with_pytorch(cases: Cases) -> None:
    for case in cases():
        feeds = case.feeds()
        outputs = kvonnx.run(model_of(case), feeds, backend="onnxruntime")
        assert_outputs(case, outputs, in_torch(case, OPERATORS[case.kind]))
        assert outputs["cache"] is feeds["cache"]


@GRID
def test_standard_operators_agree_in_onnx_reference(cases: Cases) -> None:
    for number, case in enumerate(cases()):
        if number % 2:
            outputs = by_standard_operators(kvonnx.portable(model_of(case)), case.feeds())
            expected = in_torch(case, OPERATORS[case.kind])
            renamed = {name.removesuffix("_out"): x for name, x in outputs.items()}
            assert_outputs(case, renamed, expected)


def test_the_functional_form_agrees_in_onnx_reference_with_kvlooms_operators() -> None:
    for number, case in enumerate(dynamic_cases()):
        if number % 10 == 0:
            outputs = kvonnx.run(kvonnx.portable(model_of(case)), case.feeds())
            assert_outputs(case, outputs, in_torch(case, OPERATORS[case.kind]))


@pytest.mark.parametrize("opset", [18, 21, 24])
def test_every_opset_from_18_on_will_do(opset: int) -> None:
    for case in (next(static_cases()), next(attention_cases())):
        model = model_of(case, opset=opset)
        outputs = kvonnx.run(model, case.feeds(), backend="onnxruntime")
        assert_outputs(case, outputs, in_torch(case, OPERATORS[case.kind]))


def test_an_older_opset_is_refused() -> None:
    with pytest.raises(ModelError, match="opset 18 or later"):
        kvonnx.portable(model_of(next(static_cases()), opset=17))


def info(name: str, elem_type: int, *dims: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, dims)


def layered(num_layer: int, *, reads_between: bool = False) -> ModelProto:
    """Nodes for the layers of one quantized cache, each storing the keys that the one before returned."""
    nodes, key = [], "k"
    for layer in range(num_layer):
        made = (f"key{layer}", f"value{layer}")
        options = {"num_layer": num_layer, "layer_idx": layer, "quant_bit": 8, "cache_layout": 1}
        nodes.append(kvonnx.key_value_cache(key, "v", "start", "cache", "scale", outputs=made, **options))
        nodes.append(helper.make_node("Neg", ["k"], [f"next{layer}"]))
        key = f"next{layer}"
    outputs = [info(f"key{num_layer - 1}", TensorProto.FLOAT, "B", "E", "H", "D")]
    if reads_between:
        nodes.insert(1, helper.make_node("Identity", ["scale"], ["seen"]))
        outputs.append(info("seen", TensorProto.FLOAT, "L", "M", 2, "H", "T", "G"))
    inputs = [info(x, TensorProto.FLOAT, "B", "S", "H", "D") for x in ("k", "v")]
    inputs.append(info("start", TensorProto.INT64))
    inputs.append(info("cache", TensorProto.INT8, num_layer, "M", 2, "H", "T", "D"))
    inputs.append(info("scale", TensorProto.FLOAT, num_layer, "M", 2, "H", "T", "G"))
    graph = helper.make_graph(nodes, "layers", inputs, outputs)
    return helper.make_model(graph, opset_imports=kvonnx.opset_imports(), ir_version=10)


def layered_feeds(num_layer: int) -> dict[str, Tensor]:
    new = torch.randn(1, 3, 2, 8)
    return {
        "k": new,
        "v": new * 2,
        "start": torch.tensor(1),
        "cache": torch.zeros(num_layer, 1, 2, 2, 6, 8, dtype=torch.int8),
        "scale": torch.zeros(num_layer, 1, 2, 2, 6, 1),
    }


@pytest.mark.parametrize("reads_between", [False, True])
def test_layers_of_one_cache_are_threaded(reads_between: bool) -> None:
    model = layered(3, reads_between=reads_between)
    feeds = layered_feeds(3)
    runs = []
    for backend in ("reference", "onnxruntime"):
        own = {name: x.clone() for name, x in feeds.items()}
        runs.append((kvonnx.run(model, own, backend=backend), own))
    for name in ("cache", "scale", "key2"):
        bits.assert_same_bits(runs[1][0][name], runs[0][0][name], name)
    assert bool(runs[1][1]["cache"].flatten(1).any(1).all())
    portable = kvonnx.portable(model)
    assert [x.name for x in portable.graph.output][-2:] == ["cache_out", "scale_out"]
    assert len(portable.functions) == 1, "layers share one body"


@pytest.mark.parametrize(("attribute", "values"), [("quant_group", (4, 8)), ("cache_layout", (0, 1))])
def test_nodes_that_differ_in_an_attribute_have_bodies_of_their_own(
    attribute: str, values: tuple[int, ...]
) -> None:
    nodes, inputs, outputs, feeds = [], [], [], {"k": torch.randn(1, 3, 4, 8), "start": torch.tensor(0)}
    options = [{"quant_bit": 8, "quant_group": 8, attribute: value} for value in values]
    for i, attributes in enumerate(options):
        mine = [f"{name}{i}" for name in ("cache", "scale", "key", "value")]
        nodes.append(
            kvonnx.key_value_cache("k", "k", "start", mine[0], mine[1], outputs=mine[2:], **attributes)
        )
        # As many slots as heads, so that the shape is that of both layouts.
        feeds[mine[0]] = torch.zeros(1, 1, 2, 4, 4, 8, dtype=torch.int8)
        feeds[mine[1]] = torch.zeros(1, 1, 2, 4, 4, 8 // attributes["quant_group"])
        inputs += [
            info(mine[0], TensorProto.INT8, *6 * [None]),
            info(mine[1], TensorProto.FLOAT, *6 * [None]),
        ]
        outputs.append(info(mine[2], TensorProto.FLOAT, *4 * [None]))
    inputs += [info("k", TensorProto.FLOAT, "B", "S", "H", "D"), info("start", TensorProto.INT64)]
    graph = helper.make_graph(nodes, "two", inputs, outputs)
    model = helper.make_model(graph, opset_imports=kvonnx.opset_imports(), ir_version=10)
    made = kvonnx.run(model, {name: x.clone() for name, x in feeds.items()}, backend="onnxruntime")
    for i, attributes in enumerate(options):
        cache, scale = feeds[f"cache{i}"], feeds[f"scale{i}"]
        key, _ = pmx.key_value_cache(feeds["k"], feeds["k"], 0, cache, scale, **attributes)
        for name, want in (("key", key), ("cache", cache), ("scale", scale)):
            bits.assert_same_bits(made[f"{name}{i}"], want, f"{name}{i}")


def test_a_cache_that_others_read_is_updated_by_a_copy() -> None:
    """The value read before the write must not change under its reader."""
    model = layered(1)
    model.graph.node.insert(0, helper.make_node("Identity", ["cache"], ["before"]))
    model.graph.output.append(info("before", TensorProto.INT8, "L", "M", 2, "H", "T", "D"))
    feeds = layered_feeds(1)
    outputs = kvonnx.run(model, feeds, backend="onnxruntime")
    assert not bool(outputs["before"].any())
    assert outputs["cache"] is feeds["cache"]
    assert bool(feeds["cache"].any())


def test_steps_update_the_same_memory() -> None:
    session = kvonnx.Session(layered(1), backend="onnxruntime")
    feeds = layered_feeds(1)
    address = feeds["cache"].data_ptr()
    for start in range(3):
        outputs = session.run({**feeds, "start": start})
        assert outputs["cache"].data_ptr() == outputs["cache_out"].data_ptr() == address
    assert feeds["cache"][0, 0, 0, 0, :, 0].ne(0).tolist() == [True] * 5 + [False]


def test_a_strided_cache_is_updated_where_it_is() -> None:
    case = Case("static", static_call(Numerics(torch.float32, torch.float32), 0, 1, bits.generator(0)))
    feeds = case.feeds()
    room = torch.zeros(*feeds["cache"].shape[:-1], 2 * feeds["cache"].shape[-1])[..., ::2]
    feeds["cache"] = room.copy_(feeds["cache"])
    kvonnx.run(model_of(case), feeds, backend="onnxruntime")
    bits.assert_same_bits(room, in_torch(case, pmx.key_value_cache)["cache"], "cache")


def test_the_model_that_is_made_portable_stays_as_it_is() -> None:
    model = model_of(next(static_cases()))
    before = model.SerializeToString()
    kvonnx.portable(model)
    assert model.SerializeToString() == before


def test_portable_models_pass_their_check_and_stay_portable() -> None:
    for case in (next(static_cases()), next(dynamic_cases()), next(attention_cases())):
        model = kvonnx.portable(model_of(case))
        kvonnx.check(model)
        assert kvonnx.portable(model).SerializeToString() == model.SerializeToString()


def test_defaults_may_be_left_out_of_a_node() -> None:
    node = kvonnx.key_value_cache("k", "v", "start", "cache")
    assert not node.attribute
    inputs = [info(x, TensorProto.FLOAT, "B", "S", "H", "D") for x in ("k", "v")]
    inputs += [info("start", TensorProto.INT64), info("cache", TensorProto.FLOAT, "M", 1, 2, "T", "H", "D")]
    graph = helper.make_graph([node], "g", inputs, [info("key", TensorProto.FLOAT, "B", "E", "H", "D")])
    model = helper.make_model(graph, opset_imports=kvonnx.opset_imports(), ir_version=10)
    new, cache = torch.randn(1, 2, 1, 4), torch.zeros(1, 1, 2, 3, 1, 4)
    outputs = kvonnx.run(model, {"k": new, "v": new, "start": 0, "cache": cache}, backend="onnxruntime")
    assert torch.equal(outputs["key"], new)
    assert torch.equal(cache[0, 0, 0, :2], new[0])


def test_a_scale_without_quantization_is_left_alone() -> None:
    model = model_of(next(static_cases()))
    model.graph.node[0].input.append("scale")
    model.graph.input.append(info("scale", TensorProto.FLOAT, "n"))
    feeds = {**next(static_cases()).feeds(), "scale": torch.full((3,), 7.0)}
    for backend in ("reference", "onnxruntime"):
        outputs = kvonnx.run(model, feeds, backend=backend)
        assert "scale" not in outputs
        assert feeds["scale"].tolist() == [7.0] * 3


def test_hidden_nan_has_no_effect() -> None:
    """Another sequence's NaN, and that of a key behind the causal mask, stay where they are."""
    case = next(c for c in attention_cases() if c.call["is_causal"])
    clean = kvonnx.run(model_of(case), case.feeds(), backend="onnxruntime")["attn_output"]
    feeds = case.feeds()
    feeds["current_value"][4] = float("nan")  # the last new token of the second sequence
    output = kvonnx.run(model_of(case), feeds, backend="onnxruntime")["attn_output"]
    assert output[4].isnan().all()
    keep = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    torch.testing.assert_close(output[keep], clean[keep])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"current_key": torch.zeros(2, 3, 2, 32, dtype=torch.float64)},
            r"feeds\['current_key'\] must be float",
        ),
        ({"current_value": torch.zeros(2, 9, 2, 32)}, "feeds must match the inputs of the model"),
        ({"start_pos": 100}, "feeds must match the inputs of the model"),
    ],
)
def test_bad_feeds_are_refused(change: dict[str, Any], message: str) -> None:
    case = next(static_cases())
    with pytest.raises(ArgumentError, match=message):
        kvonnx.run(model_of(case), {**case.feeds(), **change}, backend="onnxruntime")


def test_a_missing_type_is_named() -> None:
    model = model_of(next(static_cases()))
    model.graph.node[0].input[0] = "made"
    model.graph.node.insert(0, helper.make_node("Unknown", ["current_key"], ["made"], domain="other"))
    model.opset_import.append(helper.make_opsetid("other", 1))
    with pytest.raises(ModelError, match="input current_key of KeyValueCache must have a known type"):
        kvonnx.portable(model)
