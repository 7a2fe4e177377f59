"""Linear layers whose weights are also, or only, kept in the order in which oneDNN reads them.

torch's operators ``mkldnn::_reorder_linear_weight`` and ``mkldnn::_linear_pointwise`` pack and multiply;
``torch.compile`` uses them to freeze weights. A product of few rows then takes less time, and has the same
bits for every number of rows from two on.

Shapes: M rows, K inputs, N outputs.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvloom.core.specs import dtype_name
from kvloom.errors import StateError
from kvloom.integrations.tensor_state import address_of, sample_at, sample_place, version_of
from kvloom.integrations.transformers.invariance.layers import InvariantRows, matrix_of
from kvloom.integrations.transformers.invariance.rules import NONE, Product, RowRule, rule_of
from kvloom.ops.schemas import without_gradient

_LINEAR: Final[Any] = (
    torch.ops.mkldnn._linear_pointwise.default if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
)
_ROWS: Final = 8
"""Number of rows for which oneDNN orders weights; the order is the same for all numbers used here."""
_BLOCK: Final = 64
"""Largest block to which oneDNN rounds K and N up: 16, 32 or 64 by dtype, size and instruction set."""
_FASTEST: Final = 4
"""Number of rows that take less time than fewer rows, which wait longer for memory."""


def why_not_packable(weight: Tensor) -> str:
    """Why oneDNN cannot pack a weight ``[N, K]`` on this machine; empty if it can."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return "not on a CPU with oneDNN"
    if type(weight.data) is not Tensor or weight.layout != torch.strided:
        return "quantized"
    if weight.dtype == torch.bfloat16:
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    elif weight.dtype == torch.float16:
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    else:
        is_supported = weight.dtype == torch.float32
    return "" if is_supported else f"{dtype_name(weight.dtype)} without its instructions"


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight ``[N, K]`` in oneDNN's order."""
    with torch.no_grad():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return packed


def most_packed_bytes(weight: Tensor) -> int:
    """Upper bound of the bytes of a packed weight ``[N, K]``, exact if 64 divides both; needs no data."""
    rows, columns = (-(-n // _BLOCK) * _BLOCK for n in weight.shape)
    return rows * columns * weight.element_size()


def packed_linear(weight: Tensor, bias: Tensor | None) -> Product:
    """The product of ``[M, K]`` by ``weight`` ``[N, K]``, which is packed first, and ``bias`` ``[N]``."""
    return partial(_multiply, pack(weight), bias)


def _multiply(packed: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    out: Tensor = _LINEAR(input, packed, bias, "none", (), "")
    return out


class PackedWeight:
    """The weight of one layer in oneDNN's order.

    Attributes:
        tensor: The packed weight; ``None`` if the weight cannot be packed any more.
        dtype: Dtype of the weight.
        rule: Rule by which rows of products are padded.
        nbytes: Bytes of the packed weight, with the padding of its blocks.
        is_invariant: Whether products are padded.
    """

    tensor: Tensor | None
    rule: RowRule

    def __init__(self, layer: Any, is_invariant: bool) -> None:
        self.is_invariant = is_invariant
        self.update(layer)

    def update(self, layer: Any) -> None:
        """Pack the present weight of the layer."""
        weight, matrix = layer.weight, matrix_of(layer)
        self._seen = (version_of(weight), address_of(weight))
        self._place = sample_place(weight)
        self._sample = self._read_sample()
        self.dtype = weight.dtype
        self.tensor = None if why_not_packable(matrix) else pack(matrix)
        self.nbytes = 0 if self.tensor is None else int(torch.ops.mkldnn._nbytes(self.tensor))
        self.find_rule(matrix, layer.bias)

    def find_rule(self, matrix: Tensor, bias: Tensor | None) -> None:
        """Find the rule for the present number of threads and ``is_invariant``."""
        self.rule = NONE
        if self.is_invariant and self.tensor is not None:
            self.rule = rule_of(matrix, bias, packed_linear)
            if self.rule.multiple == 1:
                self.rule = replace(self.rule, least=max(self.rule.least, _FASTEST))

    def forget_weight(self) -> None:
        """Drop the reference to the weight of a layer that becomes packed only."""
        self._place = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether a weight is the one that was packed, by torch's count of writes and its address."""
        return self._seen == (version_of(weight), address_of(weight))

    def is_sampled_of(self, weight: Tensor) -> bool:
        """As ``is_of``, and a sample of bytes is the same, since torch does not count all writes."""
        return self.is_of(weight) and self._read_sample() == self._sample

    def dense(self, layer: Any) -> Tensor:
        """The weight that was packed, in new memory."""
        if self.tensor is None:
            raise StateError("a layer must have its weight packed to unpack it, got one without")
        matrix: Tensor = self.tensor.to_dense()
        return matrix.t().contiguous() if isinstance(layer, Conv1D) else matrix

    def _read_sample(self) -> bytes:
        return b"" if self._place is None else sample_at(*self._place)


class PackedRows(InvariantRows):
    """A linear layer that computes with its packed weight, and also keeps the weight."""

    numerics = "packed"
    packed: PackedWeight
    bias: Any
    _parameters: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        if torch.compiler.is_compiling():
            return super().forward(input)
        packed, bias = self.packed, self.bias
        weight = self._parameters.get("weight")  # ``None`` if the layer is packed only
        if weight is not None and not packed.is_of(weight):
            packed.update(self)
        tensor, is_usual = packed.tensor, input.dtype is packed.dtype and input.dim() > 1
        if tensor is None or not is_usual or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        product: Product = partial(_multiply, tensor, bias)
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            product = partial(without_gradient, "a packed linear layer", _multiply, tensor, bias)
        rule, count = packed.rule, input.numel() // input.shape[-1]
        if rule.multiple == 1 and not rule.tile:
            if count >= rule.least:
                return product(input)
            if count == 1:  # a decode step of one request
                return product(torch.cat([input] * rule.least, dim=-2)).narrow(-2, 0, 1)
        out = rule.apply(product, input.reshape(-1, input.shape[-1]))
        return out.view(*input.shape[:-1], out.shape[-1])

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle, which cannot write oneDNN's tensors."""
        return {name: value for name, value in vars(self).items() if name != "packed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if "packed" not in state:
            self.packed = PackedWeight(self, self.row_rule != NONE)


class PackedLinear(PackedRows, nn.Linear):
    original = nn.Linear


class PackedConv1D(PackedRows, Conv1D):  # type: ignore[misc]
    original = Conv1D


PACKED: Final = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}
"""For each class of linear layers, its class that keeps both weights."""
