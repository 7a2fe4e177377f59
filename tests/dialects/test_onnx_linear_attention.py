"""``LinearAttention`` against its oracle, in chunks of any size, within what rounding justifies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import bits
from oracles.pairs import in_turn, pairwise
from oracles.recurrent_cases import (
    RULES,
    Call,
    Sizes,
    assert_within,
    linear_call,
    part_of,
    rounding_bounds,
)
from torch import Tensor

from kvloom.conform.oracles import recurrent
from kvloom.dialects import onnx

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def assert_right(call: Call) -> None:
    """The results are those of the oracle, and the call is as it was."""
    before = bits.snapshot(call)
    output, present = onnx.linear_attention(**call)
    bits.assert_unchanged(call, before)
    expected = recurrent.linear_attention(**call)
    bound = rounding_bounds(call, call.get("chunk_size", 64))
    assert_within(output, expected["output"], bound.output, "output")
    assert_within(present, expected["present_state"], bound.state, "present_state")


@pytest.mark.parametrize(
    ("rule", "is_by_element", "dtype", "state", "chunk_size"),
    pairwise(RULES, (True, False), (F32, F16, BF16), (F32, F16, BF16, None), (1, 3, 4, 11, 64)),
)
def test_results_are_those_of_the_document(
    rule: str, is_by_element: bool, dtype: torch.dtype, state: torch.dtype | None, chunk_size: int
) -> None:
    rng = bits.generator(0)
    assert_right(linear_call(rule, rng, Sizes(), dtype, state, is_by_element, chunk_size=chunk_size))


@pytest.mark.parametrize(("rule", "sizes"), in_turn(RULES, (
    Sizes(T=0), Sizes(B=0), Sizes(T=1, R=1), Sizes(K=1, V=1), Sizes(H=1, R=1, K=3, V=7), Sizes(H=3, R=2, V=1),
)))  # fmt: skip
def test_any_size(rule: str, sizes: Sizes) -> None:
    assert_right(linear_call(rule, bits.generator(1), sizes))


@pytest.mark.parametrize("rule", RULES)
def test_chunks_and_single_tokens_of_a_long_text_are_alike(rule: str) -> None:
    call = linear_call(rule, bits.generator(2), Sizes(B=1, T=150, R=1, K=16))
    bounds = [rounding_bounds(call, size) for size in (64, 1)]
    chunked, single = (onnx.linear_attention(**call, chunk_size=size) for size in (64, 1))
    for i, name in enumerate(("output", "present_state")):
        assert_within(chunked[i], single[i], bounds[0][i] + bounds[1][i], name)
    assert not torch.equal(chunked[0], single[0])  # by another order of sums


@pytest.mark.parametrize("rule", RULES)
def test_one_rate_for_all_heads(rule: str) -> None:
    call = linear_call(rule, bits.generator(3), chunk_size=4)
    if "beta" in call:
        one = call["beta"][..., :1]
        call["beta"] = one
        assert_right({**call, "beta": one.expand(-1, -1, 2)})
        bits.assert_same_bits(
            onnx.linear_attention(**call)[0],
            onnx.linear_attention(**{**call, "beta": one.expand(-1, -1, 2)})[0],
            "output",
        )
    else:
        assert_right(call)


@pytest.mark.parametrize("scale", [0.25, -2.0, 3])
def test_a_scale_is_a_factor_and_none_is_by_the_keys(scale: float) -> None:
    call = linear_call("gated", bits.generator(4))
    plain, scaled = onnx.linear_attention(**call, scale=1.0), onnx.linear_attention(**call, scale=scale)
    torch.testing.assert_close(scaled[0], scale * plain[0])
    torch.testing.assert_close(onnx.linear_attention(**call)[0], plain[0] / math.sqrt(8))
    bits.assert_same_bits(scaled[1], plain[1], "present_state")


def test_defaults_are_a_gated_delta_in_chunks_of_64() -> None:
    call = linear_call("gated_delta", bits.generator(5), Sizes(T=70))
    said = {**call, "chunk_size": 64, "scale": 0.0}
    implied = {name: x for name, x in call.items() if name != "update_rule"}
    for got, expected in zip(onnx.linear_attention(**implied), onnx.linear_attention(**said), strict=True):
        bits.assert_same_bits(got, expected, "result")


def joined(call: Call, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The results of a text that is fed part by part."""
    outputs, state = [], call.get("past_state")
    ends = (*cuts, call["query"].shape[1])
    for first, last in zip((0, *cuts), ends, strict=True):
        output, state = onnx.linear_attention(**{**part_of(call, first, last), "past_state": state})
        outputs.append(output)
    assert state is not None
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize(
    ("rule", "is_by_element", "dtype", "cuts"),
    pairwise(RULES, (True, False), (F32, F16, BF16), ((4,), (8,), (4, 8), (8, 12))),
)
def test_parts_cut_between_chunks_have_the_bits_of_the_whole(
    rule: str, is_by_element: bool, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    call = linear_call(rule, bits.generator(6), Sizes(T=14), dtype, F32, is_by_element, chunk_size=4)
    for got, expected in zip(joined(call, cuts), onnx.linear_attention(**call), strict=True):
        bits.assert_same_bits(got, expected, "result")


@pytest.mark.parametrize("rule", RULES)
def test_token_by_token_has_the_bits_of_chunks_of_one(rule: str) -> None:
    call = linear_call(rule, bits.generator(7), chunk_size=1)
    whole = onnx.linear_attention(**call)
    for got, expected in zip(joined({**call, "chunk_size": 64}, tuple(range(1, 11))), whole, strict=True):
        bits.assert_same_bits(got, expected, "result")


@pytest.mark.parametrize("rule", RULES)
def test_parts_cut_anywhere_are_within_rounding(rule: str) -> None:
    call = linear_call(rule, bits.generator(8), chunk_size=4)
    bound, expected = rounding_bounds(call, 4), recurrent.linear_attention(**call)
    output, state = joined(call, (1, 3, 9))
    assert_within(output, expected["output"], bound.output, "output")
    assert_within(state, expected["present_state"], bound.state, "present_state")


@pytest.mark.parametrize("is_by_element", [True, False])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("forgetting", [-math.inf, -1e30, -1e4])
def test_what_was_forgotten_leaves_the_rest_exact(rule: str, is_by_element: bool, forgetting: float) -> None:
    call = linear_call(rule, bits.generator(9), is_by_element=is_by_element)
    call["decay"][:, 5] = forgetting
    assert_right(call)
    output, state = onnx.linear_attention(**call)
    alone = {**part_of(call, 5, 11), "past_state": torch.zeros_like(call["past_state"])}
    bound = rounding_bounds(alone, 11)
    fresh = recurrent.linear_attention(**alone)
    assert_within(output[:, 5:], fresh["output"], 2 * bound.output, "output")
    assert_within(state, fresh["present_state"], 2 * bound.state, "present_state")


def test_what_is_not_finite_reaches_no_earlier_chunk() -> None:
    call = linear_call("gated_delta", bits.generator(10), chunk_size=4)
    clean = onnx.linear_attention(**call)[0]
    for name in ("query", "key", "value", "decay", "beta"):
        call[name][:, 8:] = math.nan
    output, state = onnx.linear_attention(**call)
    bits.assert_same_bits(output[:, :8], clean[:, :8], "output")
    assert output[:, 8:].isnan().all() and state.isnan().all()


@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_state_keeps_no_memory_but_its_own(count: int) -> None:
    call = linear_call("gated", bits.generator(11), Sizes(T=count))
    output, state = onnx.linear_attention(**call)
    assert state.is_contiguous() and state.untyped_storage().nbytes() == state.nbytes
    assert output.is_contiguous() and output.untyped_storage().nbytes() == output.nbytes
    before = call["past_state"].clone()
    state.fill_(7)
    bits.assert_same_bits(call["past_state"], before, "past_state")


def test_strides_are_followed() -> None:
    call = linear_call("gated_delta", bits.generator(12), chunk_size=4)

    def spread(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        wide = torch.full([2 * n for n in x.shape], math.nan, dtype=x.dtype)
        inside = wide[tuple(slice(1, None, 2) for _ in x.shape)]
        return inside.copy_(x)

    expected = onnx.linear_attention(**call)
    for got, want in zip(
        onnx.linear_attention(**{name: spread(x) for name, x in call.items()}), expected, strict=True
    ):
        bits.assert_same_bits(got, want, "result")


def test_gradients_reach_every_input() -> None:
    call = linear_call("gated_delta", bits.generator(13), chunk_size=4)
    inputs = [name for name, x in call.items() if isinstance(x, Tensor)]
    for name in inputs:
        call[name].requires_grad_()
    output, state = onnx.linear_attention(**call)
    (output.sum() + state.sum()).backward()
    single = {name: x.detach().requires_grad_() if isinstance(x, Tensor) else x for name, x in call.items()}
    output, state = onnx.linear_attention(**{**single, "chunk_size": 1})
    (output.sum() + state.sum()).backward()
    for name in inputs:
        torch.testing.assert_close(call[name].grad, single[name].grad, rtol=1e-4, atol=1e-4)


def test_layers_of_qwen_3_next_compute_a_gated_delta() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    call = linear_call(
        "gated_delta", bits.generator(14), Sizes(T=70, R=1, K=8, V=8), is_by_element=False, chunk_size=16
    )
    expected, bound = recurrent.linear_attention(**call), rounding_bounds(call, 64)
    given = [call[name].unflatten(2, (2, -1)) for name in ("query", "key", "value")]
    state = {"initial_state": call["past_state"], "output_final_state": True}
    for function in (modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule):
        output, present = function(*given, g=call["decay"], beta=call["beta"], **state)
        assert_within(output.flatten(2), expected["output"], 2 * bound.output, "output")
        assert_within(present, expected["present_state"], 2 * bound.state, "present_state")
    assert_right(call)
