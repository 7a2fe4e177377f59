"""Operators that write and read pages: Ascend, ONNX Runtime's PagedAttention, vLLM, FlashInfer."""

from typing import Final

from kvloom.conform import judging
from kvloom.conform.describe import Argument, Operator, Rule
from kvloom.conform.drawing import paged as drawing
from kvloom.conform.operators.words import COPIED, INDEX, WIDE, put, set_to

_SLOTS_INSIDE: Final = "all(slot < {0} for slot in slot_mapping)"
_SCATTER: Final = Operator(
    "ascend.scatter_pa_kv_cache",
    "CANN: ScatterPaKvCache",
    (
        Argument("key", "T H Dk | B S H Dk", COPIED),
        Argument("value", "T H Dv | B S H Dv", "=key", is_optional=True),
        Argument("key_cache", "nb bs Hc Ck", "=key", is_updated=True),
        Argument("value_cache", "nb Xs Hv Cv", "=value", is_updated=True, is_optional=True),
        Argument("slot_mapping", "N | _ _", INDEX),
        Argument("compress_lens", "N | B H", "=slot_mapping", is_optional=True),
        Argument("compress_seq_offset", "N", "=slot_mapping", is_optional=True),
        Argument("seq_lens", "Bs", "=slot_mapping", is_optional=True),
        Argument("cache_mode", default="Norm", only=("Norm", "PA_NZ")),
        Argument("scatter_mode", default="None", only=("None", "Nct", "Alibi", "Rope", "Omni")),
        Argument("strides", is_optional=True, default=()),
        Argument("offsets", is_optional=True, default=()),
    ),
    {},
    judging.scattered,
    drawing.draw_scatter,
    (
        Rule("value", "(value is None) == (value_cache is None)"),
        Rule("cache_mode", "cache_mode == 'Norm' or scatter_mode == 'None'"),
        Rule("key_cache", "cache_mode == 'PA_NZ' or compress_lens is not None or (Hc == H and Ck == Dk)"),
        Rule("key_cache", "cache_mode == 'Norm' or (bs * Ck == H * Dk)"),
        Rule("slot_mapping", "compress_lens is not None or N == T"),
        Rule("slot_mapping", "compress_lens is not None or cache_mode == 'PA_NZ' or "
             + _SLOTS_INSIDE.format("nb * bs")),
        Rule("scatter_mode", "scatter_mode not in ('Alibi', 'Rope', 'Omni') or compress_lens is not None"),
    ),
    (
        put("slot_mapping", 1 << 20),
        set_to("value", None),
        set_to("value_cache", None),
        set_to("compress_lens", None),
        set_to("scatter_mode", "Rope"),
    ),
    count=230,
)  # fmt: skip
_GATHER: Final = Operator(
    "ascend.gather_pa_kv_cache",
    "CANN: GatherPaKvCache",
    (
        Argument("key_cache", "nb X Y Z", COPIED),
        Argument("value_cache", "nb X2 Y2 Z2", COPIED),
        Argument("block_tables", "B C", INDEX),
        Argument("seq_lens", "Bs", INDEX),
        Argument("key", "N F | N H Dk", "=key_cache", is_updated=True),
        Argument("value", "N Fv | N H Dv", "=value_cache", is_updated=True),
        Argument("seq_offset", "B", INDEX, is_optional=True),
        Argument("cache_mode", default="Norm", only=("Norm", "PA_NZ")),
        Argument("is_seq_lens_cumsum", default=False, only=(False, True)),
    ),
    {},
    judging.gathered,
    drawing.draw_gather,
    (
        Rule("seq_lens", "Bs == (B + 1 if is_seq_lens_cumsum else B)"),
        Rule("seq_lens", "min(seq_lens) >= 0 and (not is_seq_lens_cumsum or seq_lens[0] == 0)"),
        Rule("seq_offset", "seq_offset is None or min(seq_offset) >= 0"),
    ),
    (put("seq_lens", -1), put("seq_offset", -1)),
    count=110,
)
_PAGED_WRITE: Final = Operator(
    "microsoft.paged_attention",
    "ONNX Runtime: com.microsoft PagedAttention, what it writes",
    (
        Argument("key", "T F", "float16 bfloat16"),
        Argument("value", "T F", "=key"),
        Argument("key_cache", "nb bs H D", "=key", is_updated=True),
        Argument("value_cache", "nb bs H D", "=key", is_updated=True),
        Argument("cumulative_sequence_length", "B+1", "int32"),
        Argument("past_seqlens", "B", "int32"),
        Argument("block_table", "B C", "int32"),
    ),
    {},
    judging.paged_written,
    drawing.draw_paged_write,
    (
        Rule("key", "F == H * D"),
        Rule("cumulative_sequence_length", "cumulative_sequence_length[0] == 0 and "
             "cumulative_sequence_length == sorted(cumulative_sequence_length) and "
             "cumulative_sequence_length[-1] == T"),
        Rule("past_seqlens", "all(n >= 0 for n in past_seqlens)"),
        Rule("block_table", "all(0 <= block_table[b][(past_seqlens[b] + i) // bs] < nb for b in range(B) for "
             "i in range(cumulative_sequence_length[b + 1] - cumulative_sequence_length[b]) if "
             "(past_seqlens[b] + i) // bs < C)"),
        Rule("past_seqlens", "all(past_seqlens[b] + cumulative_sequence_length[b + 1] - "
             "cumulative_sequence_length[b] <= C * bs for b in range(B))"),
    ),
    (put("cumulative_sequence_length", 1), put("cumulative_sequence_length", 99, -1),
     put("past_seqlens", -1), put("past_seqlens", 999)),
    count=80,
)  # fmt: skip
_RESHAPE: Final = Operator(
    "vllm.reshape_and_cache",
    "vLLM: reshape_and_cache, kv_cache_dtype auto",
    (
        Argument("key", "T H D", WIDE),
        Argument("value", "T H D", "=key"),
        Argument("key_cache", "nb H Dx bs x", "=key", is_updated=True),
        Argument("value_cache", "nb H D bs", "=key", is_updated=True),
        Argument("slot_mapping", "T", "int64"),
    ),
    {},
    judging.reshaped,
    drawing.draw_reshape,
    (Rule("key_cache", "Dx * x == D"), Rule("slot_mapping", _SLOTS_INSIDE.format("nb * bs"))),
    (put("slot_mapping", 1 << 20),),
    count=80,
)
_RESHAPE_FLASH: Final = Operator(
    "vllm.reshape_and_cache_flash",
    "vLLM: reshape_and_cache_flash, kv_cache_dtype auto",
    (
        Argument("key", "T H D", WIDE),
        Argument("value", "T H D", "=key"),
        Argument("key_cache", "nb bs H D", "=key", is_updated=True),
        Argument("value_cache", "nb bs H D", "=key", is_updated=True),
        Argument("slot_mapping", "N", "int64"),
    ),
    {},
    judging.reshaped_flash,
    drawing.draw_reshape_flash,
    (Rule("slot_mapping", "N <= T"), Rule("slot_mapping", _SLOTS_INSIDE.format("nb * bs"))),
    (put("slot_mapping", 1 << 20),),
    count=90,
)
_COPY_BLOCKS: Final = Operator(
    "vllm.copy_blocks",
    "vLLM: copy_blocks",
    (
        Argument("key_caches", "nb bs H D", COPIED, is_updated=True, is_list=True),
        Argument("value_caches", "nb bs H D", COPIED, is_updated=True, is_list=True),
        Argument("block_mapping", "N 2", "int64"),
    ),
    {},
    judging.blocks_copied,
    drawing.draw_copy_blocks,
    (
        Rule("key_caches", "len(key_caches) == len(value_caches)"),
        Rule("block_mapping", "all(0 <= block < nb for pair in block_mapping for block in pair)"),
    ),
    (put("block_mapping", 99), put("block_mapping", -1),
     ("value_caches", lambda call, draw: {"value_caches": call["value_caches"][1:]})),
    count=60,
)  # fmt: skip
_APPEND: Final = Operator(
    "flashinfer.append_paged_kv_cache",
    "FlashInfer: append_paged_kv_cache",
    (
        Argument("append_key", "T H D", "float16 bfloat16"),
        Argument("append_value", "T H D", "=append_key"),
        Argument("batch_indices", "T", "int32"),
        Argument("positions", "T", "int32"),
        Argument(
            "paged_kv_cache",
            {"NHD": "P 2 S H D", "HND": "P 2 H S D"},
            "=append_key",
            "kv_layout",
            is_updated=True,
        ),
        Argument("kv_indices", "N", "int32"),
        Argument("kv_indptr", "B+1", "int32"),
        Argument("kv_last_page_len", "B", "int32"),
        Argument("kv_layout", default="NHD", only=("NHD", "HND")),
    ),
    {},
    judging.appended,
    drawing.draw_append,
    (
        Rule("kv_indices", "all(0 <= page < P for page in kv_indices)"),
        Rule("kv_indptr", "kv_indptr[0] == 0 and kv_indptr == sorted(kv_indptr) and kv_indptr[-1] <= N"),
        Rule("batch_indices", "all(0 <= b < B for b in batch_indices)"),
        Rule("positions", "all(0 <= p < S * (kv_indptr[b + 1] - kv_indptr[b]) for b, p in "
             "zip(batch_indices, positions))"),
    ),
    (put("kv_indices", 99), put("batch_indices", 9), put("positions", 99), put("positions", -1),
     put("kv_indptr", 1)),
    count=90,
)  # fmt: skip

OPERATORS: Final = (_SCATTER, _GATHER, _PAGED_WRITE, _RESHAPE, _RESHAPE_FLASH, _COPY_BLOCKS, _APPEND)
