"""Checks of a model against the documents of its operators, with one sentence for each problem."""

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from kvloom.errors import ModelError
from kvloom.integrations.onnx.models import Dims, Model, PmxNode, ValueType, calls, infer_types, load_proto
from kvloom.integrations.onnx.operators import DOMAINS, OPERATORS, STATIC, VERSION

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_CODES = {8: (TensorProto.INT8,), 4: (TensorProto.UINT8,)}
_SCALARS = ("start_pos", "decoding_batches", "max_seqlen", "max_kvlen")


def check(model: Model) -> None:
    """Check that ``model`` is whole, and each PMX node in its graph: names, attributes, types and shapes.

    ONNX's own checks of a model run, too. Shapes are checked as far as they are known.

    Args:
        model: A model, its bytes or its path.

    Raises:
        ModelError: one sentence for each problem, a line each.
        ArgumentError: there is no such file.
    """
    found = problems(model)
    if found:
        raise ModelError("\n".join(found))


def problems(model: Model) -> list[str]:
    """The problems that ``check`` would raise, as a list that is empty for a valid model.

    Raises:
        ModelError: ``model`` cannot be read at all.
        ArgumentError: there is no such file.
    """
    proto = load_proto(model)
    found = list(_of_domains(proto))
    for call in calls(proto.graph.node):
        found += [f"{_name(call.node)}: {problem}" for problem in _of_node(call)]
    if found:
        return found
    values = infer_types(proto)
    for call in calls(proto.graph.node):
        found += [f"{_name(call.node)}: {problem}" for problem in _of_values(call, values)]
    if not found:
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            found.append(f"model must be valid ONNX: {str(error).splitlines()[0]}")
    return found


def _name(node: onnx.NodeProto) -> str:
    return f"node {node.name or ', '.join(node.output)!r} ({node.domain}::{node.op_type})"


def _of_domains(model: onnx.ModelProto) -> Iterator[str]:
    versions = {x.domain: x.version for x in model.opset_import}
    known = {domain for domain, _ in OPERATORS}
    for domain in sorted(known & versions.keys()):
        if versions[domain] != VERSION:
            yield f"domain {domain} must be imported with version {VERSION}, got {versions[domain]}"
    for node in model.graph.node:
        if node.domain.split(".")[0] not in DOMAINS:
            continue
        if (node.domain, node.op_type) not in OPERATORS:
            names = sorted(f"{d}::{n}" for d, n in OPERATORS if d.startswith(node.domain.split(".")[0]))
            yield f"{_name(node)}: operator must be one of {', '.join(names)}, got {node.op_type}"
        elif node.domain not in versions:
            got = [x or "ai.onnx" for x in versions]
            yield f"{_name(node)}: domain {node.domain} must be one of the model's opset imports, got {got}"


def _of_node(call: PmxNode) -> Iterator[str]:
    operator = call.operator
    wrong = operator.problems(call.given())
    yield from wrong
    for name in operator.inputs:
        if name not in operator.optional and not call.input(name):
            yield f"input {name} must be given, got none"
    if len(call.node.input) > len(operator.inputs):
        yield f"inputs must be at most {len(operator.inputs)}, got {len(call.node.input)}"
    if len(call.node.output) > len(operator.all_outputs):
        yield f"outputs must be at most {len(operator.all_outputs)}, got {len(call.node.output)}"
    if wrong:
        return
    bit = call.attributes()["quant_bit"]
    if bit and not call.input("scale"):
        yield f"input scale must be given where quant_bit is {bit}, got none"
    if bit and call.is_functional and not call.output("scale"):
        yield f"output scale must be given beside output cache where quant_bit is {bit}, got none"


def _of_values(call: PmxNode, values: dict[str, ValueType]) -> Iterator[str]:
    yield from _of_types(call, values)
    a, sizes = call.attributes(), dict[str, int]()
    if "num_heads" in a:
        sizes |= {"Hq": a["num_heads"], "H": a["num_kv_heads"] or a["num_heads"], "D": a["head_dim"]}
    static = call.operator is STATIC
    new = "B S H D" if static else "N H D"
    axes = {"query": "N Hq D", "current_key": new, "current_value": new}
    if not static:
        axes |= {"seqstarts": "B+1", "kvstarts": "B+1", "start_pos": "B"}
    for name, letters in axes.items():
        if name in call.operator.inputs:
            yield from _match(name, letters.split(), _dims(call, name, values), sizes)
    for name in _SCALARS:
        if name in call.operator.inputs and (static or name != "start_pos"):
            dims = _dims(call, name, values)
            if dims is not None and any(n not in (1, None) for n in dims):
                yield f"input {name} must be a scalar, got {list(dims)}"
    yield from _of_table(call, values)
    if a["quant_bit"] and "D" in sizes and sizes["D"] % a["quant_group"]:
        yield f"attribute quant_group must divide the head dim {sizes['D']}, got {a['quant_group']}"
        return
    order = call.operator.layout(call.domain + call.operator.group, a["cache_layout"]).axes.split()
    stored = {"L": a["num_layer"], "2": 2}
    if "H" in sizes:
        stored["H"] = sizes["H"]
    for name, divisor in (("cache", 2 if a["quant_bit"] == 4 else 1), ("scale", a["quant_group"])):
        if name == "cache" or a["quant_bit"]:
            last = {"D": sizes["D"] // divisor} if "D" in sizes else {}
            own = stored | last
            yield from _match(name, order, _dims(call, name, values), own)
            stored |= {axis: n for axis, n in own.items() if axis != "D"}


def _of_table(call: PmxNode, values: dict[str, ValueType]) -> Iterator[str]:
    dims = _dims(call, "cachestarts", values) if "cachestarts" in call.operator.inputs else None
    allowed = (1, 2) if call.attributes().get("cache_mode") else (1,)
    if dims is not None and len(dims) not in allowed:
        yield f"input cachestarts must have rank {' or '.join(map(str, allowed))}, got {list(dims)}"


def _of_types(call: PmxNode, values: dict[str, ValueType]) -> Iterator[str]:
    bit = call.attributes()["quant_bit"]
    first = call.operator.inputs[0]
    numbers = FLOATS if bit or first == "query" else (*FLOATS, TensorProto.INT8)
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(call.operator.inputs, (TensorProto.INT64,))
    wanted |= {first: numbers, "attn_mask": FLOATS, "scale": FLOATS}
    wanted["cache"] = _CODES[bit] if bit else (*FLOATS, TensorProto.INT8)
    same = values.get(call.input(first))
    for name in ("current_key", "current_value"):
        if name != first:
            wanted[name] = numbers if same is None else (same.dtype,)
    if not bit and same is not None:
        wanted["cache"] = FLOATS if same.dtype in FLOATS else (TensorProto.INT8,)
    for name in call.operator.inputs:
        have = values.get(call.input(name)) if call.input(name) else None
        if have is not None and have.dtype not in wanted[name] and (bit or name != "scale"):
            names = " or ".join(TensorProto.DataType.Name(t).lower() for t in wanted[name])
            got = TensorProto.DataType.Name(have.dtype).lower()
            yield f"input {name} must be {names}, got {got}"


def _dims(call: PmxNode, name: str, values: dict[str, ValueType]) -> Dims | None:
    value = values.get(call.input(name)) if call.input(name) else None
    return None if value is None else value.dims


def _match(name: str, letters: list[str], dims: Dims | None, sizes: dict[str, int]) -> Iterator[str]:
    """Check known dims against ``letters``, and add their sizes to ``sizes``."""
    if dims is None:
        return
    known = [f"{a}={sizes[a]}" for a in letters if a in sizes]
    got = [a if n is None else n for a, n in zip(letters, dims, strict=False)] if dims else []
    if len(dims) != len(letters):
        yield f"input {name} must be [{', '.join(letters)}], got rank {len(dims)}"
        return
    if any(n is not None and sizes.get(a, n) != n for a, n in zip(letters, dims, strict=True)):
        yield f"input {name} must be [{', '.join(letters)}] with {', '.join(known)}, got {got}"
        return
    sizes |= {a: n for a, n in zip(letters, dims, strict=True) if n is not None}
    if "B+1" in sizes:
        sizes["B"] = sizes["B+1"] - 1
