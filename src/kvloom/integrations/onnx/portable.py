"""The portable form of a model: every PMX node with a body of standard operators."""

import onnx
from onnx import helper

from kvloom.errors import ModelError
from kvloom.integrations.onnx.checks import check
from kvloom.integrations.onnx.functions import Variant, make_function
from kvloom.integrations.onnx.models import Model, PmxNode, ValueType, calls, infer_types, load_proto
from kvloom.integrations.onnx.operators import ATTENTION, STATIC

MIN_OPSET = 18
MIN_IR_VERSION = 10


def portable(model: Model) -> onnx.ModelProto:
    """Convert ``model`` to a form that any ONNX runtime executes without a custom operator.

    Nodes stay and get model-local functions as bodies. Updated caches and scales become outputs of their
    nodes, and an input ``cache`` of the graph that is updated is also its output ``cache_out``. Nodes that
    read a cache after another node wrote it read the updated one.

    A body depends on the dtypes and attributes of its node, so the dtypes of keys, caches and scales must be
    known or follow from the inputs of the graph. An unknown rank of a table or mask is taken from the
    document. Values of indices are not checked.

    Args:
        model: A model, its bytes or its path; not changed.

    Raises:
        ModelError: ``check`` does not accept the model, a type is unknown, or its opset is below 18.
        ArgumentError: there is no such file.
    """
    source = load_proto(model)
    check(source)
    result = onnx.ModelProto()
    result.CopyFrom(source)
    opset = next((x.version for x in result.opset_import if x.domain in ("", "ai.onnx")), 0)
    if not opset:  # a model of PMX nodes alone needs no standard opset
        opset = 24
        result.opset_import.append(helper.make_opsetid("", opset))
    if opset < MIN_OPSET:
        raise ModelError(f"model must import opset {MIN_OPSET} or later for the portable form, got {opset}")
    result.ir_version = max(result.ir_version, MIN_IR_VERSION)
    values = infer_types(source)
    latest: dict[str, str] = {}
    taken = {name for node in result.graph.node for name in (*node.input, *node.output)}
    taken |= {x.name for x in (*result.graph.input, *result.graph.output, *result.graph.initializer)}
    functions = {(f.domain, f.name, f.overload) for f in result.functions}
    own = {id(call.node): call for call in calls(result.graph.node)}
    for node in result.graph.node:
        call = own.get(id(node))
        variant = None if call is None or node.overload else _variant_of(call, values)
        for i, name in enumerate(node.input):
            node.input[i] = latest.get(name, name)
        if call is None or variant is None:
            continue
        if not call.is_functional:
            _chain_states(call, latest, taken)
        del node.input[len(variant.inputs) :]
        node.overload = variant.overload
        key = (node.domain, node.op_type, node.overload)
        if key not in functions:
            functions.add(key)
            result.functions.append(make_function(variant, opset))
    _add_outputs(result.graph, latest)
    return result


def _variant_of(call: PmxNode, values: dict[str, ValueType]) -> Variant:
    def known(name: str) -> ValueType:
        value = values.get(call.input(name))
        if value is None:
            raise ModelError(
                f"input {name} of {call.node.op_type} must have a known type, got {call.input(name)!r} "
                "without one"
            )
        return value

    a = call.attributes()
    domain = call.domain
    table = mask = 0
    if call.operator is not STATIC:
        dims = known("cachestarts").dims
        by_document = 1 if call.operator is ATTENTION and domain == "pmx" else 2
        table = 1 if not a["cache_mode"] else by_document if dims is None else len(dims)
    if call.operator is ATTENTION and call.input("attn_mask"):
        dims = known("attn_mask").dims
        mask = 2 if dims is None else 0 if 0 in dims or len(dims) == 1 else len(dims)
    scale = known("scale").dtype if a["quant_bit"] else 0
    return Variant(
        call.operator, domain, a, known("current_key").dtype, known("cache").dtype, scale, table, mask
    )


def _chain_states(call: PmxNode, latest: dict[str, str], taken: set[str]) -> None:
    """Add the updated cache and scale to the outputs, under new names that later nodes read."""
    for name in ("cache", "scale") if call.attributes()["quant_bit"] else ("cache",):
        now = call.input(name)
        root = next((key for key, value in latest.items() if value == now), now)
        number = 1
        while f"{root}.{number}" in taken:
            number += 1
        output = f"{root}.{number}"
        taken.add(output)
        latest[root] = output
        call.node.output.append(output)


def _add_outputs(graph: onnx.GraphProto, latest: dict[str, str]) -> None:
    inputs = {x.name: x for x in graph.input}
    for root, last in latest.items():
        if root not in inputs:
            continue
        for node in graph.node:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == last:
                        names[i] = f"{root}_out"
        info = onnx.ValueInfoProto()
        info.CopyFrom(inputs[root])
        info.name = f"{root}_out"
        graph.output.append(info)
