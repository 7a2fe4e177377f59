"""Running a model in ``onnx.reference`` with kvloom's operators, or in ONNX Runtime with standard ones.

The PMX operators of ``onnx.reference.ReferenceEvaluator`` are here, too; kvloom's dialect computes them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from kvloom.dialects import pmx
from kvloom.errors import ArgumentError
from kvloom.integrations.onnx.checks import check
from kvloom.integrations.onnx.models import Model, calls, load_proto
from kvloom.integrations.onnx.operators import ATTENTION, DOMAINS, DYNAMIC, STATIC, OperatorSpec
from kvloom.integrations.onnx.portable import portable

_RUN: Final[dict[int, Callable[..., Any]]] = {
    id(STATIC): pmx.key_value_cache,
    id(DYNAMIC): pmx.dynamic_batching.key_value_cache,
    id(ATTENTION): pmx.dynamic_batching.multi_head_cache_attention,
}


def run(model: Model, feeds: Mapping[str, Any], *, backend: str = "reference") -> dict[str, Tensor]:
    """Run ``model`` once. For many steps make a ``Session``.

    Args:
        model: A model, its bytes or its path.
        feeds: Tensors, arrays or numbers by the names of the graph's inputs. A cache or scale that the model
            updates is written in place and must be a tensor or an array.
        backend: ``"reference"``, kvloom's operators in ``onnx.reference``; or ``"onnxruntime"``, the
            portable form in ONNX Runtime.

    Returns:
        The outputs of the graph by name, and every updated cache and scale under the name of its input.

    Raises:
        ModelError: the model is damaged, or does not match the documents.
        ArgumentError: ``feeds`` or ``backend`` does not fit.
    """
    return Session(model, backend=backend).run(feeds)


class Session:
    """A model that is ready to run.

    Args:
        model: A model, its bytes or its path.
        backend: As ``run``.

    Raises:
        ModelError, ArgumentError: as ``run``.
    """

    def __init__(self, model: Model, *, backend: str = "reference") -> None:
        proto = load_proto(model)
        check(proto)
        self._updated = in_out(proto.graph)
        self._session: Any
        if backend == "reference":
            self._session = _ReferenceSession(proto)
        elif backend == "onnxruntime":
            from kvloom.integrations.onnx.ort import OrtSession

            converted = portable(proto)
            pairs = {name: output for name, output in in_out(converted.graph).items() if output}
            self._session = OrtSession(converted, pairs)
        else:
            raise ArgumentError(f"backend must be 'reference' or 'onnxruntime', got {backend!r}")

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Tensor]:
        """One step; arguments, result and errors as the function ``run``."""
        inputs: list[str] = self._session.inputs
        if feeds.keys() != set(inputs):
            raise ArgumentError(f"feeds must have the inputs {inputs}, got {list(feeds)}")
        for name in self._updated:
            if isinstance(feeds[name], np.ndarray) and not feeds[name].flags.writeable:
                raise ArgumentError(
                    f"feeds[{name!r}] must be writable, since the model updates it, got a read-only array"
                )
        tensors = {name: _tensor(name, feeds[name]) for name in inputs}
        outputs: dict[str, Tensor] = self._session.run(tensors)
        return outputs


def in_out(graph: onnx.GraphProto) -> dict[str, str]:
    """Inputs of ``graph`` that are updated, each with the output of its last state, ``""`` if in place."""
    inputs = {x.name for x in graph.input} - {x.name for x in graph.initializer}
    outputs = {x.name for x in graph.output}
    origin: dict[str, str] = {}
    found: dict[str, str] = {}
    for call in calls(graph.node):
        for name in ("cache", "scale"):
            if name == "scale" and not call.attributes()["quant_bit"]:
                continue
            value, made = call.input(name), call.output(name)
            source = origin.get(value, value)
            if source not in inputs:
                continue
            if not call.is_functional:
                found[source] = ""
            elif made:
                origin[made] = source
                if made in outputs:
                    found[source] = made
    return found


class _Operator(OpRun):  # type: ignore[misc]
    """A PMX operator. A node without updated outputs writes ``cache`` and ``scale`` in place."""

    operator: OperatorSpec
    spec: str

    def _run(self, *values: Any, **attributes: Any) -> tuple[Any, ...]:
        names = self.operator.inputs[: len(values)]
        arguments = {name: to_torch(x) for name, x in zip(names, values, strict=True) if x is not None}
        outputs = list(self.onnx_node.output)
        functional = len(outputs) > len(self.operator.outputs)
        for name in ("cache", "scale"):
            if functional and name in arguments:
                arguments[name] = arguments[name].clone()
        flags = self.operator.complete(attributes)
        if self.operator is ATTENTION:
            arguments["spec"] = self.spec  # type: ignore[assignment]
        results = _RUN[id(self.operator)](**arguments, **flags)
        made = list(results) if isinstance(results, tuple) else [results]
        if functional:
            made += [arguments[name] for name in ("cache", "scale") if name in arguments]
        return tuple(to_numpy(x) for x in made[: len(outputs)])


def _make(domain: str, operator: OperatorSpec) -> type[_Operator]:
    members = {"op_domain": domain + operator.group, "operator": operator, "spec": domain}
    return type(operator.name, (_Operator,), members)


REFERENCE_OPERATORS: Final = [_make(domain, op) for domain in DOMAINS for op in (STATIC, DYNAMIC, ATTENTION)]
"""Operators for ``ReferenceEvaluator(model, new_ops=REFERENCE_OPERATORS)``."""


class _ReferenceSession:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = ReferenceEvaluator(model, new_ops=REFERENCE_OPERATORS)
        self.inputs = list(self._evaluator.input_names)
        self._in_out = in_out(model.graph)

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: to_numpy(x) for name, x in feeds.items()}
        made = self._evaluator.run(None, arrays)
        outputs = {name: to_torch(x) for name, x in zip(self._evaluator.output_names, made, strict=True)}
        for name, output in self._in_out.items():
            if output:
                outputs[output] = feeds[name].copy_(outputs[output])
            outputs[name] = feeds[name]
        return outputs


def _tensor(name: str, x: Any) -> Tensor:
    """A tensor that shares memory with ``x``, so that the caller sees updates."""
    if isinstance(x, Tensor):
        if x.device.type != "cpu":
            raise ArgumentError(f"feeds[{name!r}] must be on the CPU, got {x.device}")
        return x.detach() if x.requires_grad else x
    if isinstance(x, bool | int):
        return torch.tensor(x, dtype=torch.int64)
    try:
        return to_torch(x)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"feeds[{name!r}] must be a tensor, array or int, got {type(x).__name__}"
        ) from None


def to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """An array on the memory of ``x``; bfloat16 has the dtype of ``ml_dtypes``."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def to_torch(x: Any) -> Tensor:
    """A tensor on the memory of the array ``x``, or on a copy if it is read-only, as constants are."""
    x = np.asarray(x)
    if not x.flags.writeable:
        x = x.copy()
    is_bfloat16 = x.dtype == ml_dtypes.bfloat16
    tensor = torch.from_numpy(x.view(np.int16) if is_bfloat16 else x)
    if x.size == 0:  # numpy's strides of an empty array are 0
        tensor = torch.empty(x.shape, dtype=tensor.dtype)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
