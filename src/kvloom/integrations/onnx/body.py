"""Writing down a function body, one standard operator at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

FLOAT, INT64, BOOL, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT32


class Body:
    """Nodes in order; every method that makes a value returns its name."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix

    def op(self, kind: str, *inputs: str, into: str = "", **attributes: Any) -> str:
        """The output of one node of the standard operator ``kind``."""
        output = into or f"{self._prefix}t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def ints(self, *values: int) -> str:
        """A constant ``[n]`` int64."""
        return self.op("Constant", value_ints=list(values))

    def whole(self, value: int) -> str:
        """A constant 0-d int64."""
        return self.op("Constant", value_int=value)

    def real(self, value: float) -> str:
        """A constant 0-d float32."""
        return self.op("Constant", value_float=float(value))

    def tensor(self, values: Sequence[float], dims: Sequence[int]) -> str:
        """A constant float32 of the given shape."""
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
        """Extent of one axis, ``[1]`` int64."""
        return self.op("Gather", self.op("Shape", x), self.ints(axis), axis=0)

    def shape(self, *parts: str | int) -> str:
        """A shape made of ``[1]`` values and numbers."""
        made = [part if isinstance(part, str) else self.ints(part) for part in parts]
        return self.op("Concat", *made, axis=0)

    def reshape(self, x: str, *parts: str | int, into: str = "") -> str:
        """``x`` with the shape of ``parts``, in which 0 is 0."""
        return self.op("Reshape", x, self.shape(*parts), allowzero=1, into=into)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """``x`` with new axes of extent 1."""
        return self.op("Unsqueeze", x, self.ints(*axes))

    def scalar(self, x: str) -> str:
        """A 0-d or one-element ``x`` as 0-d."""
        return self.op("Squeeze", self.op("Reshape", x, self.ints(1)), self.ints(0))

    def count(self, end: str) -> str:
        """``[end]`` int64 from 0, ``end`` 0-d or one element."""
        return self.op("Range", self.whole(0), self.scalar(end), self.whole(1))

    def choose(self, condition: str, then: Callable[["Body"], str], other: Callable[["Body"], str]) -> str:
        """The value that ``then`` or ``other`` makes."""
        branches = {}
        for name, make in (("then_branch", then), ("else_branch", other)):
            inner = Body(f"{self._prefix}{name}{len(self.nodes)}_")
            result = make(inner)
            info = onnx.ValueInfoProto(name=result)
            info.type.tensor_type.elem_type = FLOAT
            branches[name] = helper.make_graph(inner.nodes, name, [], [info])
        return self.op("If", condition, **branches)

    def limit(self, x: str, largest: float) -> str:
        """``x`` within [-largest, largest], NaN left alone, which ``Clip`` does not promise."""
        high, low = self.real(largest), self.real(-largest)
        x = self.op("Where", self.op("Greater", x, high), high, x)
        return self.op("Where", self.op("Less", x, low), low, x)

    def is_broken(self, x: str) -> str:
        """Where float32 ``x`` is NaN or infinite."""
        return self.op("Or", self.op("IsNaN", x), self.op("IsInf", x))
