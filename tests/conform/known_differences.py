"""Legal calls of ONNX's ``Attention`` that a runtime refuses, or answers otherwise than the document says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvloom.conform.describe import Call

DIALECTS = {23: "onnx.attention_23", 24: "onnx.attention", 25: "onnx.attention_25"}
ORT, REFERENCE = "onnxruntime", "onnx.reference"


@dataclass(frozen=True)
class Known:
    """A difference; ``row`` is the line of the table in docs/onnx.md that says so."""

    row: str
    target: str
    opsets: tuple[int, ...]
    has_it: Callable[[Call], bool]


def _num_keys(call: Call) -> int:
    return int(call["K"].shape[2] + (call["past_key"].shape[2] if "past_key" in call else 0))


def _is_flat(call: Call) -> bool:
    return "attn_mask" in call and call["attn_mask"].ndim == 1


def _is_one_row(call: Call) -> bool:
    mask = call.get("attn_mask")
    return mask is not None and mask.ndim > 1 and mask.shape[-2] == 1 < call["Q"].shape[2]


def _is_narrow(call: Call) -> bool:
    return "attn_mask" in call and call["attn_mask"].shape[-1] < _num_keys(call)


def _without_window(call: Call) -> bool:
    return max(call.get("left_window_size", -1), call.get("right_window_size", -1)) < 0


def _is_causal(call: Call) -> bool:
    return bool(call.get("is_causal")) and _without_window(call)


def _shows_masked_scores(call: Call) -> bool:
    hides = call.get("is_causal") or "nonpad_kv_seqlen" in call or "attn_mask" in call
    return call.get("qk_matmul_output_mode") == 2 and bool(hides)


def _shows_capped_scores(call: Call) -> bool:
    return call.get("qk_matmul_output_mode") == 0 and call.get("softcap", 0.0) > 0


FLAT, ONE_ROW, NARROW = "mask of one axis", "mask with one row for all queries", "mask narrower than the keys"
MASKED, CAPPED = "hidden scores in mode 2", "softcap in mode 0"
KNOWN = (
    Known(FLAT, ORT, (23, 24), _is_flat),
    Known(ONE_ROW, ORT, (23, 24), _is_one_row),
    Known(NARROW, ORT, (24,), _is_narrow),
    Known(MASKED, ORT, (23, 24), _shows_masked_scores),
    Known(FLAT, REFERENCE, (23, 24, 25), lambda call: _is_flat(call) and _is_causal(call)),
    Known(ONE_ROW, REFERENCE, (23, 24, 25), lambda call: _is_one_row(call) and _is_causal(call)),
    Known(CAPPED, REFERENCE, (23, 24, 25), _shows_capped_scores),
)


def known(target: str, dialect: str, call: Call) -> set[str]:
    """Rows of the table that say that ``target`` may give something else for a legal ``call``."""
    return {
        each.row
        for each in KNOWN
        if each.target == target and dialect in (DIALECTS[n] for n in each.opsets) and each.has_it(call)
    }
