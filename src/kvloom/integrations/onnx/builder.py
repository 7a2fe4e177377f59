"""Builds the nodes of a function body or a graph, one standard operator at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

FLOAT, INT64, BOOL, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT32


class Builder:
    """Appends nodes in order. Every method returns the name of the value that it adds."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix

    def op(self, kind: str, *inputs: str, into: str = "", **attributes: Any) -> str:
        """The output of one node of the standard operator ``kind``."""
        output = into or f"{self._prefix}t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def int_vector(self, *values: int) -> str:
        """Constant ``[n]`` int64."""
        return self.op("Constant", value_ints=list(values))

    def int_scalar(self, value: int) -> str:
        """Constant, 0-d int64."""
        return self.op("Constant", value_int=value)

    def float_scalar(self, value: float) -> str:
        """Constant, 0-d float32."""
        return self.op("Constant", value_float=float(value))

    def tensor(self, values: Sequence[float], dims: Sequence[int]) -> str:
        """Constant float32 with shape ``dims``."""
        return self.op("Constant", value=helper.make_tensor("value", FLOAT, dims, values))

    def attribute(self, name: str) -> str:
        """The integer attribute ``name`` of the calling node, 0-d."""
        output = self.op("Constant", value_int=0)
        attribute = self.nodes[-1].attribute[0]
        attribute.ClearField("i")
        attribute.ref_attr_name = name
        return output

    def cast(self, x: str, dtype: int, into: str = "") -> str:
        """``x`` as the ONNX type ``dtype``."""
        return self.op("Cast", x, to=dtype, into=into)

    def size(self, x: str, axis: int) -> str:
        """Size of one axis, ``[1]`` int64."""
        return self.op("Gather", self.op("Shape", x), self.int_vector(axis), axis=0)

    def shape(self, *parts: str | int) -> str:
        """Shape ``[len(parts)]`` int64 from values ``[1]`` and numbers."""
        sizes = [part if isinstance(part, str) else self.int_vector(part) for part in parts]
        return self.op("Concat", *sizes, axis=0)

    def reshape(self, x: str, *parts: str | int, into: str = "") -> str:
        """``x`` with the shape ``parts``; a 0 there is a size of 0, not "as in the input"."""
        return self.op("Reshape", x, self.shape(*parts), allowzero=1, into=into)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """``x`` with new axes of size 1."""
        return self.op("Unsqueeze", x, self.int_vector(*axes))

    def as_scalar(self, x: str) -> str:
        """A 0-d or one-element ``x`` as 0-d."""
        return self.op("Squeeze", self.op("Reshape", x, self.int_vector(1)), self.int_vector(0))

    def arange(self, end: str) -> str:
        """``[0, 1, ..., end - 1]`` int64; ``end`` has one element."""
        return self.op("Range", self.int_scalar(0), self.as_scalar(end), self.int_scalar(1))

    def if_else(
        self, condition: str, then: Callable[["Builder"], str], other: Callable[["Builder"], str]
    ) -> str:
        """The float32 value that ``then`` adds where ``condition`` is true, else that of ``other``."""
        branches = {}
        for name, make in (("then_branch", then), ("else_branch", other)):
            inner = Builder(f"{self._prefix}{name}{len(self.nodes)}_")
            result = make(inner)
            info = onnx.ValueInfoProto(name=result)
            info.type.tensor_type.elem_type = FLOAT
            branches[name] = helper.make_graph(inner.nodes, name, [], [info])
        return self.op("If", condition, **branches)

    def clip(self, x: str, largest: float) -> str:
        """``x`` clipped to [-largest, largest]. NaN stays NaN, which ``Clip`` does not promise."""
        high, low = self.float_scalar(largest), self.float_scalar(-largest)
        x = self.op("Where", self.op("Greater", x, high), high, x)
        return self.op("Where", self.op("Less", x, low), low, x)

    def is_nonfinite(self, x: str) -> str:
        """Where float32 ``x`` is NaN or infinite."""
        return self.op("Or", self.op("IsNaN", x), self.op("IsInf", x))
