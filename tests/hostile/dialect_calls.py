"""Good calls of the dialects' functions."""

from __future__ import annotations

import random
from typing import Any

import torch
from hostile.calls import BLOCK, SLOTS, Call, D, H, floats, ints, ragged, slots

from kvloom.dialects import ascend, onnx, pmx


def quantizer(rng: random.Random, *lead: int) -> dict[str, Any]:
    """Cache, scale and attributes of a PMX call; ``lead`` are the axes before D."""
    bits, group = rng.choice((0, 8, 4)), rng.choice((4, 8))
    stored = {0: torch.float32, 8: torch.int8, 4: torch.uint8}[bits]
    cache = torch.zeros(*lead, D // 2 if bits == 4 else D).to(stored)
    scale = torch.ones(*lead, D // group) if bits else None
    return {
        "cache": cache,
        "scale": scale,
        "quant_bit": bits,
        "quant_group": group,
        "num_layer": 2,
        "layer_idx": 1,
    }


def pmx_static(rng: random.Random) -> Call:
    given = {"current_key": floats(2, 3, H, D), "current_value": floats(2, 3, H, D), "start_pos": 2}
    given |= quantizer(rng, 2, 2, 2, BLOCK, H) | {"num_repeat": rng.choice((1, 2)), "cache_layout": 0}
    return pmx.key_value_cache, given


def pmx_places(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"cachestarts": ints(0, 10), "cache_mode": 0, "page_size": 128}
    return {"cachestarts": ints(0, 8, 16, -1).view(2, 2), "cache_mode": 1, "page_size": BLOCK}


def pmx_dynamic(rng: random.Random) -> Call:
    given = {
        "current_key": floats(3, H, D),
        "current_value": floats(3, H, D),
        **ragged(),
        "start_pos": ints(3, 5),
    }
    given |= {
        "max_seqlen": 2,
        "max_kvlen": 6,
        **quantizer(rng, SLOTS, 2, 2, H),
        "num_repeat": 1,
        "cache_layout": 0,
    }
    return pmx.dynamic_batching.key_value_cache, given | pmx_places(rng)


def pmx_attention(rng: random.Random) -> Call:
    given = {"query": floats(3, 2 * H, D), "current_key": floats(3, H, D), "current_value": floats(3, H, D)}
    given |= ragged() | {"start_pos": ints(3, 5), "decoding_batches": rng.choice((0, 1)), "max_seqlen": 2}
    given |= {
        "max_kvlen": 6,
        **quantizer(rng, SLOTS, 2, 2, H),
        "attn_mask": floats(3, 11),
        "num_heads": 2 * H,
    }
    given |= {"head_dim": D, "num_kv_heads": H, "is_causal": True, "is_alibi": False, "cache_layout": 0}
    return pmx.dynamic_batching.multi_head_cache_attention, given | pmx_places(rng)


def ascend_scatter(rng: random.Random) -> Call:
    def call(**given: Any) -> None:
        names = ("key", "value", "key_cache", "value_cache", "slot_mapping")
        ascend.scatter_pa_kv_cache(*(given[name] for name in names), cache_mode=given["cache_mode"])

    new = {
        "key": floats(3, H, D),
        "value": floats(3, H, D),
        "slot_mapping": slots(rng, 3),
        "cache_mode": "Norm",
    }
    shape = (SLOTS // BLOCK, BLOCK, H, D)
    return call, new | {"key_cache": torch.zeros(shape), "value_cache": torch.zeros(shape)}


def ascend_runs(rng: random.Random) -> Call:
    """The modes that compress, of three tokens in two sequences, padded or not."""
    mode, is_padded = rng.choice((("Alibi", False), ("Rope", False), ("Omni", False), ("None", True)))
    shape = (2, 2, H, D) if is_padded else (3, H, D)
    given = {
        "key": floats(*shape),
        "value": floats(*shape),
        "key_cache": torch.zeros(SLOTS // BLOCK, BLOCK, 1, D),
        "value_cache": torch.zeros(SLOTS // BLOCK, BLOCK, 1, D),
        "slot_mapping": ints(0, 4, 8, 12),
        "compress_lens": ints(1, 1, 1, 0),
        "compress_seq_offset": None if mode == "Alibi" else ints(0, -1, 0, -1),
        "seq_lens": ints(2, 1),
        "scatter_mode": mode,
    }
    return ascend.scatter_pa_kv_cache, given


def ascend_gather(rng: random.Random) -> Call:
    shape = (SLOTS // BLOCK, BLOCK, H, D)
    given = {
        "key_cache": floats(*shape),
        "value_cache": floats(*shape),
        "block_tables": ints(0, 1, 2, -1).view(2, 2),
    }
    given |= {"seq_lens": ints(9, 4), "key": torch.zeros(13, H, D), "value": torch.zeros(13, H, D)}
    return ascend.gather_pa_kv_cache, given | {"seq_offset": ints(0, 0), "cache_mode": "Norm"}


def onnx_attention(rng: random.Random) -> Call:
    """Three tokens of one sequence, by any rule."""
    rule, width = rng.choice(("linear", "gated", "delta", "gated_delta")), rng.choice((H, H * D))
    given = {"query": floats(1, 3, 2 * H * D), "key": floats(1, 3, H * D), "value": floats(1, 3, H * 2)}
    given |= {
        "past_state": rng.choice((None, floats(1, H, D, 2))),
        "decay": -floats(1, 3, width).abs() if "gated" in rule else None,
        "beta": floats(1, 3, rng.choice((H, 1))) if "delta" in rule else None,
    }
    given |= {"q_num_heads": 2 * H, "kv_num_heads": H, "scale": 0.5, "update_rule": rule}
    return onnx.linear_attention, given | {"chunk_size": rng.choice((1, 2, 64))}


def onnx_conv(rng: random.Random) -> Call:
    given = {"input": floats(2, 3, 5), "weight": floats(3, 1, 4), "activation": rng.choice(("silu", "none"))}
    optional = {"bias": floats(3), "past_state": floats(2, 3, 3)}
    return onnx.causal_conv_with_state, given | {n: rng.choice((None, x)) for n, x in optional.items()}


DIALECTS = (pmx_static, pmx_dynamic, pmx_attention, ascend_scatter, ascend_runs, ascend_gather,
            onnx_attention, onnx_conv)  # fmt: skip
