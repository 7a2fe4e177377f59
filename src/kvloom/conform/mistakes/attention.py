"""Known mistakes of attention, and of codes of ``GroupQueryAttention``."""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from kvloom.conform.describe import Call, Operator, Results
from kvloom.conform.mistakes.codes import half_away
from kvloom.conform.mistakes.making import Change, Mistake, by_call, by_numbers, changed, set_to, without
from kvloom.conform.oracles import attending

_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _heads_modulo(operator: Operator, call: Call, results: Results) -> Results | None:
    if "Q" in call:
        name, heads, kv_heads = "Q", call["Q"].shape[1], call["K"].shape[1]
    else:
        name, heads = "query", call["q_num_heads"] if "q_num_heads" in call else call["num_heads"]
        kv_heads = call["kv_num_heads"] if "kv_num_heads" in call else call["num_kv_heads"] or heads
    if heads == kv_heads or kv_heads == 1:
        return None
    out, is_merged = next(iter(operator.outputs)), "kv_num_heads" in call  # heads and elements in one axis

    def ordered(x: Tensor, order: list[int]) -> Tensor:
        if not is_merged:
            return x[:, order]
        merged: Tensor = x.unflatten(2, (heads, -1))[:, :, order].flatten(2)
        return merged

    order = [h for g in range(kv_heads) for h in range(heads) if h % kv_heads == g]
    found = operator.oracle({**call, name: ordered(call[name], order)})
    return {**found, out: ordered(found[out], [order.index(h) for h in range(heads)])}


def _unscaled(call: Call) -> Call | None:
    if "head_dim" in call:
        return {**call, "query": call["query"] * call["head_dim"] ** 0.5}
    return {**call, "scale": 1.0} if "Q" in call or "kv_num_heads" in call else None


def _num_keys(call: Call) -> int:
    return int(call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0))


def _mask_as(change: Callable[[Tensor], Tensor | None]) -> Change:
    """Mistake of reading ``attn_mask`` of ONNX's ``Attention``."""

    def read(call: Call) -> Call | None:
        mask = change(call["attn_mask"])
        return None if mask is None else {**call, "attn_mask": mask}

    return read


def _hidden_are_finite(operator: Operator, call: Call, results: Results) -> Results | None:
    lowest = torch.finfo(call["Q"].dtype).min
    return {**results, "qk_matmul_output": results["qk_matmul_output"].clamp(min=lowest)}


def _raw_are_capped(call: Call) -> Call | None:
    is_capped = call["qk_matmul_output_mode"] == 0 and call["softcap"]
    return {**call, "qk_matmul_output_mode": 1} if is_capped else None


def _at_the_end(call: Call) -> Call | None:
    """A mask that is narrower than the keys is read as that of the last ones."""
    mask: Tensor = call["attn_mask"]
    missing = _num_keys(call) - mask.shape[-1]
    if not missing:
        return None
    hidden = False if mask.dtype == torch.bool else -math.inf
    return {**call, "attn_mask": torch.nn.functional.pad(mask, (missing, 0), value=hidden)}


def _top_left(call: Call) -> Call | None:
    """Causal alignment at the first key: query i sees keys 0 to i."""
    if not call["is_causal"]:
        return None
    given, shape = call.get("attn_mask"), (*call["Q"].shape[:3], _num_keys(call))
    mask = torch.full(shape, -math.inf).triu(1)
    mask = mask if given is None else mask + attending.added(given, shape)
    return {**call, "is_causal": 0, "attn_mask": mask}


def _seen_more(by: int) -> Change:
    return changed("nonpad_kv_seqlen", lambda x, call: (x + by).clamp(0, call["K"].shape[2]))


def _lengths_off(call: Call) -> Call | None:
    """``seqlens_k`` read as the length, not as the length minus one."""
    lengths = call["seqlens_k"] - 1
    return {**call, "seqlens_k": lengths} if (lengths >= call["query"].shape[1] - 1).all() else None


def _is_padded(call: Call) -> bool:
    """Whether it is the first prompt of rows that differ in length."""
    count = call["query"].shape[1]
    return int(call["total_sequence_length"]) == count and bool((call["seqlens_k"] + 1 < count).any())


def _padding_of_prompt_seen(call: Call) -> Call | None:
    whole = torch.full_like(call["seqlens_k"], call["query"].shape[1] - 1)
    return {**call, "seqlens_k": whole} if _is_padded(call) else None


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


_PACKED: Final = attending.packed
_UNPACKED: Final = attending.unpacked


def _in_complement(even: int, odd: int) -> int:
    return (even & 15) | ((odd & 15) << 4)


def _swapped(even: int, odd: int) -> int:
    return _PACKED(odd, even)


def _swapped_read(cache: Tensor) -> Tensor:
    codes = _UNPACKED(cache)
    return torch.stack((codes[..., 1::2], codes[..., ::2]), dim=-1).flatten(-2)


MISTAKES: Final = (
    Mistake("wrong head for a query group", "query head g reads head g % H, it reads g // group",
            _heads_modulo),
    by_call("causal mask flipped", "is_causal is read the wrong way round or ignored",
            lambda c: {**c, "is_causal": 1 - int(c["is_causal"])}),
    by_call("causal from the top left", "query i sees keys 0 to i, it sees those up to its own position",
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
    by_call("raw scores are capped", "mode 0 of qk_matmul_output comes after the softcap, it is before it",
            _raw_are_capped),
    by_call("mask of the last keys", "keys beyond the mask are hidden, those before it are", _at_the_end),
    by_call("ALiBi ignored", "is_alibi has no effect",
            lambda c: {**c, "is_alibi": 0} if c["is_alibi"] else None),
    by_call("scale ignored", "the attribute scale has no effect", without("scale")),
    by_call("softcap ignored", "softcap has no effect",
            lambda c: {**c, "softcap": 0.0} if c["softcap"] else None),
    by_call("padding read", "tokens after the length of a row are attended to",
            without("nonpad_kv_seqlen")),
    by_call("length off by one", "the last token of each row is left out", _seen_more(-1)),
    by_call("one token of padding read", "one token after the length is attended to", _seen_more(1)),
    by_call("length off by one", "seqlens_k is the length less one", _lengths_off),
    by_call("padding of a prompt read", "queries of padding attend to padding, they see tokens alone",
            _padding_of_prompt_seen),
    Mistake("padding left out", "padding of a first prompt is stored behind its tokens", _padding_left_out),
    by_numbers("divided by the scale", "codes are x / scale, they are x * (1 / scale)", attending,
               quantized=_to_int8(0, divided=True)),
    by_numbers("round half away from zero", "ties are rounded away from zero, they go to the even code",
               attending, quantized=_to_int8(0, half_away)),
    by_numbers("truncated codes", "quotients are cut off, they are rounded", attending,
               quantized=_to_int8(0, int)),
    by_numbers("rounded down", "quotients are rounded down, they go to the nearest", attending,
               quantized=_to_int8(0, math.floor)),
    by_numbers("rounded up", "quotients are rounded up, they go to the nearest", attending,
               quantized=_to_int8(0, math.ceil)),
    by_numbers("unsigned nibbles", "nibbles are read as 0 to 15, they are codes + 8", attending,
               unpacked=lambda cache: _UNPACKED(cache) + 8),
    by_numbers("-128 is missing", "codes stop at -127 (-7), they go to -128 (-8)", attending,
               quantized=_to_int8(1)),
    by_numbers("two's complement nibbles", "nibbles are in two's complement, they are codes + 8",
               attending, packed=_in_complement),
    by_numbers("two's complement nibbles", "nibbles are in two's complement, they are codes + 8",
               attending,
               packed=_in_complement, unpacked=lambda cache: _UNPACKED(cache).add(16).remainder(16) - 8),
    by_numbers("nibbles swapped", "the even element is in the high nibble, it belongs in the low one",
               attending, packed=_swapped),
    by_numbers("nibbles swapped", "the even element is in the high nibble, it belongs in the low one",
               attending, packed=_swapped, unpacked=_swapped_read),
)  # fmt: skip
