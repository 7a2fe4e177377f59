"""Targets of ONNX: models, ONNX Runtime with or without custom operators, and ``onnx.reference``."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results, Vector
from kvloom.conform.outcomes import CallRefused, Unsupported
from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError

_TYPES: Final = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.float64: TensorProto.DOUBLE,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int16: TensorProto.INT16,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
_UPDATED: Final = "_updated"
"""Suffix of the name of an updated argument, since no output may have the name of an input."""
_IR: Final = 11


def tensors_of(operator: Operator, call: Call) -> dict[str, Tensor]:
    """Inputs of the node: tensors, and numbers that are inputs in the document."""
    found = {}
    for argument in operator.arguments:
        x = call.get(argument.name)
        if isinstance(x, list) and argument.is_list:
            raise Unsupported("lists of tensors are no inputs of an ONNX node")
        if isinstance(x, Tensor):
            found[argument.name] = x.contiguous()
        elif argument.is_input and isinstance(x, int):
            found[argument.name] = torch.tensor(x, dtype=torch.int64)
    for name, x in found.items():
        if x.dtype not in _TYPES:
            raise Unsupported(f"{dtype_name(x.dtype)} is not handed to ONNX ({name})")
    return found


def attributes_of(operator: Operator, call: Call) -> Call:
    """Attributes of the node."""
    inputs = {a.name for a in operator.arguments if a.is_tensor or a.is_input}
    return {
        name: int(x) if isinstance(x, bool) else x
        for name, x in call.items()
        if name not in inputs and not isinstance(x, Tensor)
    }


def model_of(operator: Operator, vector: Vector, call: Call) -> Any:
    """Model of one node with the attributes and dtypes of ``call``."""
    if operator.domain is None:
        raise Unsupported(f"{operator.name} is no ONNX operator")
    feeds = tensors_of(operator, call)
    order = operator.node_inputs or tuple(a.name for a in operator.arguments if a.is_tensor or a.is_input)
    names = [name if name in feeds else "" for name in order]
    while names and not names[-1]:
        names.pop()
    first = next(iter(feeds.values()))
    updated = [name for name in operator.updated if name in feeds]
    outputs = [*operator.wanted(vector.call)]
    types = {name: (vector.expected or {})[name].dtype for name in outputs if name in (vector.expected or {})}
    types |= {f"{name}{_UPDATED}": feeds[name].dtype for name in updated}
    outputs += [f"{name}{_UPDATED}" for name in updated]
    last = max((i for i, name in enumerate(operator.outputs) if name in outputs), default=-1)
    places = [name if name in outputs else "" for name in [*operator.outputs][: last + 1]]
    places += [name for name in outputs if name not in places]
    kind = operator.node_type
    node = helper.make_node(kind, names, places, domain=operator.domain, **attributes_of(operator, call))
    graph = helper.make_graph(
        [node],
        "vector",
        [helper.make_tensor_value_info(n, _TYPES[x.dtype], list(x.shape)) for n, x in feeds.items()],
        [_output(n, first.dtype if operator.how(n) == "close" else types.get(n)) for n in outputs],
    )
    domains = [helper.make_opsetid("", operator.opset)]
    if operator.domain:
        domains.append(helper.make_opsetid(operator.domain, 1))
    return helper.make_model(graph, opset_imports=domains, ir_version=_IR)


def _output(name: str, dtype: torch.dtype | None) -> Any:
    """Output of the model; without a dtype it has the one that the operator gives."""
    if dtype is None:
        return helper.make_empty_tensor_value_info(name)
    return helper.make_tensor_value_info(name, _TYPES[dtype], None)


def _to_numpy(feeds: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.numpy() for name, x in feeds.items()}


def _to_results(names: list[str], values: Any) -> Results:
    return {
        name: torch.from_numpy(np.array(x)) for name, x in zip(names, values, strict=True) if x is not None
    }


class OnnxOperators:
    """ONNX Runtime on a model of one node, with the custom operators of a library if there is one."""

    def __init__(self, library: Path | None = None) -> None:
        import onnxruntime

        self._ort = onnxruntime
        self._options = onnxruntime.SessionOptions()
        self._options.log_severity_level = 4
        self._options.intra_op_num_threads = 1
        if library is not None:
            try:
                self._options.register_custom_ops_library(str(library.resolve()))
            except Exception as error:
                raise ArgumentError(f"TARGET must be a library of custom operators: {error}") from error

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        """Build, load and run the model."""
        model = model_of(operator, vector, call)
        try:
            session = self._ort.InferenceSession(model.SerializeToString(), self._options)
            names = [output.name.removesuffix(_UPDATED) for output in session.get_outputs()]
            return _to_results(names, session.run(None, _to_numpy(tensors_of(operator, call))))
        except Exception as error:  # ONNX Runtime has no common base
            if "NOT_IMPLEMENTED" in str(error) or "NotImplemented" in type(error).__name__:
                raise Unsupported(str(error).splitlines()[0][:200]) from error
            if "ValidateOpset" in str(error):
                raise Unsupported(f"this ONNX Runtime has no opset {operator.opset}") from error
            raise CallRefused(str(error).splitlines()[0][:300]) from error


class OnnxReference:
    """``onnx.reference`` on a model of one node."""

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        """Build and run the model."""
        from onnx.reference import ReferenceEvaluator

        if operator.domain:
            raise Unsupported(f"onnx.reference has no operators of {operator.domain}")
        model = model_of(operator, vector, call)
        try:
            with np.errstate(all="ignore"):
                evaluator = ReferenceEvaluator(model)
                values = evaluator.run(None, _to_numpy(tensors_of(operator, call)))
        except Exception as error:
            raise CallRefused(f"{type(error).__name__}: {error}"[:300]) from error
        return _to_results([output.name for output in model.graph.output], values)


class OnnxModel:
    """Model file whose inputs and outputs have the names of arguments and results, with one node."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        try:
            self._model = onnx.load(str(path))
            self._session = onnxruntime.InferenceSession(str(path))
        except Exception as error:
            raise ArgumentError(f"TARGET must be a model that ONNX Runtime loads: {error}") from error

    def __call__(self, operator: Operator, vector: Vector, call: Call) -> Results:
        """Run the model, if its attributes and dtypes are those of the call."""
        nodes = [n for n in self._model.graph.node if n.op_type == operator.node_type]
        fixed = {a.name: helper.get_attribute_value(a) for n in nodes[:1] for a in n.attribute}
        wanted = attributes_of(operator, operator.complete(call))
        for name, x in fixed.items():
            given = wanted.get(name)
            if (given.encode() if isinstance(given, str) else given) != x:
                raise Unsupported(f"the model has {name} = {x!r}, not {given!r}")
        feeds = tensors_of(operator, call)
        inputs = {i.name: i for i in self._model.graph.input}
        if set(inputs) != set(feeds):
            raise Unsupported(f"the model has the inputs {', '.join(inputs)}")
        for name, x in feeds.items():
            declared = inputs[name].type.tensor_type
            if declared.HasField("shape") and len(declared.shape.dim) != x.ndim:
                raise Unsupported(f"the model has another rank of {name} than {x.ndim}")
            if declared.elem_type != _TYPES[x.dtype]:
                raise Unsupported(f"the model has another dtype of {name} than {dtype_name(x.dtype)}")
        try:
            values = self._session.run(None, _to_numpy(feeds))
        except Exception as error:
            raise CallRefused(str(error).splitlines()[0][:300]) from error
        return _to_results([o.name for o in self._session.get_outputs()], values)
