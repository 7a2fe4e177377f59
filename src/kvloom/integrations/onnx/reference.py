"""The PMX operators for ``onnx.reference.ReferenceEvaluator``, computed by kvloom's dialect."""

from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from onnx.reference.op_run import OpRun
from torch import Tensor

from kvloom.dialects import pmx
from kvloom.integrations.onnx.operators import ATTENTION, DOMAINS, DYNAMIC, STATIC, OperatorSpec

_RUN: Final[dict[int, Callable[..., Any]]] = {
    id(STATIC): pmx.key_value_cache,
    id(DYNAMIC): pmx.dynamic_batching.key_value_cache,
    id(ATTENTION): pmx.dynamic_batching.multi_head_cache_attention,
}


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
