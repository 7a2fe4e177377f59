"""Export of a PyTorch module that calls the PMX operators to an ONNX model that has them as nodes."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor
from torch._dynamo.exc import UserError
from torch.utils import _pytree as pytree

from kvloom.dialects.pmx.tracing import tracing
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.onnx.checks import check
from kvloom.integrations.onnx.models import calls
from kvloom.integrations.onnx.operators import (
    ATTENTION,
    DOMAINS,
    OPERATORS,
    STATIC,
    VERSION,
    OperatorSpec,
)
from kvloom.integrations.onnx.portable import portable as make_portable


def export(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    dynamic: Mapping[str, Any] | None = None,
    output_names: Sequence[str] = (),
    domain: str = "opmx",
    portable: bool = True,
    opset: int = 20,
) -> onnx.ModelProto:
    """Export ``module``; every call of ``kvloom.dialects.pmx`` becomes one node of that operator.

    A cache or scale that is written is an input ``name`` of the graph and, in the portable form, an output
    ``name_out``. Inputs have the names of the arguments of ``forward``; those in a list or dict ``caches``
    are ``caches_0``, ``caches_1`` and so on.

    Args:
        module: Module whose ``forward`` takes tensors, or lists, tuples and dicts of them.
        example_inputs: Positional arguments, or a dict of arguments by name. They are not written.
        dynamic: Axes of any extent by argument and axis, ``{"k": {0: "T"}, "caches": [{2: "S"}, ...]}``.
            Axes of one name have one extent. As in ``torch.export``, an axis cannot be dynamic if its extent
            in the example is 0 or 1, or is one that the module relies on.
        output_names: Names of the results of ``forward``, in order; ``output_0`` and so on by default.
        domain: ``"opmx"`` or ``"pmx"``.
        portable: Whether nodes get bodies of standard operators. Otherwise nodes have only the inputs and
            outputs of their documents, and write their caches in place.
        opset: Version of the standard operators, 18 or later.

    Raises:
        ArgumentError: an argument of the operators or of this function is not allowed.
        UnsupportedError: a cache is not an input of ``module`` but a view of one, a buffer, or computed.
    """
    if domain not in DOMAINS:
        raise ArgumentError(f"domain must be one of {list(DOMAINS)}, got {domain!r}")
    names, values = _bind(module, example_inputs)
    unknown = sorted(set(dynamic or {}) - set(names))
    if unknown:
        raise ArgumentError(f"dynamic must have names of {names}, the arguments of forward, got {unknown}")
    dims: dict[str, Any] = {}
    shapes = tuple(
        _shapes((dynamic or {}).get(name, pytree.tree_map(lambda _: None, value)), dims)
        for name, value in zip(names, values, strict=True)
    )
    flat_names = [n for name, value in zip(names, values, strict=True) for n in _leaf_names(name, value)]
    recorder = _Recorder(module, domain, flat_names)
    with tracing(recorder), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        try:
            program = torch.export.export(
                recorder, tuple(values), dynamic_shapes={"args": shapes}, strict=False
            )
        except UserError as error:
            raise ArgumentError(
                f"module and dynamic must be ones that torch.export accepts: {error}"
            ) from error
        outputs = [
            output_names[i] if i < len(output_names) else f"output_{i}"
            for i in range(recorder.trace.num_outputs)
        ]
        outputs += [f"{name}_out" for name in recorder.trace.updated]
        exported = torch.onnx.export(
            program,
            input_names=flat_names,
            output_names=outputs,
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert exported is not None  # noqa: S101
    model = exported.model_proto
    wanted = [x for name, value in zip(names, values, strict=True) for x in _axis_names(dynamic, name, value)]
    _name_axes(model.graph, dict(zip(flat_names, wanted, strict=True)))
    if portable:
        return make_portable(model)
    _to_documents(model)
    check(model)
    return model


def _bind(module: torch.nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    signature = inspect.signature(module.forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        else:
            bound = signature.bind(*example)
    except TypeError as error:
        raise ArgumentError(f"example_inputs must match forward{signature}: {error}") from None
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ArgumentError(f"module must have a name for each argument of forward, got forward{signature}")
    return list(bound.arguments), list(bound.arguments.values())


def _leaf_names(name: str, value: Any) -> list[str]:
    leaves = pytree.tree_leaves(value)
    return [name] if isinstance(value, Tensor) else [f"{name}_{i}" for i in range(len(leaves))]


def _axis_names(dynamic: Mapping[str, Any] | None, name: str, value: Any) -> list[Mapping[int, Any]]:
    """The names in ``dynamic`` for the axes of each tensor of an argument."""
    wanted = (dynamic or {}).get(name)
    count = len(pytree.tree_leaves(value))
    if isinstance(value, Tensor):
        return [wanted or {}]
    inside = wanted.values() if isinstance(wanted, Mapping) else wanted or [{}] * count
    return [x or {} for x in inside] if len(inside) == count else [{}] * count


def _name_axes(graph: onnx.GraphProto, wanted: Mapping[str, Mapping[int, Any]]) -> None:
    """Rename dynamic axes, which the exporter calls s0, s1, ..., to the names in ``wanted``."""
    infos = (*graph.input, *graph.output, *graph.value_info)
    renamed = {
        info.type.tensor_type.shape.dim[axis].dim_param: name
        for info in graph.input
        for axis, name in wanted.get(info.name, {}).items()
        if isinstance(axis, int) and isinstance(name, str)
    }
    for info in infos:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]


def _shapes(wanted: Any, dims: dict[str, Any]) -> Any:
    """``wanted`` with one ``Dim`` for each name."""
    if isinstance(wanted, str):
        return dims.setdefault(wanted, torch.export.Dim(wanted))
    if isinstance(wanted, Mapping):
        return {axis: _shapes(x, dims) for axis, x in wanted.items()}
    if isinstance(wanted, list | tuple):
        return type(wanted)(_shapes(x, dims) for x in wanted)
    return wanted


class _Trace:
    """Tensors that a module returned and updated; kept apart, as ``torch.export`` restores attributes."""

    def __init__(self) -> None:
        self.num_outputs = 0
        self.inputs: dict[int, str] = {}
        self.latest: dict[str, Tensor] = {}
        self.updated: list[str] = []


class _Recorder(torch.nn.Module):
    """Wrapper that runs a module, records each PMX call as a node, and also returns updated tensors."""

    def __init__(self, module: torch.nn.Module, domain: str, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self.trace = _Trace()
        self._domain = domain
        self._names = names
        self._parameters_of_forward = list(inspect.signature(module.forward).parameters)

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """Outputs of the module, then the last state of every tensor that it updated."""
        leaves = pytree.tree_leaves(args)
        self.trace.inputs = {id(x): name for x, name in zip(leaves, self._names, strict=True)}
        self.trace.latest = {}
        results = self.module(**dict(zip(self._parameters_of_forward, args, strict=False)))
        outputs = pytree.tree_leaves(results)
        self.trace.num_outputs, self.trace.updated = len(outputs), list(self.trace.latest)
        latest, self.trace.latest = self.trace.latest, {}
        return (*outputs, *latest.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record a PMX call ``(name, arguments)``, or run as a module."""
        if args and isinstance(args[0], str):
            return self._record(args[0], args[1])
        return super().__call__(*args, **kwargs)

    def _record(self, name: str, arguments: dict[str, Any]) -> Any:
        group, _, kind = name.rpartition(".")
        operator = OPERATORS[(self._domain + (f".{group}" if group else ""), kind)]
        attributes: dict[str, Any] = {n: int(arguments[n]) for n in operator.attributes}
        if operator is ATTENTION:
            attributes["cache_layout"] = self._layout(operator, arguments)
        problems = operator.problems(attributes)
        if problems:
            raise ArgumentError(problems[0])
        if attributes["quant_bit"] == 0:
            arguments["scale"] = None
        elif arguments["scale"] is None:
            raise ArgumentError(f"scale must be given where quant_bit is {attributes['quant_bit']}, got None")
        states = [n for n in ("cache", "scale") if arguments[n] is not None]
        roots = [self._root(n, arguments[n]) for n in states]
        inputs = [self._value(arguments[n]) for n in operator.inputs]
        while inputs[-1] is None:
            inputs.pop()
        shapes = [*_output_shapes(operator, arguments), *(arguments[n].shape for n in states)]
        first = arguments[operator.inputs[0]]
        dtypes = [*(first.dtype for _ in operator.outputs), *(arguments[n].dtype for n in states)]
        results = torch.onnx.ops.symbolic_multi_out(
            f"{self._domain}{operator.group}::{operator.name}",
            inputs,
            attributes,
            dtypes=dtypes,
            shapes=shapes,
            version=VERSION,
        )
        for root, state, new in zip(roots, states, results[len(operator.outputs) :], strict=True):
            self.trace.latest[root] = new
            arguments[state].copy_(new)  # for later reads of this tensor
        outputs = tuple(results[: len(operator.outputs)])
        return outputs if len(outputs) > 1 else outputs[0]

    def _layout(self, operator: OperatorSpec, arguments: dict[str, Any]) -> int:
        """Number in this domain of the layout that the document ``spec`` calls ``cache_layout``."""
        spec, number = arguments["spec"], arguments["cache_layout"]
        if spec not in DOMAINS:
            raise ArgumentError(f"spec must be 'pmx' or 'opmx', got {spec!r}")
        wanted = operator.layout(spec + operator.group, number)
        for other in range(operator.attributes["cache_layout"].high or 0):
            if operator.layout(self._domain + operator.group, other) == wanted:
                return other
        raise ArgumentError(
            f"domain must be {spec!r} for cache_layout {number} of spec {spec!r}, got {self._domain!r}"
        )

    def _root(self, argument: str, x: Tensor) -> str:
        name = self.trace.inputs.get(id(x))
        if name is None:
            raise UnsupportedError(
                f"{argument} must be an input of the exported module, got a view of one, a buffer or a copy"
            )
        return name

    def _value(self, x: Any) -> Tensor | None:
        if x is None or isinstance(x, Tensor):
            return None if x is None else self.trace.latest.get(self.trace.inputs.get(id(x), ""), x)
        return torch.full((), x, dtype=torch.int64)


def _output_shapes(operator: OperatorSpec, arguments: dict[str, Any]) -> list[list[Any]]:
    first = arguments[operator.inputs[0]]
    if operator is ATTENTION:
        return [list(first.shape)]
    *_, heads, dim = first.shape
    repeated = heads * arguments["num_repeat"]
    if operator is STATIC:
        start = arguments["start_pos"]
        start = start.item() if isinstance(start, Tensor) else start
        lead = [first.shape[0], start + first.shape[1]]
    else:
        lead = [arguments["kvstarts"][-1].item()]
    torch._check(lead[-1] >= 0)
    return [[*lead, repeated, dim] for _ in operator.outputs]


def _to_documents(model: onnx.ModelProto) -> None:
    """Remove the outputs of nodes that their documents do not have."""
    origin: dict[str, str] = {}
    own = {id(call.node): call for call in calls(model.graph.node)}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = origin.get(name, name)
        call = own.get(id(node))
        if call is not None:
            for state in ("cache", "scale"):
                if call.output(state):
                    origin[call.output(state)] = call.input(state)
            del node.output[len(call.operator.outputs) :]
    kept = [x for x in model.graph.output if x.name not in origin]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    remaining = [x for x in model.graph.value_info if x.name not in origin]
    del model.graph.value_info[:]
    model.graph.value_info.extend(remaining)
