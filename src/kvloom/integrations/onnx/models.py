"""Reading of models, their PMX nodes, and types and shapes of values."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import onnx
from google.protobuf.message import DecodeError
from onnx import shape_inference

from kvloom.errors import ArgumentError, ModelError
from kvloom.integrations.onnx.operators import OPERATORS, OperatorSpec

Model: TypeAlias = onnx.ModelProto | bytes | str | Path
Dims: TypeAlias = tuple[int | None, ...]


def load_proto(model: Model) -> onnx.ModelProto:
    """Read a model from a file or from bytes; an ``onnx.ModelProto`` is returned unchanged.

    Raises:
        ModelError: the model is truncated, damaged or no ONNX model.
        ArgumentError: there is no such file.
    """
    if isinstance(model, onnx.ModelProto):
        proto = model
    else:
        if isinstance(model, bytes):
            data, what = model, f"{len(model)} bytes"
        else:
            if not Path(model).is_file():
                raise ArgumentError(f"model must be an ONNX file, got {str(model)!r}")
            data, what = Path(model).read_bytes(), repr(str(model))
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(data)
        except DecodeError:
            raise ModelError(f"model must be a whole ONNX file, got {what}, truncated or damaged") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(
            "model must have a graph and opset imports, got one that is truncated or no ONNX model"
        )
    return proto


class PmxNode(NamedTuple):
    """A node of a PMX operator, with its inputs and attributes by name."""

    node: onnx.NodeProto
    operator: OperatorSpec
    domain: str

    def input(self, name: str) -> str:
        """Name of the value for input ``name``, ``""`` if there is none."""
        at = self.operator.inputs.index(name)
        return str(self.node.input[at]) if at < len(self.node.input) else ""

    def output(self, name: str) -> str:
        """Name of the value for output ``name``, ``""`` if there is none."""
        at = self.operator.all_outputs.index(name)
        return str(self.node.output[at]) if at < len(self.node.output) else ""

    def given(self) -> dict[str, object]:
        """Attributes as written."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}

    def attributes(self) -> dict[str, int]:
        """Attributes with their defaults."""
        return self.operator.complete({k: v for k, v in self.given().items() if isinstance(v, int)})

    @property
    def is_functional(self) -> bool:
        """Whether the updated cache is an output, and the node writes nothing in place."""
        return bool(self.output("cache"))


def calls(nodes: Sequence[onnx.NodeProto]) -> Iterator[PmxNode]:
    """The nodes of PMX operators."""
    for node in nodes:
        operator = OPERATORS.get((node.domain, node.op_type))
        if operator is not None:
            yield PmxNode(node, operator, node.domain.split(".")[0])


class ValueType(NamedTuple):
    """Type of a value: an element type of ``onnx.TensorProto``, and a shape, ``None`` if unknown."""

    dtype: int
    dims: Dims | None


def infer_types(model: onnx.ModelProto) -> dict[str, ValueType]:
    """Types and shapes of the values of the main graph, as far as they can be inferred.

    Raises:
        ModelError: types or shapes contradict each other.
    """
    work = onnx.ModelProto()
    work.CopyFrom(model)
    found: dict[str, ValueType] = {}
    for _ in range(1 + sum(1 for _ in calls(work.graph.node))):
        try:
            work = shape_inference.infer_shapes(work)
        except shape_inference.InferenceError as error:
            raise ModelError(
                f"model must have types and shapes that agree: {str(error).splitlines()[0]}"
            ) from None
        found = _read_values(work.graph)
        # ONNX cannot infer through our operators: add the types of their outputs and infer again.
        inferred = [info for call in calls(work.graph.node) for info in _outputs(call, found)]
        if not inferred:
            break
        work.graph.value_info.extend(inferred)
    return found


def _outputs(call: PmxNode, found: dict[str, ValueType]) -> list[onnx.ValueInfoProto]:
    first = found.get(call.node.input[0]) if call.node.input else None
    inferred = []
    for name in call.operator.outputs:
        value = call.output(name)
        if value and value not in found and first is not None:
            dims: tuple[int | None, ...] | None = first.dims
            if name != "attn_output" and dims is not None and len(dims) >= 2:
                heads = dims[-2]
                repeated = None if heads is None else heads * call.attributes()["num_repeat"]
                dims = (*dims[:1], None, repeated, dims[-1]) if len(dims) == 4 else (None, repeated, dims[-1])
            inferred.append(onnx.helper.make_tensor_value_info(value, first.dtype, dims))
    for name in ("cache", "scale"):
        value, source = call.output(name), found.get(call.input(name))
        if value and value not in found and source is not None:
            inferred.append(onnx.helper.make_tensor_value_info(value, source.dtype, source.dims))
    return inferred


def _read_values(graph: onnx.GraphProto) -> dict[str, ValueType]:
    found = {x.name: ValueType(x.data_type, tuple(x.dims)) for x in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        if tensor.elem_type and info.name not in found:
            dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
            found[info.name] = ValueType(tensor.elem_type, dims if tensor.HasField("shape") else None)
    return found
