"""Known mistakes of attention, and of codes of ``GroupQueryAttention``."""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.codes import half_away
from kvloom.conform.mistakes.making import Change, Mistake, by_call, by_numbers, set_to, without
from kvloom.conform.oracles import attending

_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _flip_causal(call: Call) -> Call | None:
    return {**call, "is_causal": 1 - int(call["is_causal"])} if "is_causal" in call else None


def _heads_modulo(operator: Operator, call: Call, results: Results) -> Results | None:
    if "Q" in call:
        name, out, axis, heads, kv_heads = "Q", "Y", 1, call["Q"].shape[1], call["K"].shape[1]
        x = call["Q"]
    elif "num_kv_heads" in call and "query" in call:
        name, out, axis, x = "query", "attn_output", 1, call["query"]
        heads, kv_heads = call["num_heads"], call["num_kv_heads"] or call["num_heads"]
    elif "kv_num_heads" in call:
        name, out, axis, kv_heads = "query", "output", 2, call["kv_num_heads"]
        heads = call["q_num_heads"] if "q_num_heads" in call else call["num_heads"]
        x = call["query"].unflatten(2, (heads, -1))
    else:
        return None
    if heads == kv_heads or kv_heads == 1:
        return None
    order = [h for g in range(kv_heads) for h in range(heads) if h % kv_heads == g]
    back = [order.index(h) for h in range(heads)]
    index = torch.tensor(order)
    moved = x.index_select(axis, index)
    found = operator.oracle({**call, name: moved.flatten(2) if out == "output" else moved})
    y = found[out].unflatten(2, (heads, -1)) if out == "output" else found[out]
    y = y.index_select(axis, torch.tensor(back))
    return {**found, out: y.flatten(2) if out == "output" else y}


def _unscaled(call: Call) -> Call | None:
    if "Q" in call:
        return {**call, "scale": 1.0}
    if "kv_num_heads" in call:
        return {**call, "scale": 1.0}
    return {**call, "query": call["query"] * call["head_dim"] ** 0.5} if "head_dim" in call else None


def _num_keys(call: Call) -> int:
    return int(call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0))


def _mask_as(change: Callable[[Tensor], Tensor | None]) -> Change:
    """Mistake of reading ``attn_mask`` of ONNX's ``Attention``."""

    def changed(call: Call) -> Call | None:
        mask = change(call["attn_mask"]) if "Q" in call and "attn_mask" in call else None
        return None if mask is None else {**call, "attn_mask": mask}

    return changed


def _hidden_are_finite(operator: Operator, call: Call, results: Results) -> Results | None:
    scores = results.get("qk_matmul_output")
    if scores is None or call["qk_matmul_output_mode"] != 2:
        return None
    lowest = torch.full_like(scores, torch.finfo(call["Q"].dtype).min)
    return {**results, "qk_matmul_output": torch.where(scores == -math.inf, lowest, scores)}


def _raw_are_capped(operator: Operator, call: Call, results: Results) -> Results | None:
    if call.get("qk_matmul_output_mode") != 0 or not call["softcap"]:
        return None
    return operator.oracle({**call, "qk_matmul_output_mode": 1})


def _at_the_end(call: Call) -> Call | None:
    """A mask that is narrower than the keys is read as that of the last ones."""
    if "Q" not in call or "attn_mask" not in call:
        return None
    mask: Tensor = call["attn_mask"]
    missing = _num_keys(call) - mask.shape[-1]
    if not missing:
        return None
    hidden = False if mask.dtype == torch.bool else -math.inf
    return {**call, "attn_mask": torch.nn.functional.pad(mask, (missing, 0), value=hidden)}


def _top_left(operator: Operator, call: Call, results: Results) -> Results | None:
    """Causal alignment at the first key: query i sees keys 0 to i."""
    if "Q" in call and call.get("is_causal"):
        given, shape = call.get("attn_mask"), (*call["Q"].shape[:3], _num_keys(call))
        mask = torch.full(shape, -math.inf).triu(1)
        mask = mask if given is None else mask + attending.added(given, shape)
        return operator.oracle({**call, "is_causal": 0, "attn_mask": mask})
    return None


def _seen_more(by: int) -> Change:
    def change(call: Call) -> Call | None:
        if "nonpad_kv_seqlen" in call:
            return {**call, "nonpad_kv_seqlen": (call["nonpad_kv_seqlen"] + by).clamp(0, call["K"].shape[2])}
        return None

    return change


def _padding_seen(call: Call) -> Call | None:
    if "nonpad_kv_seqlen" not in call:
        return None
    return {k: x for k, x in call.items() if k != "nonpad_kv_seqlen"}


def _lengths_off(operator: Operator, call: Call, results: Results) -> Results | None:
    """``seqlens_k`` read as the length, not as the length minus one."""
    if "seqlens_k" not in call:
        return None
    lengths = call["seqlens_k"] - 1
    if bool((lengths < call["query"].shape[1] - 1).any()):
        return None
    return operator.oracle({**call, "seqlens_k": lengths})


def _is_padded(call: Call) -> bool:
    """Whether it is the first prompt of rows that differ in length."""
    if "seqlens_k" not in call or int(call["total_sequence_length"]) != call["query"].shape[1]:
        return False
    return bool((call["seqlens_k"] + 1 < call["query"].shape[1]).any())


def _padding_of_prompt_seen(call: Call) -> Call | None:
    whole = call["query"].shape[1] - 1 if _is_padded(call) else 0
    return {**call, "seqlens_k": torch.full_like(call["seqlens_k"], whole)} if whole else None


def _padding_left_out(operator: Operator, call: Call, results: Results) -> Results | None:
    if not _is_padded(call):
        return None
    for side in ("key", "value"):
        for b, last in enumerate(call["seqlens_k"].tolist()):
            results[f"present_{side}"][b, :, last + 1 :] = call[f"past_{side}"][b, :, last + 1 :]
    return results


def _to_int8(
    lowest: int, rounding: Callable[[float], int] = round, divided: bool = False
) -> Callable[[float, float, int], int]:
    def quantized(x: float, scale: float, bits: int) -> int:
        low, high = -(2 ** (bits - 1)) + lowest, 2 ** (bits - 1) - 1
        number, step = torch.tensor([x, scale], dtype=torch.float32)
        code: int = max(low, min(high, rounding(float(number / step if divided else number * (1 / step)))))
        return code

    return quantized


def _nibbles_read(
    codes: Callable[[Tensor], Tensor], high_first: bool = False
) -> Callable[[Tensor, Tensor, int], Tensor]:
    def dequantized(cache: Tensor, scales: Tensor, bits: int) -> Tensor:
        if bits == 8:
            return cache.double() * scales.double()
        pair = (cache >> 4, cache & 15) if high_first else (cache & 15, cache >> 4)
        return codes(torch.stack(pair, dim=-1).flatten(-2).double()) * scales.double()

    return dequantized


def _group_nibbles(offset: int, high_first: bool) -> Callable[[Tensor, Tensor, int, int], Tensor]:
    def codes(row: Tensor, scales: Tensor, head: int, bits: int) -> Tensor:
        of = [float(scales.reshape(-1)[0])] * len(row) if scales.numel() == 1 else scales[0, head, 0].tolist()
        found = [attending.quantized(x, s, bits) for x, s in zip(row.float().tolist(), of, strict=True)]
        if bits == 8:
            return torch.tensor(found, dtype=torch.int8)
        pairs = [(found[d], found[d + 1]) for d in range(0, len(found), 2)]
        if high_first:
            pairs = [(b, a) for a, b in pairs]
        packed = [((a + offset) & 15) | (((b + offset) & 15) << 4) for a, b in pairs]
        return torch.tensor(packed, dtype=torch.uint8)

    return codes


MISTAKES: Final = (
    Mistake("wrong head for a query group", "query head g reads head g % H, it reads g // group",
            _heads_modulo),
    by_call("causal mask flipped", "is_causal is read the wrong way round or ignored", _flip_causal),
    Mistake("causal from the top left", "query i sees keys 0 to i, it sees those up to its own position",
            _top_left),
    by_call("decoding_batches ignored", "decoding entries get a causal mask", set_to("decoding_batches", 0)),
    by_call("scores not scaled", "scores lack the factor 1 / sqrt(D)", _unscaled),
    by_call("mask ignored", "attn_mask is not added", without("attn_mask")),
    by_call("boolean mask added", "a boolean mask says which keys are seen, it is added as 0 and 1",
            _mask_as(lambda mask: mask.float() if mask.dtype == torch.bool else None)),
    by_call("integer mask as boolean", "integers of a mask are added, they are taken for true and false",
            _mask_as(lambda mask: mask.bool() if mask.dtype in _INTEGERS else None)),
    Mistake("hidden scores are finite", "a hidden score is the lowest number in qk_matmul_output, it is -inf",
            _hidden_are_finite),
    Mistake("raw scores are capped", "mode 0 of qk_matmul_output comes after the softcap, it is before it",
            _raw_are_capped),
    by_call("mask of the last keys", "keys beyond the mask are hidden, those before it are", _at_the_end),
    by_call("ALiBi ignored", "is_alibi has no effect",
            lambda c: {**c, "is_alibi": 0} if c.get("is_alibi") else None),
    by_call("scale ignored", "the attribute scale has no effect", without("scale")),
    by_call("softcap ignored", "softcap has no effect",
            lambda c: {**c, "softcap": 0.0} if c.get("softcap") else None),
    by_call("padding read", "tokens after the length of a row are attended to", _padding_seen),
    by_call("length off by one", "the last token of each row is left out", _seen_more(-1)),
    by_call("one token of padding read", "one token after the length is attended to", _seen_more(1)),
    Mistake("length off by one", "seqlens_k is the length less one", _lengths_off),
    by_call("padding of a prompt read", "queries of padding attend to padding, they see tokens alone",
            _padding_of_prompt_seen),
    Mistake("padding left out", "padding of a first prompt is stored behind its tokens", _padding_left_out),
    by_numbers("divided by the scale", "codes are x / scale, they are x * (1 / scale)", attending,
               quantized=_to_int8(0, divided=True)),
    by_numbers("round half away from zero", "ties are rounded away from zero, they go to the even code",
               attending,
               quantized=_to_int8(0, half_away)),
    by_numbers("truncated codes", "quotients are cut off, they are rounded", attending,
               quantized=_to_int8(0, int)),
    by_numbers("rounded down", "quotients are rounded down, they go to the nearest", attending,
               quantized=_to_int8(0, math.floor)),
    by_numbers("rounded up", "quotients are rounded up, they go to the nearest", attending,
               quantized=_to_int8(0, math.ceil)),
    by_numbers("unsigned nibbles", "nibbles are read as 0 to 15, they are codes + 8", attending,
               _dequantized=_nibbles_read(lambda n: n)),
    by_numbers("-128 is missing", "codes stop at -127 (-7), they go to -128 (-8)", attending,
               quantized=_to_int8(1)),
    by_numbers("two's complement nibbles", "nibbles are in two's complement, they are codes + 8",
               attending,
               _codes=_group_nibbles(0, False)),
    by_numbers("two's complement nibbles", "nibbles are in two's complement, they are codes + 8",
               attending,
               _codes=_group_nibbles(0, False), _dequantized=_nibbles_read(lambda n: (n + 8) % 16 - 8)),
    by_numbers("nibbles swapped", "the even element is in the high nibble, it belongs in the low one",
               attending,
               _codes=_group_nibbles(8, True)),
    by_numbers("nibbles swapped", "the even element is in the high nibble, it belongs in the low one",
               attending,
               _codes=_group_nibbles(8, True), _dequantized=_nibbles_read(lambda n: n - 8, high_first=True)),
)  # fmt: skip
