"""Operators whose caches are rows of a batch: ONNX, ONNX Runtime, transformers."""

from typing import Final

from kvloom.conform import judging
from kvloom.conform.describe import Argument, Operator, Rule
from kvloom.conform.drawing import rows as drawing
from kvloom.conform.operators.words import COPIED, FLOAT, WIDE, put, set_to

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
        Rule("write_indices", "write_indices is None or mode == 'circular' or "
             "all(0 <= i <= M - S for i in write_indices)"),
        Rule("update", "S <= M"),
    ),
    (put("write_indices", 77), put("write_indices", -9)),
    count=120,
    domain="",
)  # fmt: skip
_ONNX_ATTENTION: Final = Operator(
    "onnx.attention",
    "ONNX: Attention-24, corrected in 1.23",
    (
        Argument("Q", "B Hq S D", FLOAT),
        Argument("K", "B H N D", "=Q"),
        Argument("V", "B H N Dv", "=Q"),
        Argument("attn_mask", "S W | _ S W | _ _ S W", "=Q", is_optional=True),
        Argument("past_key", "B H P D", "=Q", is_optional=True),
        Argument("past_value", "B H P Dv", "=Q", is_optional=True),
        Argument("nonpad_kv_seqlen", "B", "int64", is_optional=True),
        Argument("is_causal", default=0, only=(0, 1)),
        Argument("scale", is_optional=True),
        Argument("softcap", default=0.0, low=0.0),
    ),
    {"Y": "close B Hq S Dv", "present_key": "bits B H P+N D", "present_value": "bits B H P+N Dv"},
    judging.onnx_attended,
    drawing.draw_attention,
    (
        Rule("past_key", "(past_key is None) == (past_value is None)"),
        Rule("K", "Hq % H == 0"),
        Rule("nonpad_kv_seqlen", "nonpad_kv_seqlen is None or max(nonpad_kv_seqlen) <= N"),
    ),
    (put("nonpad_kv_seqlen", 99), set_to("past_value", None)),
    count=100,
    domain="",
)
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
        Argument("k_scale", "1 | 1 H 1 D", "float32", is_optional=True),
        Argument("v_scale", "1 | 1 H 1 D", "float32", is_optional=True),
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
    drawing.draw_group_query,
    (
        Rule("kv_num_heads", "kv_num_heads == H and num_heads % kv_num_heads == 0"),
        Rule("query", "Q * kv_num_heads == F * num_heads"),
        Rule("past_key", "E * (2 if kv_cache_bit_width == 4 else 1) * H == F"),
        Rule("k_scale", "(k_scale is None) == (k_quant_type == 'NONE')"),
        Rule("v_scale", "(v_scale is None) == (v_quant_type == 'NONE')"),
        Rule("seqlens_k", "all(0 <= n < M for n in seqlens_k)"),
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


OPERATORS: Final = (_TENSOR_SCATTER, _ONNX_ATTENTION, _GROUP_QUERY, _UPDATE)
