"""Graphs made by hand run in ``onnx.reference`` and give what PyTorch gives, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("onnx", reason="makes models")

from onnx import TensorProto, helper
from oracles import bits
from oracles.onnx_models import Case, attention_cases, dynamic_cases, in_torch, model_of, static_cases

from kvloom.dialects import pmx
from kvloom.errors import ArgumentError, KVError
from kvloom.integrations import onnx as kvonnx

OPERATORS = {
    "static": pmx.key_value_cache,
    "dynamic": pmx.dynamic_batching.key_value_cache,
    "attention": pmx.dynamic_batching.multi_head_cache_attention,
}


def assert_agrees(case: Case, **options: Any) -> None:
    feeds = case.feeds()
    outputs = kvonnx.run(model_of(case), feeds, **options)
    for name, expected in in_torch(case, OPERATORS[case.kind]).items():
        bits.assert_same_bits(outputs[name], expected, name)
    for name in feeds.keys() & {"cache", "scale"}:
        assert outputs[name] is feeds[name] or outputs[name].data_ptr() == feeds[name].data_ptr()


@pytest.mark.parametrize("cases", [static_cases, dynamic_cases, attention_cases])
def test_every_call_of_the_grid_agrees_with_pytorch(cases: Callable[[], Iterator[Case]]) -> None:
    for case in cases():
        assert_agrees(case)


def test_the_functional_form_leaves_nothing_behind_in_its_inputs() -> None:
    case = next(static_cases())
    model = model_of(case)
    model.graph.node[0].output.append("cache_out")
    info = model.graph.input[-1]
    made = helper.make_tensor_value_info("cache_out", info.type.tensor_type.elem_type, None)
    made.type.CopyFrom(info.type)
    model.graph.output.append(made)
    feeds = case.feeds()
    outputs = kvonnx.run(model, feeds)
    expected = in_torch(case, pmx.key_value_cache)
    bits.assert_same_bits(outputs["cache_out"], expected["cache"], "cache_out")
    assert outputs["cache_out"] is feeds["cache"], "what comes in and goes out is updated in place"


def test_layers_share_one_cache() -> None:
    """Two nodes write two layers of one tensor; a standard node between them makes the keys of the second."""
    nodes = [
        kvonnx.key_value_cache("k", "v", "start", "cache", num_layer=2),
        helper.make_node("Neg", ["k"], ["k2"]),
        kvonnx.key_value_cache(
            "k2", "v", "start", "cache", num_layer=2, layer_idx=1, outputs=("key2", "value2")
        ),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("k", 1, ["B", "S", "H", "D"]), info("v", 1, ["B", "S", "H", "D"])]
    inputs += [info("start", TensorProto.INT64, []), info("cache", 1, ["M", 2, 2, "T", "H", "D"])]
    graph = helper.make_graph(nodes, "two", inputs, [info("key2", 1, ["B", "E", "H", "D"])])
    model = helper.make_model(graph, opset_imports=kvonnx.opset_imports(), ir_version=10)
    cache, new = torch.zeros(1, 2, 2, 4, 1, 2), torch.randn(1, 3, 1, 2)
    outputs = kvonnx.run(model, {"k": new, "v": new, "start": 1, "cache": cache})
    assert torch.equal(cache[0, 0, 0, 1:], new[0])
    assert torch.equal(cache[0, 1, 0, 1:], -new[0])
    assert torch.equal(outputs["key2"][:, 1:], -new)


def test_arrays_are_updated_in_place_too() -> None:
    case = next(static_cases())
    feeds = {name: x.numpy() for name, x in case.feeds().items()}
    kvonnx.run(model_of(case), feeds)
    expected = in_torch(case, pmx.key_value_cache)["cache"]
    bits.assert_same_bits(torch.from_numpy(feeds["cache"]), expected, "cache")


def test_an_array_that_cannot_be_updated_is_refused() -> None:
    feeds = {name: x.numpy() for name, x in next(static_cases()).feeds().items()}
    feeds["cache"].flags.writeable = False
    with pytest.raises(ArgumentError, match=r"feeds\['cache'\] must be writable, .*, got a read-only array"):
        kvonnx.run(model_of(next(static_cases())), feeds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_pos": None}, "feeds must have the inputs"),
        ({"extra": torch.zeros(1)}, "feeds must have the inputs"),
        ({"current_key": "text"}, r"feeds\['current_key'\] must be a tensor"),
        ({"start_pos": 100}, "start_pos must be in"),
    ],
)
def test_bad_feeds_are_named(change: dict[str, Any], message: str) -> None:
    case = next(static_cases())
    feeds = {name: x for name, x in {**case.feeds(), **change}.items() if x is not None}
    with pytest.raises(KVError, match=message):
        kvonnx.run(model_of(case), feeds)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ArgumentError, match="backend must be"):
        kvonnx.run(model_of(next(static_cases())), {}, backend="tensorrt")
