"""ONNX Runtime on the memory of torch tensors; caches are updated in place."""

from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from kvloom.errors import ArgumentError, ModelError
from kvloom.integrations.onnx.models import calls

ONNX_TYPE = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
    torch.bool: onnx.TensorProto.BOOL,
}


class OrtSession:
    """An ONNX Runtime session on the CPU, with as many threads as torch has.

    Args:
        model: A model in portable form.
        in_out: Updated inputs, each with the output that has its last state.
    """

    def __init__(self, model: onnx.ModelProto, in_out: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # errors are raised
        try:
            self._session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ModelError(f"model must be one that ONNX Runtime loads: {error}") from error
        self._types = {x.name: x.type.tensor_type.elem_type for x in model.graph.input}
        self.inputs = [x.name for x in self._session.get_inputs()]
        self._outputs = [x.name for x in self._session.get_outputs()]
        self._in_out = {output: name for name, output in in_out.items()}
        self._in_place = {name for name in in_out if _has_one_reader(model.graph, name)}

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, and updated inputs, which share memory with ``feeds``."""
        binding = self._session.io_binding()
        kept = []  # a binding does not keep its memory alive
        for name, x in feeds.items():
            if ONNX_TYPE.get(x.dtype) != self._types[name]:
                wanted = onnx.TensorProto.DataType.Name(self._types[name]).lower()
                raise ArgumentError(f"feeds[{name!r}] must be {wanted}, got {x.dtype}")
            kept.append(x.contiguous())
            binding.bind_input(name, "cpu", 0, self._types[name], list(x.shape), kept[-1].data_ptr())
        bound = set()
        for output in self._outputs:
            source = self._in_out.get(output)
            if source in self._in_place and feeds[source].is_contiguous() and feeds[source].numel():
                x = feeds[source]
                binding.bind_output(output, "cpu", 0, self._types[source], list(x.shape), x.data_ptr())
                bound.add(output)
            else:
                binding.bind_output(output, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise ArgumentError(f"feeds must match the inputs of the model: {error}") from error
        made: dict[str, Any] = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        outputs = {name: _tensor(x) for name, x in made.items() if name not in bound}
        for output, source in self._in_out.items():
            if output not in bound:
                feeds[source].copy_(outputs[output])
            outputs[source] = outputs[output] = feeds[source]
        return outputs


def _has_one_reader(graph: onnx.GraphProto, name: str) -> bool:
    """Whether the only reader of the input is a PMX node, so that no other node sees the update."""
    readers = [node for node in graph.node for x in node.input if x == name]
    inside = any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute)
    return len(readers) == 1 and not inside and next(calls(readers), None) is not None


def _tensor(x: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(x._ortvalue.to_dlpack())
