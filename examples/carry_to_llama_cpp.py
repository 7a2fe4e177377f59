"""A prompt that is computed here and answered by llama.cpp, whose own file is answered here again.

    python examples/carry_to_llama_cpp.py

Needs transformers; the last two lines need llama-cpp-python and gguf, too. Prints:

    8 tokens, 41,236 bytes for llama_state_seq_load_file
    first layer off by 0.0e+00 at most
    from the file: 'import os ...
    from llama.cpp, which took 41,236 bytes: 'import os ...
    from llama.cpp's file of 16 tokens more: 'import os ...
"""

import ctypes
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvloom import KVCache, load_model
from kvloom.carry import expect_first_layer, from_cache, geometry_of, read_llama, to_cache, write_llama
from kvloom.models import bundled_model_path

PROMPT = "import os\n\ndef main():\n"
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}  # fmt: skip


def write_gguf(model: Any, target: Path) -> None:
    """The bundled model for llama.cpp, in float32; text stays with transformers' tokenizer."""
    import gguf

    c, file = model.config, gguf.GGUFWriter(str(target), "llama")
    file.add_block_count(c.num_hidden_layers)
    file.add_context_length(512)
    file.add_embedding_length(c.hidden_size)
    file.add_feed_forward_length(c.intermediate_size)
    file.add_head_count(c.num_attention_heads)
    file.add_head_count_kv(c.num_key_value_heads)
    file.add_layer_norm_rms_eps(c.rms_norm_eps)
    file.add_rope_freq_base(10_000.0)
    file.add_vocab_size(c.vocab_size)
    file.add_tokenizer_model("llama")
    file.add_token_list([f"<{i}>".encode() for i in range(c.vocab_size)])
    file.add_token_scores([0.0] * c.vocab_size)
    file.add_token_types([1] * c.vocab_size)
    state = model.state_dict()
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for i in range(c.num_hidden_layers):
        tensors |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for theirs, ours in NAMES.items()}
    for ours, theirs in tensors.items():
        w = state[f"{theirs}.weight"].float()
        if ours.endswith(("attn_q", "attn_k")):  # llama.cpp turns adjacent elements, transformers halves
            w = (
                w.unflatten(0, (-1, 2, w.shape[1] // c.num_attention_heads // 2))
                .transpose(1, 2)
                .flatten(0, 2)
            )
        file.add_tensor(f"{ours}.weight", w.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
ids = tokenizer(PROMPT, return_tensors="pt").input_ids
cache, held = KVCache.for_model(model), ids[0, :-1].tolist()  # the target computes the last token
with torch.no_grad():
    model(ids[:, :-1], cache=cache)

folder = Path(tempfile.mkdtemp())
path, geometry = folder / "prompt.bin", geometry_of(model)
write_llama(from_cache(cache, model, held), path, geometry)
print(f"{len(held)} tokens, {path.stat().st_size:,} bytes for llama_state_seq_load_file")

carried = read_llama(path, geometry)  # as llama_state_seq_save_file would have written it
report = expect_first_layer(carried, model)
print(f"first layer off by {max(report.worst_key, report.worst_value):.1e} at most")
out = model.generate(ids, cache=to_cache(carried, model), max_new_tokens=16, do_sample=False)
print(f"from the file: {tokenizer.decode(out[0])!r}")

if find_spec("llama_cpp") and find_spec("gguf"):
    import llama_cpp as cpp

    write_gguf(model, folder / "bundled.gguf")
    llama = cpp.Llama(
        str(folder / "bundled.gguf"), n_ctx=512, type_k=0, type_v=0, flash_attn=True, verbose=False
    )
    room, count = (ctypes.c_int32 * 512)(), ctypes.c_size_t()
    taken = cpp.llama_state_seq_load_file(llama.ctx, str(path).encode(), 0, room, 512, ctypes.byref(count))
    llama.n_tokens, tokens = len(held), ids[0].tolist()
    for _ in range(16):
        llama.eval(tokens[-1:])
        tokens.append(llama.sample(temp=0.0))
    print(f"from llama.cpp, which took {taken:,} bytes: {tokenizer.decode(tokens)!r}")

    said = (ctypes.c_int32 * len(tokens))(*tokens)  # all but the last one are held
    cpp.llama_state_seq_save_file(llama.ctx, str(folder / "back.bin").encode(), 0, said, len(tokens) - 1)
    back = to_cache(read_llama(folder / "back.bin", geometry), model)
    out = model.generate(torch.tensor([tokens]), cache=back, max_new_tokens=16, do_sample=False)
    print(f"from llama.cpp's file of 16 tokens more: {tokenizer.decode(out[0])!r}")
