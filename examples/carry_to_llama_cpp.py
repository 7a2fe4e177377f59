"""A prompt that is computed here and answered by llama.cpp, or by this library from llama.cpp's own file.

    python examples/carry_to_llama_cpp.py

Needs transformers; llama-cpp-python only if GGUF in the environment is the bundled model in float32. Prints:

    8 tokens, 41,236 bytes for llama_state_seq_load_file
    first layer off by 0.0e+00 at most
    from the file: 'import os ...
"""

import os
import tempfile
from pathlib import Path

import torch

from kvloom import KVCache, load_model
from kvloom.carry import expect_first_layer, from_cache, geometry_of, read_llama, to_cache, write_llama
from kvloom.models import bundled_model_path

PROMPT = "import os\n\ndef main():\n"
model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
ids = tokenizer(PROMPT, return_tensors="pt").input_ids
cache, held = KVCache.for_model(model), ids[0, :-1].tolist()  # the target computes the last token
with torch.no_grad():
    model(ids[:, :-1], cache=cache)

path, geometry = Path(tempfile.mkdtemp()) / "prompt.bin", geometry_of(model)
write_llama(from_cache(cache, model, held), path, geometry)
print(f"{len(held)} tokens, {path.stat().st_size:,} bytes for llama_state_seq_load_file")

carried = read_llama(path, geometry)  # as llama_state_seq_save_file would have written it
report = expect_first_layer(carried, model)
print(f"first layer off by {max(report.worst_key, report.worst_value):.1e} at most")
out = model.generate(ids, cache=to_cache(carried, model), max_new_tokens=16, do_sample=False)
print(f"from the file: {tokenizer.decode(out[0])!r}")

if "GGUF" in os.environ:
    import ctypes

    import llama_cpp

    llama = llama_cpp.Llama(os.environ["GGUF"], n_ctx=512, type_k=0, type_v=0, flash_attn=True, verbose=False)
    room, count = (ctypes.c_int32 * 512)(), ctypes.c_size_t()
    name = str(path).encode()
    taken = llama_cpp.llama_state_seq_load_file(llama.ctx, name, 0, room, 512, ctypes.byref(count))
    llama.n_tokens, tokens, last = len(held), [], int(ids[0, -1])
    for _ in range(16):
        llama.eval([last])
        last = llama.sample(temp=0.0)
        tokens.append(last)
    print(f"from llama.cpp, which took {taken:,} bytes: {PROMPT + tokenizer.decode(tokens)!r}")
