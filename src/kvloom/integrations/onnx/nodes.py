"""Nodes for ``onnx.helper.make_graph``, one builder for each operator.

Inputs are names of values, in the order of the documents. Without ``updated`` a node has the outputs of its
document and writes ``cache`` and ``scale`` in place; with it, the updated tensors are outputs of their own.
"""

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from kvloom.errors import ArgumentError
from kvloom.integrations.onnx.operators import ATTENTION, DOMAINS, DYNAMIC, STATIC, VERSION, OperatorSpec


def key_value_cache(
    current_key: str,
    current_value: str,
    start_pos: str,
    cache: str,
    scale: str = "",
    *,
    outputs: Sequence[str] = ("key", "value"),
    updated: Sequence[str] = (),
    domain: str = "opmx",
    **attributes: int,
) -> onnx.NodeProto:
    """A node ``opmx::KeyValueCache``.

    Args:
        current_key, current_value, start_pos, cache, scale: Names of values; ``""`` leaves ``scale`` out.
        outputs: Names of key and value.
        updated: Names of the updated cache and, if there is one, scale, for the functional form.
        domain: ``"opmx"`` or ``"pmx"``.
        attributes: Attributes of the document; defaults need not be given.

    Raises:
        ArgumentError: an attribute, the domain or the number of outputs does not fit.
    """
    inputs = (current_key, current_value, start_pos, cache, scale)
    return make_node(STATIC, inputs, outputs, updated, domain, attributes)


def dynamic_key_value_cache(
    current_key: str,
    current_value: str,
    seqstarts: str,
    kvstarts: str,
    cachestarts: str,
    start_pos: str,
    max_seqlen: str,
    max_kvlen: str,
    cache: str,
    scale: str = "",
    *,
    outputs: Sequence[str] = ("key", "value"),
    updated: Sequence[str] = (),
    domain: str = "opmx",
    **attributes: int,
) -> onnx.NodeProto:
    """A node ``opmx.dynamic_batching::KeyValueCache``; arguments and errors as ``key_value_cache``."""
    batch = (seqstarts, kvstarts, cachestarts, start_pos)
    inputs = (current_key, current_value, *batch, max_seqlen, max_kvlen, cache, scale)
    return make_node(DYNAMIC, inputs, outputs, updated, domain, attributes)


def multi_head_cache_attention(
    query: str,
    current_key: str,
    current_value: str,
    seqstarts: str,
    kvstarts: str,
    cachestarts: str,
    start_pos: str,
    decoding_batches: str,
    max_seqlen: str,
    max_kvlen: str,
    cache: str,
    scale: str = "",
    attn_mask: str = "",
    *,
    outputs: Sequence[str] = ("attn_output",),
    updated: Sequence[str] = (),
    domain: str = "opmx",
    **attributes: int,
) -> onnx.NodeProto:
    """A node ``opmx.dynamic_batching::MultiHeadCacheAttention``; arguments and errors as ``key_value_cache``.

    The two domains number ``cache_layout`` 2 and 3 differently, each as its own document.
    """
    batch = (seqstarts, kvstarts, cachestarts, start_pos)
    hints = (decoding_batches, max_seqlen, max_kvlen)
    inputs = (query, current_key, current_value, *batch, *hints, cache, scale, attn_mask)
    return make_node(ATTENTION, inputs, outputs, updated, domain, attributes)


def make_node(
    operator: OperatorSpec,
    inputs: Sequence[str],
    outputs: Sequence[str],
    updated: Sequence[str],
    domain: str,
    attributes: Mapping[str, int],
) -> onnx.NodeProto:
    """Make a node of ``operator`` and check it; trailing inputs that are ``""`` are left out."""
    if domain not in DOMAINS:
        raise ArgumentError(f"domain must be one of {list(DOMAINS)}, got {domain!r}")
    problems = operator.problems(attributes)
    if problems:
        raise ArgumentError(problems[0])
    if len(outputs) != len(operator.outputs):
        raise ArgumentError(f"outputs must be names of {', '.join(operator.outputs)}, got {tuple(outputs)}")
    used = list(inputs)
    if operator.complete(attributes)["quant_bit"] == 0:
        used[operator.inputs.index("scale")] = ""
    elif not used[operator.inputs.index("scale")]:
        raise ArgumentError(f"scale must be given where quant_bit is {attributes['quant_bit']}, got ''")
    while used and not used[-1]:
        used.pop()
    node = helper.make_node(operator.name, used, [*outputs, *updated], domain=domain + operator.group)
    ordered = [name for name in operator.attributes if name in attributes]
    node.attribute.extend(helper.make_attribute(name, int(attributes[name])) for name in ordered)
    return node


def opset_imports(domain: str = "opmx", opset: int = 24) -> list[onnx.OperatorSetIdProto]:
    """The opset imports of a model with these nodes, for ``helper.make_model(..., opset_imports=...)``."""
    groups = ("", ".dynamic_batching")
    own = [helper.make_opsetid(domain + group, VERSION) for group in groups]
    return [helper.make_opsetid("", opset), *own]
