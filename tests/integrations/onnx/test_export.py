"""Modules that call the PMX operators leave PyTorch as graphs that have them as nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="runs models")
pytest.importorskip("onnxscript", reason="exports models")

from oracles import bits
from torch import Tensor, nn

from kvloom.dialects import pmx
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations import onnx as kvonnx

Feeds = dict[str, Tensor]


class Ragged(nn.Module):
    """Two layers of one quantized cache."""

    def forward(
        self,
        k: Tensor,
        v: Tensor,
        seqstarts: Tensor,
        kvstarts: Tensor,
        cachestarts: Tensor,
        start_pos: Tensor,
        cache: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        batch = (seqstarts, kvstarts, cachestarts, start_pos, 0, 0, cache, scale)
        options = {"num_layer": 2, "quant_bit": 8, "cache_layout": 3}
        key, _ = pmx.dynamic_batching.key_value_cache(k, v, *batch, layer_idx=0, **options)
        _, value = pmx.dynamic_batching.key_value_cache(-k, -v, *batch, layer_idx=1, **options)
        return key, value


def ragged_inputs(seqlens: tuple[int, ...] = (2, 3), start_pos: tuple[int, ...] = (0, 0)) -> Feeds:
    new, start = torch.tensor([0, *seqlens]), torch.tensor(start_pos)
    return {
        "k": torch.randn(sum(seqlens), 2, 16),
        "v": torch.randn(sum(seqlens), 2, 16),
        "seqstarts": new.cumsum(0),
        "kvstarts": torch.cat((torch.tensor([0]), new[1:] + start)).cumsum(0),
        "cachestarts": torch.arange(len(seqlens)) * 8,
        "start_pos": start,
        "cache": torch.zeros(2, 2, 2, 8 * len(seqlens), 16, dtype=torch.int8),
        "scale": torch.zeros(2, 2, 2, 8 * len(seqlens), 2),
    }


RAGGED_AXES = {
    "k": {0: "T"},
    "v": {0: "T"},
    "seqstarts": {0: "ends"},
    "kvstarts": {0: "ends"},
    "cachestarts": {0: "B"},
    "start_pos": {0: "B"},
    "cache": {3: "M"},
    "scale": {3: "M"},
}


def copied(feeds: Feeds) -> Feeds:
    return {name: x.clone() for name, x in feeds.items()}


@pytest.mark.parametrize("domain", ["opmx", "pmx"])
def test_documents_form_has_the_nodes_of_the_documents(domain: str) -> None:
    model = kvonnx.export(
        Ragged(),
        ragged_inputs(),
        dynamic=RAGGED_AXES,
        output_names=("key", "value"),
        portable=False,
        domain=domain,
    )
    nodes = [node for node in model.graph.node if node.domain]
    assert [(node.domain, node.op_type) for node in nodes] == [
        (f"{domain}.dynamic_batching", "KeyValueCache")
    ] * 2
    assert [list(node.input)[2:6] for node in nodes] == [
        ["seqstarts", "kvstarts", "cachestarts", "start_pos"]
    ] * 2
    assert [list(node.input)[8:] for node in nodes] == [["cache", "scale"]] * 2
    assert [x.name for x in model.graph.output] == ["key", "value"]
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [
        "T",
        2,
        16,
    ]
    assert not model.functions
    for backend in ("reference", "onnxruntime"):
        assert_runs(model, backend)


def assert_runs(model: Any, backend: str) -> None:
    """Other lengths than those of the example, and a history."""
    inputs = ragged_inputs((1, 4, 2), (3, 0, 5))
    inputs["cache"].random_(-127, 128)
    inputs["scale"].uniform_(0.01, 0.1)
    mine, theirs = copied(inputs), copied(inputs)
    key, value = Ragged()(**mine)
    outputs = kvonnx.run(model, theirs, backend=backend)
    for name, expected in {
        "key": key,
        "value": value,
        "cache": mine["cache"],
        "scale": mine["scale"],
    }.items():
        bits.assert_same_bits(outputs[name], expected, name)
    bits.assert_same_bits(theirs["cache"], mine["cache"], "cache")


@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
def test_portable_form_runs_with_other_lengths(backend: str) -> None:
    model = kvonnx.export(Ragged(), ragged_inputs(), dynamic=RAGGED_AXES, output_names=("key", "value"))
    assert [x.name for x in model.graph.output] == ["key", "value", "cache_out", "scale_out"]
    assert_runs(model, backend)


def test_exporting_writes_nothing() -> None:
    inputs = ragged_inputs()
    kvonnx.export(Ragged(), inputs, portable=False)
    assert not bool(inputs["cache"].any())


class Static(nn.Module):
    """The static operator, its start a tensor."""

    def forward(self, k: Tensor, start: Tensor, cache: Tensor) -> Tensor:
        key, value = pmx.key_value_cache(k, k, start, cache, cache_layout=1, num_repeat=2)
        return key + value


def test_the_static_operator_with_a_start_that_moves() -> None:
    example = (torch.randn(2, 3, 2, 4), torch.tensor(0), torch.zeros(1, 2, 2, 2, 9, 4))
    model = kvonnx.export(Static(), example, dynamic={"k": {1: "S"}}, output_names=["sum"])
    session = kvonnx.Session(model, backend="onnxruntime")
    mine, theirs = torch.zeros(1, 2, 2, 2, 9, 4), torch.zeros(1, 2, 2, 2, 9, 4)
    for start, count in ((0, 5), (5, 1), (6, 3), (2, 1)):
        new = torch.randn(2, count, 2, 4)
        outputs = session.run({"k": new, "start": start, "cache": theirs})
        bits.assert_same_bits(outputs["sum"], Static()(new, torch.tensor(start), mine), "sum")
        bits.assert_same_bits(theirs, mine, "cache")


class Broken(nn.Module):
    """Calls the static operator in a way that cannot be exported."""

    def __init__(self, call: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, k: Tensor, cache: Tensor) -> Any:
        """Whatever ``call`` makes of them."""
        return self.call(k, cache)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda k, c: pmx.key_value_cache(k, k, 0, c[:]),
            "cache must be an input of the exported module, got a view",
        ),
        (
            lambda k, c: pmx.key_value_cache(k, k, 0, c * 1),
            "cache must be an input of the exported module, got a view",
        ),
        (
            lambda k, c: pmx.key_value_cache(k, k, 0, c, quant_bit=8),
            "scale must be given where quant_bit is 8",
        ),
        (lambda k, c: pmx.key_value_cache(k, k, 0, c, quant_bit=3), "quant_bit must be one of"),
        (lambda k, c: pmx.key_value_cache(k, k, 0, c, layer_idx=1), "layer_idx must be in"),
    ],
)
def test_what_cannot_be_exported_is_named(call: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        kvonnx.export(Broken(call), (torch.randn(1, 2, 2, 4), torch.zeros(1, 1, 2, 4, 2, 4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domain": "mine"}, "domain must be one of"),
        ({"dynamic": {"nothing": {0: "T"}}}, "dynamic must have names of .*, the arguments of forward, got"),
        ({"dynamic": {"k": [{0: "T"}]}}, "module and dynamic must be ones that torch.export accepts: "),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kvonnx.export(Ragged(), ragged_inputs(), **options)


def test_bad_examples_are_named() -> None:
    with pytest.raises(ArgumentError, match="example_inputs must match forward"):
        kvonnx.export(Ragged(), (torch.zeros(1),))


def test_the_operators_are_themselves_again_after_an_export() -> None:
    with pytest.raises(ArgumentError):
        kvonnx.export(
            Broken(lambda k, c: pmx.key_value_cache(k, k, 0, c, quant_bit=3)),
            (torch.zeros(1), torch.zeros(1)),
        )
    cache = torch.zeros(1, 1, 2, 3, 1, 2)
    pmx.key_value_cache(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0, cache)
    assert cache.sum() == 4


def test_layouts_of_the_other_document_are_translated_or_refused() -> None:
    def call(layout: int) -> Callable[[Tensor, Tensor], Any]:
        def attend(q: Tensor, cache: Tensor) -> Tensor:
            ends, zero = torch.tensor([0, 3]), torch.tensor([0])
            return pmx.dynamic_batching.multi_head_cache_attention(
                q, q, q, ends, ends, zero, zero, 0, 3, 3, cache, num_heads=2, head_dim=4, is_causal=True,
                cache_layout=layout, spec="pmx",
            )  # fmt: skip

        return attend

    example = (torch.randn(3, 2, 4), torch.zeros(1, 8, 2, 2, 4))
    kvonnx.check(kvonnx.export(Broken(call(1)), example, portable=False))
    with pytest.raises(ArgumentError, match="domain must be 'pmx' for cache_layout 2"):
        kvonnx.export(Broken(call(2)), example, portable=False)


# torch warns of its own internals.
@pytest.mark.filterwarnings("ignore")
def test_the_exporter_of_torch_alone_cannot_do_it() -> None:
    """As docs/onnx.md says; once this fails, there is another way to offer."""
    example = (torch.randn(2, 3, 2, 4), torch.tensor(0), torch.zeros(1, 2, 2, 2, 9, 4))
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(Static(), example, dynamo=True, verbose=False)
    kvonnx.check(kvonnx.export(Static(), example))


@pytest.mark.filterwarnings("ignore")
def test_torch_leaves_out_what_is_updated_in_place() -> None:
    """Why no table of translations makes up for it: the update is no output of the graph."""

    class Update(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache.copy_(cache + x)
            return x * 2

    program = torch.onnx.export(
        Update(), (torch.ones(2), torch.zeros(2)), dynamo=True, verbose=False, output_names=["y"]
    )
    assert program is not None
    assert [x.name for x in program.model_proto.graph.output] == ["y"]
