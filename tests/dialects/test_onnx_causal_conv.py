"""``CausalConvWithState`` against its oracle, and a text in parts against the whole."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import bits
from oracles.pairs import pairwise
from oracles.recurrent_cases import UNIT, Call, assert_within
from torch import Tensor

from kvloom.conform.oracles import recurrent
from kvloom.dialects import onnx

F32 = torch.float32
ACTIVATIONS = ("none", "silu", "swish")


def conv_call(
    rng: torch.Generator,
    count: int = 6,
    size: int = 4,
    dtype: torch.dtype = F32,
    has_bias: bool = True,
    has_past: bool = True,
    activation: str = "none",
) -> Call:
    """Two sequences of five channels."""
    call: Call = {
        "input": torch.randn(2, 5, count, generator=rng).to(dtype),
        "weight": torch.randn(5, 1, size, generator=rng).to(dtype),
        "activation": activation,
    }
    if has_bias:
        call["bias"] = torch.randn(5, generator=rng).to(dtype)
    if has_past:
        call["past_state"] = torch.randn(2, 5, size - 1, generator=rng).to(dtype)
    return call


def rounding_bound(call: Call) -> Tensor:
    """A product and a sum for each weight, and a sigmoid, off by a few units; SiLU rises by 1.1 at most."""
    terms = {name: call[name].abs() for name in ("input", "weight", "bias", "past_state") if name in call}
    length = recurrent.causal_conv_with_state(**{name: x.float() for name, x in terms.items()})["output"]
    return UNIT[F32] * 1.1 * (2 * call["weight"].shape[2] + 10) * length.double()


@pytest.mark.parametrize(
    ("count", "size", "dtype", "has_bias", "has_past", "activation"),
    pairwise((0, 1, 2, 6), (1, 2, 4), bits.FLOATS, (True, False), (True, False), ACTIVATIONS),
)
def test_results_are_those_of_the_document(
    count: int, size: int, dtype: torch.dtype, has_bias: bool, has_past: bool, activation: str
) -> None:
    call = conv_call(bits.generator(0), count, size, dtype, has_bias, has_past, activation)
    before = bits.snapshot(call)
    output, present = onnx.causal_conv_with_state(**call)
    bits.assert_unchanged(call, before)
    expected = recurrent.causal_conv_with_state(**call)
    assert_within(output, expected["output"], rounding_bound(call), "output")
    bits.assert_same_bits(present, expected["present_state"], "present_state")


@pytest.mark.parametrize(("dtype", "cuts"), pairwise(bits.FLOATS, ((1,), (2, 3), (1, 2, 3, 4, 5), (5,))))
def test_a_text_has_the_same_bits_however_it_is_cut(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    call = conv_call(bits.generator(1), dtype=dtype)
    outputs, state = [], call["past_state"]
    for first, last in zip((0, *cuts), (*cuts, 6), strict=True):
        part = {**call, "input": call["input"][:, :, first:last], "past_state": state}
        output, state = onnx.causal_conv_with_state(**part)
        outputs.append(output)
    whole, present = onnx.causal_conv_with_state(**call)
    bits.assert_same_bits(torch.cat(outputs, dim=2), whole, "output")
    bits.assert_same_bits(state, present, "present_state")


def test_a_state_has_every_bit_of_the_inputs() -> None:
    rng = bits.generator(2)
    call = conv_call(rng, count=2)
    call |= {"input": bits.poison((2, 5, 2), F32, rng), "past_state": bits.poison((2, 5, 3), F32, rng)}
    present = onnx.causal_conv_with_state(**call)[1]
    expected = torch.cat((call["past_state"][:, :, 2:], call["input"]), dim=2)
    bits.assert_same_bits(present, expected, "present_state")


def test_what_comes_later_and_other_channels_are_not_read() -> None:
    call = conv_call(bits.generator(3))
    clean = onnx.causal_conv_with_state(**call)[0]
    call["input"][:, 2, 3:] = math.nan
    output = onnx.causal_conv_with_state(**call)[0]
    assert output[:, 2, 3:].isnan().all()
    output[:, 2, 3:] = clean[:, 2, 3:]
    bits.assert_same_bits(output, clean, "output")


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_state_keeps_no_memory_but_its_own(count: int) -> None:
    call = conv_call(bits.generator(4), count)
    present = onnx.causal_conv_with_state(**call)[1]
    assert present.is_contiguous() and present.untyped_storage().nbytes() == present.nbytes
    before = bits.snapshot(call)
    present.fill_(7)
    bits.assert_unchanged(call, before)


def test_strides_are_followed() -> None:
    call = conv_call(bits.generator(5))
    strided = {**call, "input": call["input"].mT.contiguous().mT, "weight": call["weight"].flip(2)}
    expected = onnx.causal_conv_with_state(**{**strided, "input": call["input"]})
    for got, want in zip(onnx.causal_conv_with_state(**strided), expected, strict=True):
        bits.assert_same_bits(got, want, "result")


def test_gradients_reach_every_input() -> None:
    call = conv_call(bits.generator(6), activation="silu")
    inputs = [name for name, x in call.items() if isinstance(x, Tensor)]
    for name in inputs:
        call[name].requires_grad_()
    onnx.causal_conv_with_state(**call)[0].sum().backward()
    padded = torch.cat((call["past_state"], call["input"]), dim=2).detach().requires_grad_()
    weight, bias = (call[name].detach().requires_grad_() for name in ("weight", "bias"))
    torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, bias, groups=5)).sum().backward()
    for name, expected in (("weight", weight), ("bias", bias)):
        torch.testing.assert_close(call[name].grad, expected.grad)
    given = torch.cat((call["past_state"].grad, call["input"].grad), dim=2)
    torch.testing.assert_close(given, padded.grad)
