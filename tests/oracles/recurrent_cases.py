"""Calls of the recurrent ONNX operators, and how far rounding may take their results from the truth.

Shapes: ``B`` sequences, ``T`` tokens, ``H`` states of a sequence, ``R`` query heads of each, ``K`` and ``V``
elements of a key and a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = dict[str, Any]
RULES = ("linear", "gated", "delta", "gated_delta")
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance of neighboring numbers at 1."""


class Sizes(NamedTuple):
    """Extents of a call."""

    B: int = 2
    T: int = 11
    H: int = 2
    R: int = 3
    K: int = 8
    V: int = 5


def linear_call(
    rule: str,
    rng: torch.Generator,
    sizes: Sizes = Sizes(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    state: torch.dtype | None = torch.float32,
    is_by_element: bool = True,
    **more: Any,
) -> Call:
    """Keys of length 1, decays of most strengths, rates from 0 to 1; ``state``: dtype of a past, or none."""
    batch, count, heads, group, key_dim, value_dim = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    keys = torch.nn.functional.normalize(normal(batch, count, heads, key_dim), dim=-1)
    call: Call = {
        "query": normal(batch, count, heads * group * key_dim).to(dtype),
        "key": keys.flatten(2).to(dtype),
        "value": normal(batch, count, heads * value_dim).to(dtype),
        "q_num_heads": heads * group,
        "kv_num_heads": heads,
        "update_rule": rule,
    }
    if state is not None:
        call["past_state"] = normal(batch, heads, key_dim, value_dim).to(state)
    if "gated" in rule:
        width = heads * key_dim if is_by_element else heads
        call["decay"] = -normal(batch, count, width).abs().to(dtype)
    if "delta" in rule:
        call["beta"] = torch.rand(batch, count, heads, generator=rng).to(dtype)
    return call | more


def part_of(call: Call, first: int, last: int) -> Call:
    """The call for tokens ``first`` to ``last`` alone."""
    names = ("query", "key", "value", "decay", "beta")
    return {name: x[:, first:last] if name in names else x for name, x in call.items()}


class Bounds(NamedTuple):
    """The largest errors that rounding justifies, of the output and the present state."""

    output: Tensor
    state: Tensor


def rounding_bounds(call: Call, chunk_size: int) -> Bounds:
    """How far float32, ``chunk_size`` tokens at a time, may be from the exact results.

    Decays of at most 1, and a delta rule with rate * |key|^2 of at most 2, never lengthen a difference of
    states. So errors of tokens add up, and each is at most n units of the terms that are summed: of the state
    that is read for the delta, the outer product, and their sum. n counts the operations of one element: two
    products of K elements, three sums over the tokens of a chunk (decays, system, state), and some more. A
    decay by exp(-s) is wrong by at most s exp(-s) units for each term of s, which is less than one.
    """
    heads, rule = call["kv_num_heads"], call["update_rule"]
    query, key, value = (call[name].double() for name in ("query", "key", "value"))
    query, key, value = query.unflatten(2, (call["q_num_heads"], -1)), *(
        x.unflatten(2, (heads, -1)) for x in (key, value)
    )  # fmt: skip
    batch, count, _, key_dim = key.shape
    past = call.get("past_state")
    state = torch.zeros(batch, heads, key_dim, value.shape[3]).double() if past is None else past.double()
    units = UNIT[torch.float32] * (2 * key_dim + 3 * min(chunk_size, max(count, 1)) + 16)
    terms = state.norm(dim=(2, 3))  # [B, H]: at least the sum of the lengths of all that a state is summed of
    error = torch.zeros_like(terms)
    outputs = []
    for t in range(count):
        k, v = key[:, t], value[:, t]  # [B, H, K], [B, H, V]
        if "gated" in rule:
            factor = call["decay"][:, t].double().unflatten(1, (heads, -1)).exp()  # [B, H, K] or [B, H, 1]
            state, terms = state * factor.unsqueeze(3), terms * factor.amax(2)
        if "delta" in rule:
            beta = call["beta"][:, t].double().unsqueeze(2)
            error += units * k.norm(dim=2) * beta[..., 0] * (v.norm(dim=2) + k.norm(dim=2) * terms)
            v = beta * (v - (k.unsqueeze(2) @ state).squeeze(2))
        state = state + k.unsqueeze(3) * v.unsqueeze(2)
        terms = terms + k.norm(dim=2) * v.norm(dim=2)
        error = error + units * terms
        length = query[:, t].norm(dim=2).unflatten(1, (heads, -1)) * call.get("scale", key_dim**-0.5)
        outputs.append((length * (error + units * terms).unsqueeze(2)).flatten(1))  # [B, H * R]
    found = torch.stack(outputs, 1) if outputs else query.new_zeros(batch, 0, query.shape[2])
    return Bounds(found.repeat_interleave(value.shape[3], dim=2), error.view(batch, heads, 1, 1))


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor, name: str) -> None:
    """Both were rounded to their dtype once more at the end."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    limit = bound + 2 * UNIT[actual.dtype] * (expected.double().abs() + bound)
    wrong = (actual.double() - expected.double()).abs()
    assert bool((wrong <= limit).all()), f"{name} is off by {float((wrong / limit).max()):.3g} of its bound"
