"""A model's folder as GGUF in float32, for nine architectures; run where gguf is installed.

What llama.cpp's own converter does: rows of the projections of queries and keys of a llama change places
within each head, so that its RoPE may turn adjacent pairs; norms of Gemma have 1 added; the expansion of
latents is split and transposed.
"""

import gguf
import numpy as np
from common import request, weights_of

FFN = {f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")}
NORMS = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
QKV = {f"self_attn.{x}_proj.{y}": f"attn_{x}.{y}" for x in "qkv" for y in ("weight", "bias")}
PLAIN = {**NORMS, **QKV, **FFN, "self_attn.o_proj.weight": "attn_output.weight"}
GEMMA = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    **QKV,
    **FFN,
    "self_attn.o_proj.weight": "attn_output.weight",
}
DEEPSEEK = {
    **NORMS,
    **FFN,
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
}
GPT2 = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
BOTH = ("weight", "bias")
NORMS_WITH_BIAS = {
    f"{name}.{x}": f"{ours}.{x}"
    for name, ours in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"))
    for x in BOTH
}
STABLELM = {**NORMS_WITH_BIAS, **QKV, **FFN, "self_attn.o_proj.weight": "attn_output.weight"}
PHI = {
    **NORMS_WITH_BIAS,
    **QKV,
    **{f"self_attn.dense.{x}": f"attn_output.{x}" for x in BOTH},
    **{f"mlp.fc{i}.{x}": f"ffn_{name}.{x}" for i, name in ((1, "up"), (2, "down")) for x in BOTH},
}
NEOX = {
    **NORMS_WITH_BIAS,
    **{f"attention.query_key_value.{x}": f"attn_qkv.{x}" for x in BOTH},
    **{f"attention.dense.{x}": f"attn_output.{x}" for x in BOTH},
    **{f"mlp.dense_h_to_4h.{x}": f"ffn_up.{x}" for x in BOTH},
    **{f"mlp.dense_4h_to_h.{x}": f"ffn_down.{x}" for x in BOTH},
}
GLM = {
    **QKV,
    "input_layernorm.weight": "attn_norm.weight",
    "post_self_attn_layernorm.weight": "post_attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
WITH_BIAS = ("phi2", "stablelm", "gptneox")
"""Architectures whose norms have biases."""
OUTSIDE = (
    {"model.embed_tokens": "token_embd", "lm_head": "output"}
    | {
        f"{at}.{name}": ours
        for at, name, ours in (
            ("model", "norm", "output_norm"),
            ("model", "final_layernorm", "output_norm"),
            ("gpt_neox", "final_layer_norm", "output_norm"),
            ("gpt_neox", "embed_in", "token_embd"),
        )
    }
    | {"embed_out": "output"}
)
ARCHITECTURES = {
    "llama": "llama",
    "phi": "phi2",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
    "glm4": "glm4",
    "qwen2": "qwen2",
    "gemma3_text": "gemma3",
    "deepseek_v3": "deepseek2",
    "gpt2": "gpt2",
}


def adjacent(w, heads):
    """Rows of each head so that halves become adjacent."""
    rows = w.shape[0] // heads
    order = [h * rows + i // 2 + (i % 2) * rows // 2 for h in range(heads) for i in range(rows)]
    return w[order]


def theta(config):
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def scaling(w, rope):
    """YaRN, if a model has it."""
    if rope.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def sizes(w, c, arch):
    """Sizes that llama.cpp reads."""
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // heads
    kv_heads = c.get("num_key_value_heads", heads)
    key = value = rope = dim
    if arch == "deepseek2":
        kv_heads, rope = 1, c["qk_rope_head_dim"]
        key, value = c["kv_lora_rank"] + rope, c["kv_lora_rank"]
        w.add_leading_dense_block_count(c["num_hidden_layers"])
        w.add_kv_lora_rank(c["kv_lora_rank"])
        w.add_q_lora_rank(c["q_lora_rank"])
        w.add_key_length_mla(c["qk_nope_head_dim"] + rope)
        w.add_value_length_mla(c["v_head_dim"])
        w.add_expert_count(c["n_routed_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_shared_count(1)
        w.add_expert_feed_forward_length(64)
        w.add_expert_weights_scale(1.0)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(key)
    w.add_value_length(value)
    if arch == "gpt2":
        w.add_layer_norm_eps(c["layer_norm_epsilon"])
        return
    if arch in WITH_BIAS:
        w.add_layer_norm_eps(c.get("layer_norm_eps", 1e-5))
        w.add_parallel_residual(c.get("use_parallel_residual", True))
    else:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    said = c.get("rope_parameters") or {}
    w.add_rope_dimension_count(int(rope * said.get("partial_rotary_factor", 1.0)))
    scaling(w, said)
    w.add_rope_freq_base(theta(c))
    if arch == "gemma3":
        w.add_sliding_window(c["sliding_window"])


def named(c, s, arch):
    """Tensors that only change their names; queries, keys and values of GPT-NeoX are apart by heads there."""
    for theirs, ours in OUTSIDE.items():
        for x in BOTH:
            if f"{theirs}.{x}" in s:
                yield f"{ours}.{x}", s[f"{theirs}.{x}"]
    names = {"phi2": PHI, "stablelm": STABLELM, "gptneox": NEOX, "glm4": GLM}[arch]
    at = "gpt_neox" if arch == "gptneox" else "model"
    for i in range(c["num_hidden_layers"]):
        for theirs, ours in names.items():
            w = s.get(f"{at}.layers.{i}.{theirs}")
            if w is None:
                continue
            if "query_key_value" in theirs:
                parts = w.reshape(c["num_attention_heads"], 3, -1, *w.shape[1:])
                w = np.moveaxis(parts, 1, 0).reshape(w.shape)
            yield f"blk.{i}.{ours}", w


def tensors(c, s, arch):
    """Tensors by llama.cpp's names."""
    layers = c["num_hidden_layers"]
    if arch == "gpt2":
        s = {k.removeprefix("transformer."): v for k, v in s.items()}
        yield "token_embd.weight", s["wte.weight"]
        yield "position_embd.weight", s["wpe.weight"]
        yield "output.weight", s["wte.weight"]
        for x in ("weight", "bias"):
            yield f"output_norm.{x}", s[f"ln_f.{x}"]
        for i in range(layers):
            for theirs, ours in GPT2.items():
                w = s[f"h.{i}.{theirs}.weight"]
                yield f"blk.{i}.{ours}.weight", w if w.ndim == 1 else w.T
                yield f"blk.{i}.{ours}.bias", s[f"h.{i}.{theirs}.bias"]
        return
    if arch in (*WITH_BIAS, "glm4"):
        yield from named(c, s, arch)
        return
    one = 1.0 if arch == "gemma3" else 0.0
    yield "token_embd.weight", s["model.embed_tokens.weight"]
    yield "output_norm.weight", s["model.norm.weight"] + one
    if "lm_head.weight" in s:
        yield "output.weight", s["lm_head.weight"]
    elif arch == "deepseek2":
        yield "output.weight", s["model.embed_tokens.weight"]
    names = {"gemma3": GEMMA, "deepseek2": DEEPSEEK}.get(arch, PLAIN)
    for i in range(layers):
        for theirs, ours in names.items():
            w = s.get(f"model.layers.{i}.{theirs}")
            if w is None:
                continue
            w = w + one if "norm" in theirs else w
            if arch == "llama" and ours in ("attn_q.weight", "attn_k.weight"):
                w = adjacent(w, c["num_attention_heads" if "_q" in ours else "num_key_value_heads"])
            yield f"blk.{i}.{ours}", w
        if arch == "deepseek2":
            nope, rank = c["qk_nope_head_dim"], c["kv_lora_rank"]
            b = s[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
            b = b.reshape(c["num_attention_heads"], -1, rank)
            yield f"blk.{i}.attn_k_b.weight", b[:, :nope].transpose(0, 2, 1)
            yield f"blk.{i}.attn_v_b.weight", b[:, nope:]


def main():
    wanted = request()
    config, weights = weights_of(wanted["folder"])
    arch = ARCHITECTURES[config["model_type"]]
    w = gguf.GGUFWriter(wanted["folder"] + "/model.gguf", arch)
    config = {
        "num_hidden_layers": config.get("n_layer"), "hidden_size": config.get("n_embd"),
        "num_attention_heads": config.get("n_head"), **config,
    }  # fmt: skip
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * config["hidden_size"]
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(1024 if arch != "gpt2" else config["n_positions"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(inner)
    sizes(w, config, arch)
    count = config["vocab_size"]
    w.add_vocab_size(count)
    w.add_file_type(0)
    w.add_tokenizer_model("llama")  # ids alone are used
    w.add_token_list([f"<{i}>".encode() for i in range(count)])
    w.add_token_scores([0.0] * count)
    w.add_token_types([1] * count)
    for add, token in ((w.add_bos_token_id, 0), (w.add_eos_token_id, 1), (w.add_unk_token_id, 2)):
        add(token)
    state = {k: weights[k] for k in weights.files}
    for name, x in tensors(config, state, arch):
        w.add_tensor(name, np.ascontiguousarray(x, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


main()
