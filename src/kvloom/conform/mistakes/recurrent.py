"""Known mistakes of recurrent states: decay, correction, and the state of the next call."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.making import Mistake, by_call, by_numbers, changed, set_to, without, zeroed
from kvloom.conform.oracles import recurrent
from kvloom.conform.oracles.recurrent import State

Row = list[float]


def _not_exponentiated(state: State, decay: Row) -> State:
    return [[g * x for x in row] for g, row in zip(decay, state, strict=True)]


def _decayed_at_the_end(state: State, key: Row, value: Row, decay: Row | None, rate: float | None) -> State:
    if rate is not None:
        value = recurrent.corrected(state, key, value, rate)
    state = recurrent.written(state, key, value)
    return state if decay is None else recurrent.decayed(state, decay)


def _corrected_before_the_decay(
    state: State, key: Row, value: Row, decay: Row | None, rate: float | None
) -> State:
    if rate is not None:
        value = recurrent.corrected(state, key, value, rate)
    return recurrent.written(state if decay is None else recurrent.decayed(state, decay), key, value)


def _rate_of_the_value(state: State, key: Row, value: Row, rate: float) -> Row:
    return [rate * v - r for v, r in zip(value, recurrent.retrieved(state, key), strict=True)]


def _read_before(before: State, after: State, query: Row, scale: float) -> Row:
    return [scale * x for x in recurrent.retrieved(before, query)]


_past_ignored: Final = changed("past_state", zeroed)


def _past_ignored_by_prompts(call: Call) -> Call | None:
    count = call["query"].shape[1] if "query" in call else call["input"].shape[2]
    return call if count == 1 else _past_ignored(call)


def _transposed(operator: Operator, call: Call, results: Results) -> Results | None:
    """States are ``[V, K]``, if both sizes are equal."""
    past = call["past_state"]
    if past.shape[2] != past.shape[3]:
        return None
    found = operator.oracle({**call, "past_state": past.mT})
    return {**found, "present_state": found["present_state"].mT.contiguous()}


def _interleaved(operator: Operator, call: Call, results: Results) -> Results | None:
    """Element d of head h is read at d * heads + h."""
    heads, query_heads = call["kv_num_heads"], call["q_num_heads"]

    def sides(x: Tensor, count: int) -> Tensor:
        apart: Tensor = x.unflatten(2, (-1, count)).mT
        return apart.flatten(2)

    given = {"query": sides(call["query"], query_heads)}
    given |= {name: sides(call[name], heads) for name in ("key", "value")}
    if "decay" in call:
        given["decay"] = sides(call["decay"], heads)
    found = operator.oracle({**call, **given})
    return {**found, "output": found["output"].unflatten(2, (query_heads, -1)).mT.flatten(2)}


def _by_values(call: Call) -> Call | None:
    if call["scale"]:
        return None
    return {**call, "scale": 1.0 / math.sqrt(call["value"].shape[2] // call["kv_num_heads"])}


def _first_element(x: Tensor, call: Call) -> Tensor:
    heads: Tensor = x.unflatten(2, (call["kv_num_heads"], -1))
    return heads[..., :1].expand_as(heads).flatten(2)


def _all_inputs(call: Call, past: Tensor | None) -> Tensor:
    """Past inputs, zeros if there are none, and new ones."""
    x, size = call["input"], call["weight"].shape[2] - 1
    return torch.cat((x.new_zeros(*x.shape[:2], size) if past is None else past, x), dim=2)


def _centered(operator: Operator, call: Call, results: Results) -> Results | None:
    """Windows end half a kernel later; inputs after the last one are 0."""
    size, padded = call["weight"].shape[2], _all_inputs(call, call.get("past_state"))
    padded = torch.nn.functional.pad(padded, (0, size // 2))
    later = padded[:, :, size // 2 :]
    found = operator.oracle({**call, "past_state": later[:, :, : size - 1], "input": later[:, :, size - 1 :]})
    return {**found, "present_state": results["present_state"]}


def _state_of_inputs(operator: Operator, call: Call, results: Results) -> Results | None:
    """A call of fewer inputs than the state has columns forgets the earlier inputs."""
    return {**results, "present_state": _all_inputs(call, None)[:, :, call["input"].shape[2] :]}


def _state_without_the_newest(operator: Operator, call: Call, results: Results) -> Results | None:
    first, padded = call["input"].shape[2] - 1, _all_inputs(call, call.get("past_state"))
    return {**results, "present_state": padded[:, :, first : first + call["weight"].shape[2] - 1]}


def _newest_first(operator: Operator, call: Call, results: Results) -> Results | None:
    if "weight" not in call:
        return None
    past = call.get("past_state")
    found = operator.oracle(call if past is None else {**call, "past_state": past.flip(2)})
    return {**found, "present_state": found["present_state"].flip(2)}


def _bias_after(window: Row, kernel: Row, bias: float, activation: str) -> float:
    product = sum(x * w for x, w in zip(window, kernel, strict=True))
    return recurrent.activated(product, activation) + bias


def _sigmoid(x: float, activation: str) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if activation in ("silu", "swish") else x


MISTAKES: Final = (
    by_numbers("decay not exponentiated", "decay is a logarithm: the state is multiplied by exp(decay)",
               recurrent, decayed=_not_exponentiated),
    by_numbers("decayed after the write", "a token is written to the decayed state, and not decayed itself",
               recurrent, advanced=_decayed_at_the_end),
    by_numbers("corrected before the decay", "the delta rule reads the state after its decay", recurrent,
               advanced=_corrected_before_the_decay),
    by_numbers("rate of the value alone", "beta multiplies the value less what was retrieved for its key",
               recurrent, corrected=_rate_of_the_value),
    by_numbers("not corrected", "beta * value is written without what the state has for the key", recurrent,
               corrected=lambda state, key, value, rate: [rate * v for v in value]),
    by_numbers("read before the write", "a query reads the state that has its own token", recurrent,
               read=_read_before),
    by_call("beta ignored", "values are written at the rate 1",
            changed("beta", lambda x, call: torch.ones_like(x))),
    by_call("beta of the first head for all", "each head has a rate of its own",
            changed("beta", lambda x, call: x[..., :1].expand_as(x))),
    by_call("decay ignored", "the state does not decay", changed("decay", zeroed)),
    by_call("decay negated", "the state is multiplied by exp(decay), not by exp(-decay)",
            changed("decay", lambda x, call: -x)),
    by_call("decay of the first element for all", "each element of a key has a decay of its own",
            changed("decay", _first_element)),
    by_call("scaled by the values", "without a scale it is 1 / sqrt of the elements of a key, not of a value",
            _by_values),
    by_call("past_state ignored", "the call begins with zeros, whatever past_state has", _past_ignored),
    by_call("past_state ignored by prompts", "calls of several tokens begin with past_state, too",
            _past_ignored_by_prompts),
    Mistake("state transposed", "states are [K, V] of each head, not [V, K]", _transposed),
    Mistake("heads interleaved", "elements of a head lie side by side", _interleaved),
    by_call("kernel flipped", "the last weight belongs to the newest input",
            changed("weight", lambda x, call: x.flip(2))),
    by_call("kernel of the first channel for all", "each channel has a kernel of its own",
            changed("weight", lambda x, call: x[:1].expand_as(x))),
    by_call("bias ignored", "bias is not added", without("bias")),
    by_numbers("bias after the activation", "bias is added before the activation", recurrent,
               convolved=_bias_after),
    by_call("activation ignored", "activation has no effect",
            set_to("activation", "none")),
    by_numbers("sigmoid for SiLU", "SiLU is the input times its sigmoid", recurrent, activated=_sigmoid),
    Mistake("later inputs read", "a window ends at its own input, it is not centered", _centered),
    Mistake("short calls forget", "the state keeps inputs of earlier calls where there are few new ones",
            _state_of_inputs),
    Mistake("state without the newest", "the last column of the state is the newest input",
            _state_without_the_newest),
    Mistake("state newest first", "the oldest input is the first column of the state", _newest_first),
)  # fmt: skip
