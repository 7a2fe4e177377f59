"""Builder of the nodes of a function body or a graph, one standard operator at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import onnx
from onnx import TensorProto, helper

FLOAT, INT64, BOOL, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT32

Operand: TypeAlias = str | int | float | list[int]


class Builder:
    """Builder that appends nodes in order. Every method returns the name of the value that it adds.

    A method with the name of a standard operator of ONNX appends one node of it: ``b.Add(x, 1)``. Operands
    are names of values, or constants: an int is an int64 and a float a float32, both 0-d, and a list is an
    int64 vector. ``into`` is the name of the value that is added; other options are attributes.
    """

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix

    def __getattr__(self, kind: str) -> Callable[..., str]:
        if not kind[:1].isupper():
            raise AttributeError(kind)
        return partial(self._append, kind)

    def _append(self, kind: str, *operands: Operand, into: str = "", **attributes: Any) -> str:
        inputs = [x if isinstance(x, str) else self._constant(x) for x in operands]
        output = into or f"{self._prefix}t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _constant(self, value: float | list[int]) -> str:
        if isinstance(value, list):
            return self.Constant(value_ints=value)
        if isinstance(value, int):
            return self.Constant(value_int=value)
        return self.Constant(value_float=value)

    def tensor(self, values: Sequence[float], dims: Sequence[int]) -> str:
        """Constant float32 with shape ``dims``."""
        return self.Constant(value=helper.make_tensor("value", FLOAT, dims, values))

    def attribute(self, name: str) -> str:
        """The integer attribute ``name`` of the calling node, 0-d."""
        output = self.Constant(value_int=0)
        attribute = self.nodes[-1].attribute[0]
        attribute.ClearField("i")
        attribute.ref_attr_name = name
        return output

    def cast(self, x: str, dtype: int, into: str = "") -> str:
        """``x`` as the ONNX type ``dtype``."""
        return self.Cast(x, to=dtype, into=into)

    def size(self, x: str, axis: int) -> str:
        """Size of one axis, ``[1]`` int64."""
        return self.Gather(self.Shape(x), [axis], axis=0)

    def shape(self, *parts: Operand) -> str:
        """Shape ``[len(parts)]`` int64 from values ``[1]`` and numbers."""
        return self.Concat(*([x] if isinstance(x, int) else x for x in parts), axis=0)

    def reshape(self, x: str, *parts: Operand, into: str = "") -> str:
        """``x`` with the shape ``parts``; a 0 there is a size of 0, not "as in the input"."""
        return self.Reshape(x, self.shape(*parts), allowzero=1, into=into)

    def unsqueeze(self, x: str, *axes: int) -> str:
        """``x`` with new axes of size 1."""
        return self.Unsqueeze(x, list(axes))

    def as_scalar(self, x: Operand) -> str:
        """A 0-d or one-element ``x`` as 0-d."""
        return self.Squeeze(self.Reshape(x, [1]), [0])

    def arange(self, end: Operand) -> str:
        """``[0, 1, ..., end - 1]`` int64; ``end`` has one element."""
        return self.Range(0, self.as_scalar(end), 1)

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
        return self.If(condition, **branches)

    def clip(self, x: str, largest: float) -> str:
        """``x`` clipped to [-largest, largest]. NaN stays NaN, which ``Clip`` does not guarantee."""
        x = self.Where(self.Greater(x, largest), largest, x)
        return self.Where(self.Less(x, -largest), -largest, x)

    def is_nonfinite(self, x: str) -> str:
        """Bool mask of the elements of float32 ``x`` that are NaN or infinite."""
        return self.Or(self.IsNaN(x), self.IsInf(x))
