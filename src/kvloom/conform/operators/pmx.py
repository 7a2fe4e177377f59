"""The PMX operators."""

from functools import partial
from typing import Final

from kvloom.conform import judging
from kvloom.conform.describe import Argument, Operator, Rule
from kvloom.conform.drawing import pmx as drawing
from kvloom.conform.operators.words import FLOAT, STORED, WIDE, put, set_to
from kvloom.conform.oracles.pmx import DYNAMIC_AXES, FUSED_AXES, STATIC_AXES


def _cache_attributes(layouts: int, repeat: bool) -> tuple[Argument, ...]:
    return (
        Argument("num_layer", default=1, low=1),
        Argument("layer_idx", default=0, low=0),
        Argument("quant_bit", default=0, only=(0, 8, 4)),
        Argument("quant_group", default=8, low=1),
        *([Argument("num_repeat", default=1, low=1)] if repeat else []),
        Argument("cache_layout", default=0, only=tuple(range(layouts))),
    )


def _shaped(axes: dict[int, str], last: str) -> dict[int, str]:
    return {n: " ".join((*(a if a != "K" else "2" for a in text[:-1]), last)) for n, text in axes.items()}


def _pmx_rules(length: str) -> tuple[Rule, ...]:
    return (
        Rule("cache", "E == (D // 2 if quant_bit == 4 else D)"),
        Rule("num_layer", "num_layer == L"),
        Rule("layer_idx", "layer_idx < num_layer"),
        Rule("scale", "quant_bit == 0 or scale is not None"),
        Rule("quant_group", "quant_bit == 0 or D == G * quant_group"),
        Rule("quant_group", "quant_bit != 4 or quant_group % 2 == 0"),
        *((Rule("start_pos", length),) if length else ()),
    )


def _pmx_new(shape: str, dtypes: str) -> tuple[Argument, ...]:
    return (Argument("current_key", shape, dtypes), Argument("current_value", shape, "=current_key"))


def _pmx_stored(axes: dict[int, str]) -> tuple[Argument, ...]:
    return (
        Argument("cache", _shaped(axes, "E"), STORED, "cache_layout", is_updated=True),
        Argument("scale", _shaped(axes, "G"), WIDE, "cache_layout", is_updated=True, is_optional=True),
    )


def _ragged() -> tuple[Argument, ...]:
    return (
        Argument("seqstarts", "B+1", "int64"),
        Argument("kvstarts", "B+1", "int64"),
        Argument("cachestarts", "N | B P", "int64"),
        Argument("start_pos", "B", "int64"),
    )


_RAGGED_RULES: Final = (
    Rule("seqstarts", "seqstarts[0] == 0 and seqstarts == sorted(seqstarts) and seqstarts[-1] == T"),
    Rule("kvstarts", "kvstarts[0] == 0 and kvstarts == sorted(kvstarts)"),
    Rule("start_pos", "min(start_pos) >= 0"),
    Rule(
        "kvstarts",
        "all(kvstarts[b + 1] - kvstarts[b] == start_pos[b] + seqstarts[b + 1] - seqstarts[b] "
        "for b in range(B))",
    ),
    Rule(
        "cachestarts",
        "cache_mode == 1 or all(cachestarts[b] >= 0 and cachestarts[b] + kvstarts[b + 1] - kvstarts[b] <= M "
        "for b in range(B))",
    ),
)
_RAGGED_SPOILS: Final = (
    put("seqstarts", 1),
    put("seqstarts", 1 << 40, -1),
    put("kvstarts", 3),
    put("kvstarts", 99, -1),
    put("start_pos", -1),
    put("start_pos", 50),
    put("cachestarts", 1 << 40),
    set_to("layer_idx", 7),
    set_to("num_layer", 9),
)
_TABLES: Final = Rule(
    "cachestarts",
    "cache_mode == 0 or all(0 <= cachestarts[b][t // page_size] <= M - 1 - t % page_size for b in range(B) "
    "for t in range(kvstarts[b + 1] - kvstarts[b]))",
)
_TOKENS: Final = Rule(
    "cachestarts", "cache_mode == 0 or all(0 <= slot < M for slot in cachestarts[: kvstarts[-1]])"
)
_SCALARS: Final = (Argument("max_seqlen", low=0, is_input=True), Argument("max_kvlen", low=0, is_input=True))


def _fused(spec: str) -> Operator:
    page = (Argument("page_size", default=128, low=1), Argument("is_alibi", default=0, only=(0, 1)))
    return Operator(
        f"{spec}.dynamic_batching.multi_head_cache_attention",
        "OpenPPL PMX: dynamic_batching.MultiHeadCacheAttention"
        + (", revision of 2023-09-01" if spec == "pmx" else ", the OPMX revision"),
        (
            Argument("query", "T Hq D", FLOAT),
            *_pmx_new("T H D", FLOAT),
            *_ragged(),
            Argument("decoding_batches", low=0, is_input=True),
            *_SCALARS,
            *_pmx_stored(_slots_as_m(FUSED_AXES[spec])),
            Argument("attn_mask", "T W | Hq T W", FLOAT, is_optional=True),
            Argument("num_heads", low=1),
            Argument("head_dim", low=1),
            Argument("is_causal", only=(0, 1)),
            Argument("num_kv_heads", default=0, low=0),
            *_cache_attributes(4, repeat=False),
            Argument("cache_mode", default=0, only=(0, 1)),
            *(page if spec == "opmx" else ()),
        ),
        {"attn_output": "close T Hq D"},
        judging.attended(spec),
        partial(drawing.draw_fused, spec),
        (
            *_pmx_rules(""),
            *_RAGGED_RULES,
            _TABLES if spec == "opmx" else _TOKENS,
            Rule("num_heads", "num_heads == Hq and head_dim == D and Hq % H == 0"),
            Rule("num_kv_heads", "(num_kv_heads or num_heads) == H"),
        ),
        (*_RAGGED_SPOILS, set_to("num_heads", 5), set_to("head_dim", 7)),
        count=110,
        domain=f"{spec}.dynamic_batching",
        compared={"scale": "values", "cache": "values"},
    )


def _slots_as_m(axes: dict[int, str]) -> dict[int, str]:
    """Rename the axis of slots to M, since T counts new tokens."""
    return {n: text.replace("T", "M") for n, text in axes.items()}


_STATIC: Final = Operator(
    "pmx.key_value_cache",
    "OpenPPL PMX: KeyValueCache",
    (
        *_pmx_new("B S H D", f"{FLOAT} int8"),
        Argument("start_pos", low=0, is_input=True),
        *_pmx_stored({n: x.replace("B", "N").replace("S", "M") for n, x in STATIC_AXES.items()}),
        *_cache_attributes(2, repeat=True),
    ),
    dict.fromkeys(("key", "value"), "values B start_pos+S H*num_repeat D"),
    judging.stored,
    drawing.draw_static,
    (*_pmx_rules("start_pos + S <= M"), Rule("current_key", "B <= N")),
    (
        set_to("start_pos", 90),
        set_to("layer_idx", 7),
        set_to("num_layer", 9),
        set_to("quant_group", 3),
        set_to("scale", None),
    ),
    count=170,
    domain="pmx",
    compared={"scale": "values", "cache": "values"},
)
_DYNAMIC: Final = Operator(
    "pmx.dynamic_batching.key_value_cache",
    "OpenPPL PMX: dynamic_batching.KeyValueCache",
    (
        *_pmx_new("T H D", f"{FLOAT} int8"),
        *_ragged(),
        *_SCALARS,
        *_pmx_stored(_slots_as_m(DYNAMIC_AXES)),
        *_cache_attributes(4, repeat=True),
        Argument("cache_mode", default=0, only=(0, 1)),
        Argument("page_size", default=128, low=1),
    ),
    dict.fromkeys(("key", "value"), "values kvstarts[B] H*num_repeat D"),
    judging.stored_dynamic,
    drawing.draw_dynamic,
    (*_pmx_rules(""), *_RAGGED_RULES, _TABLES),
    (*_RAGGED_SPOILS, set_to("scale", None)),
    count=240,
    domain="pmx.dynamic_batching",
    compared={"scale": "values", "cache": "values"},
)

OPERATORS: Final = (_STATIC, _DYNAMIC, _fused("pmx"), _fused("opmx"))
