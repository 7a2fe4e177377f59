"""The oracles of the recurrent ONNX operators themselves, against numbers written down by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvloom.conform.oracles.recurrent import causal_conv_with_state, linear_attention

HALF = math.log(0.5)


def rows(*tokens: tuple[float, ...]) -> Tensor:
    """One sequence ``[1, T, F]`` in float32."""
    return torch.tensor([tokens], dtype=torch.float32)


def attend(rule: str, **more: Tensor) -> tuple[list[float], list[list[float]]]:
    """One head, after the state [[3, 5], [6, 10]]: key (0, 1), value (1, 0), query (2, 1)."""
    past = torch.tensor([[[[3.0, 5.0], [6.0, 10.0]]]])
    heads = {"q_num_heads": 1, "kv_num_heads": 1, "scale": 1.0}
    found = linear_attention(
        rows((2, 1)), rows((0, 1)), rows((1, 0)), past, **more, **heads, update_rule=rule
    )
    return found["output"][0, 0].tolist(), found["present_state"][0, 0].tolist()


@pytest.mark.parametrize(
    ("rule", "more", "output", "state"),
    [
        ("linear", {}, [13, 20], [[3, 5], [7, 10]]),
        ("gated", {"decay": rows((HALF,))}, [7, 10], [[1.5, 2.5], [4, 5]]),
        ("gated", {"decay": rows((HALF, 0.0))}, [10, 15], [[1.5, 2.5], [7, 10]]),
        ("delta", {"beta": rows((0.5,))}, [9.5, 15], [[3, 5], [3.5, 5]]),
        ("delta", {"beta": rows((1.0,))}, [7, 10], [[3, 5], [1, 0]]),
        ("gated_delta", {"decay": rows((HALF,)), "beta": rows((0.5,))}, [5, 7.5], [[1.5, 2.5], [2, 2.5]]),
        ("gated_delta", {"decay": rows((-math.inf,)), "beta": rows((1.0,))}, [1, 0], [[0, 0], [1, 0]]),
    ],
)
def test_one_token(rule: str, more: dict[str, Tensor], output: list[float], state: list[list[float]]) -> None:
    got = attend(rule, **more)
    assert got[0] == pytest.approx(output, abs=1e-6)
    assert got[1] == [pytest.approx(row, abs=1e-6) for row in state]


def test_two_tokens_and_two_query_heads_of_one_state() -> None:
    query = rows((1, 1, 2, 0), (2, -1, 0, 1))
    found = linear_attention(
        query, rows((1, 2), (0, 1)), rows((3, 5), (1, 0)), q_num_heads=2, kv_num_heads=1, update_rule="linear"
    )
    expected = torch.tensor([[[9, 15, 6, 10], [-1, 0, 7, 10]]]) / math.sqrt(2)
    torch.testing.assert_close(found["output"], expected)
    assert found["present_state"].tolist() == [[[[3, 5], [7, 10]]]]


def test_neighboring_query_heads_read_the_same_state() -> None:
    found = linear_attention(
        rows((1, 1, 1, 1)),
        rows((1, 1)),
        rows((2, 3)),
        q_num_heads=4,
        kv_num_heads=2,
        update_rule="linear",
    )
    assert found["output"].tolist() == [[[2, 2, 3, 3]]]


def test_a_state_has_its_own_dtype_and_without_one_that_of_the_query() -> None:
    one = rows((0.1,)).half()
    heads = {"q_num_heads": 1, "kv_num_heads": 1, "update_rule": "linear"}
    found = linear_attention(one, one, one, torch.zeros(1, 1, 1, 1), **heads)
    assert (found["output"].dtype, found["present_state"].dtype) == (torch.float16, torch.float32)
    assert found["present_state"].item() == float(one.double() ** 2)
    assert linear_attention(one, one, one, **heads)["present_state"].dtype == torch.float16


@pytest.mark.parametrize(
    ("past", "output", "state"),
    [(None, [100, 210, 321], [2, 3]), ([7.0, 8.0], [187, 218, 321], [2, 3])],
)
def test_the_last_weight_meets_the_newest_input(
    past: list[float] | None, output: list[float], state: list[float]
) -> None:
    given = None if past is None else torch.tensor([[past]])
    found = causal_conv_with_state(
        torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[1.0, 10.0, 100.0]]]), None, given
    )
    assert found["output"].tolist() == [[output]] and found["present_state"].tolist() == [[state]]


def test_a_short_call_keeps_inputs_of_the_call_before() -> None:
    past = torch.tensor([[[7.0, 8.0]]])
    found = causal_conv_with_state(torch.tensor([[[1.0]]]), torch.tensor([[[1.0, 10.0, 100.0]]]), None, past)
    assert found["output"].item() == 187 and found["present_state"].tolist() == [[[8, 1]]]


def test_a_bias_comes_before_the_activation() -> None:
    x, weight, bias = torch.tensor([[[1.0]]]), torch.tensor([[[1.0]]]), torch.tensor([math.log(3) - 1])
    for activation in ("silu", "swish"):
        found = causal_conv_with_state(x, weight, bias, activation=activation)
        assert found["output"].item() == pytest.approx(0.75 * math.log(3), rel=1e-6)
        assert found["present_state"].shape == (1, 1, 0)
