"""``CausalConvWithState`` of ONNX: a causal convolution whose state is the last inputs."""

from typing import Final

import torch
from torch import Tensor

from kvloom.core.checks import FLOAT_DTYPES, INT64_END, expect
from kvloom.core.memory import expect_memory
from kvloom.errors import ArgumentError, ShapeError

_ACTIVATIONS: Final = ("silu", "swish", "none")


def causal_conv_with_state(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own kernel over the ``k`` inputs up to its own position.

    As in ``Conv``, the kernel is not flipped: its last weight multiplies the last input. Sums are float32, in
    the order of the kernel, so that without an activation a text has the same bits however it is cut into
    calls.

    Args:
        input: ``[B, C, T]`` float32, float16 or bfloat16.
        weight: ``[C, 1, k]``, dtype of ``input``.
        bias: ``[C]``, dtype of ``input``; ``None``: none.
        past_state: ``[B, C, k - 1]``, dtype of ``input``: the earlier inputs; ``None``: zeros.
        activation: ``"silu"`` or ``"swish"``, x times its sigmoid; or ``"none"``.

    Returns:
        ``output`` ``[B, C, T]``, and ``present_state`` ``[B, C, k - 1]``, the last inputs, including those of
        ``past_state`` if there are fewer new ones.

    Raises:
        KVError: an argument does not fit the document.

    Source: ONNX operator ``CausalConvWithState``, opset 27.
    """
    if activation not in _ACTIVATIONS:
        raise ArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    sizes = expect("input", input, "B C T", dtype=FLOAT_DTYPES)
    batch, channels, count = sizes["B"], sizes["C"], sizes["T"]
    dtype, device = input.dtype, input.device
    size = expect("weight", weight, "C 1 k", dtype=dtype, device=device, C=channels)["k"]
    if size == 0:
        raise ShapeError(f"weight must have a kernel of at least one weight, got {list(weight.shape)}")
    if bias is not None:
        expect("bias", bias, "C", dtype=dtype, device=device, C=channels)
    if past_state is not None:
        shape = {"B": batch, "C": channels, "k-1": size - 1}
        expect("past_state", past_state, "B C k-1", dtype=dtype, device=device, **shape)

    elements = batch * channels * (5 * count + 2 * size)
    expect_memory("output", min(4 * elements, INT64_END - 1), device)
    if past_state is None:
        past_state = input.new_zeros(batch, channels, size - 1)
    padded = torch.cat((past_state, input), dim=2)
    rows, weights = padded.float(), weight.float()
    output = torch.zeros_like(input, dtype=torch.float32) if bias is None else bias.float().view(1, -1, 1)
    for i in range(size):
        output = output + weights[:, :, i] * rows[:, :, i : i + count]
    if activation != "none":
        output = output * output.sigmoid()
    return output.to(dtype), padded[:, :, count:].clone(memory_format=torch.contiguous_format)
