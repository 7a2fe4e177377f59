"""Operators whose caches are rows of a batch: ONNX, ONNX Runtime, transformers."""

from functools import partial
from typing import Final

from kvloom.conform import judging
from kvloom.conform.describe import Argument, Call, Operator, Rule
from kvloom.conform.draw import Draw, ints
from kvloom.conform.drawing import attending as drawing_of_attention
from kvloom.conform.drawing import rows as drawing
from kvloom.conform.operators.words import ADDED, COPIED, FLOAT, WIDE, put, set_to

_TENSOR_SCATTER: Final = Operator(
    "onnx.tensor_scatter",
    "ONNX: TensorScatter-24",
    (
        Argument("past_cache", "B M F | B H M F", COPIED),
        Argument("update", "B S F | B H S F", "=past_cache"),
        Argument("write_indices", "B", "int64", is_optional=True),
        Argument("mode", default="linear", only=("linear", "circular")),
        Argument("axis", default=-2, only=(-2, 1, 2)),
    ),
    {"present_cache": "bits B M F | B H M F"},
    judging.tensor_scattered,
    drawing.draw_tensor_scatter,
    (
        Rule("write_indices", "write_indices is None or "
             "all(0 <= i and (mode == 'circular' or i <= M - S) for i in write_indices)"),
        Rule("update", "S <= M"),
    ),
    (put("write_indices", 77), put("write_indices", -9)),
    count=120,
    domain="",
)  # fmt: skip


def _with_lengths(call: Call, draw: Draw) -> Call:
    """Lengths of rows, which must not be given where there are past keys."""
    return {"nonpad_kv_seqlen": ints([0] * len(call["Q"]))}


def _attention(opset: int) -> Operator:
    """``Attention`` as its document of ``opset`` has it, with inputs of four axes."""
    has_lengths, has_windows = opset >= 24, opset >= 25
    total = "(0 if past_key is None else P) + N"
    lengths = (
        Rule("nonpad_kv_seqlen", "nonpad_kv_seqlen is None or past_key is None"),
        Rule("nonpad_kv_seqlen", "nonpad_kv_seqlen is None or all(0 <= n <= N for n in nonpad_kv_seqlen)"),
        Rule("attn_mask", "attn_mask is None or nonpad_kv_seqlen is None or max(nonpad_kv_seqlen) <= W"),
    )
    windows = (
        Argument("left_window_size", default=-1, low=-1),
        Argument("right_window_size", default=-1, low=-1),
    )
    return Operator(
        "onnx.attention" if opset == 24 else f"onnx.attention_{opset}",
        f"ONNX: Attention-{opset}{', corrected in 1.23' * (opset < 25)}, of inputs with four axes",
        (
            Argument("Q", "B Hq S D", FLOAT),
            Argument("K", "B H N D", "=Q"),
            Argument("V", "B H N Dv", "=Q"),
            Argument("attn_mask", "W | S? W | Hq? S? W | B? Hq? S? W", f"bool {ADDED}", is_optional=True),
            Argument("past_key", "B H P D", "=Q", is_optional=True),
            Argument("past_value", "B H P Dv", "=Q", is_optional=True),
            *([Argument("nonpad_kv_seqlen", "B", "int64", is_optional=True)] if has_lengths else []),
            Argument("is_causal", default=0, only=(0, 1)),
            Argument("scale", is_optional=True),
            Argument("softcap", default=0.0, low=0.0),
            Argument("qk_matmul_output_mode", only=(0, 1, 2, 3), is_optional=True),
            *(windows if has_windows else ()),
        ),
        {
            "Y": "close B Hq S Dv",
            "present_key": "bits B H P+N D",
            "present_value": "bits B H P+N Dv",
            "qk_matmul_output": "close B Hq S P+N | B Hq S N",
        },
        judging.onnx_attended,
        partial(drawing_of_attention.draw_attention, opset),
        (
            Rule("past_key", "(past_key is None) == (past_value is None)"),
            Rule("K", "Hq % H == 0"),
            Rule("attn_mask", f"attn_mask is None or W {'<=' if has_lengths else '=='} {total}"),
            *(lengths if has_lengths else ()),
        ),
        (
            set_to("past_value", None),
            *((put("nonpad_kv_seqlen", 99), ("nonpad_kv_seqlen", _with_lengths)) if has_lengths else ()),
        ),
        count=100,
        domain="",
        opset=opset,
        asked_by={
            "present_key": "past_key",
            "present_value": "past_value",
            "qk_matmul_output": "qk_matmul_output_mode",
        },
    )


_ONNX_ATTENTION: Final = _attention(24)
_SCALES: Final = "1 | 1 1 | H? 1 D? | 1 H? 1 D?"
"""What broadcasts to a cache: one scale, or one for each channel."""
_GROUP_QUERY: Final = Operator(
    "microsoft.group_query_attention",
    "ONNX Runtime: com.microsoft GroupQueryAttention",
    (
        Argument("query", "B S Q", "float32"),
        Argument("key", "B S F", "float32"),
        Argument("value", "B S F", "float32"),
        Argument("past_key", "B H M E", "float32 int8 uint8"),
        Argument("past_value", "B H M E", "=past_key"),
        Argument("seqlens_k", "B", "int32"),
        Argument("total_sequence_length", "", "int32"),
        Argument("k_scale", _SCALES, "float32", is_optional=True),
        Argument("v_scale", _SCALES, "float32", is_optional=True),
        Argument("num_heads", low=1),
        Argument("kv_num_heads", low=1),
        Argument("scale", is_optional=True),
        Argument("softcap", default=0.0, low=0.0),
        Argument("local_window_size", default=-1),
        Argument("k_quant_type", default="NONE", only=("NONE", "PER_TENSOR", "PER_CHANNEL")),
        Argument("v_quant_type", default="NONE", only=("NONE", "PER_TENSOR", "PER_CHANNEL")),
        Argument("kv_cache_bit_width", default=0, only=(0, 8, 4)),
    ),
    {"output": "close B S Q", "present_key": "padded B H M E", "present_value": "padded B H M E"},
    judging.group_attended,
    drawing_of_attention.draw_group_query,
    (
        Rule("kv_num_heads", "kv_num_heads == H and num_heads % kv_num_heads == 0"),
        Rule("query", "Q * kv_num_heads == F * num_heads"),
        Rule("past_key", "E * (2 if kv_cache_bit_width == 4 else 1) * H == F"),
        Rule("k_scale", "(k_scale is None) == (k_quant_type == 'NONE')"),
        Rule("v_scale", "(v_scale is None) == (v_quant_type == 'NONE')"),
        Rule("k_scale", "k_scale is None or k_scale.numel() == (F if k_quant_type == 'PER_CHANNEL' else 1)"),
        Rule("v_scale", "v_scale is None or v_scale.numel() == (F if v_quant_type == 'PER_CHANNEL' else 1)"),
        Rule("seqlens_k", "all(0 <= n < M for n in seqlens_k)"),
        Rule(
            "total_sequence_length",
            "total_sequence_length <= M and "
            "total_sequence_length == (S if S > 1 and max(seqlens_k) < S else max(seqlens_k) + 1)",
        ),
        Rule("seqlens_k", "S == 1 or B == 1 or total_sequence_length == S"),
    ),
    (put("seqlens_k", 99), put("seqlens_k", -3), set_to("k_scale", None), set_to("kv_num_heads", 3)),
    count=130,
    domain="com.microsoft",
    node_inputs=(
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        *[""] * 5,
        "k_scale",
        "v_scale",
    ),
)
_UPDATE: Final = Operator(
    "transformers.cache_update",
    "transformers: Cache.update of one layer, step by step",
    (
        Argument("key_states", "B H _ D", WIDE, is_list=True),
        Argument("value_states", "B H _ Dv", WIDE, is_list=True),
        Argument("kind", default="dynamic", only=("dynamic", "static", "sliding")),
        Argument("max_length", default=0, low=0),
    ),
    {"keys": "bits B H T D", "values": "bits B H T Dv"},
    judging.updated,
    drawing.draw_update,
    count=90,
)


OPERATORS: Final = (
    _TENSOR_SCATTER,
    _attention(23),
    _ONNX_ATTENTION,
    _attention(25),
    _GROUP_QUERY,
    _UPDATE,
)
