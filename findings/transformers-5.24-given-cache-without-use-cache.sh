#!/usr/bin/env bash
# transformers 5.24.0: generate() with a given cache and use_cache=False answers another text, without a word.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0: a small random Llama, a prompt of 6 tokens, 8 new ones. A given
# DynamicCache is still filled, and the whole text is fed again in each step: it holds 6 + 7 + ... + 13 = 76 tokens
# afterwards instead of 13, and the tokens differ from those without it. Nobody has to pass use_cache=False for that:
# it may stand in a model's configuration, as in Pix2Struct's default one, and in folders of models that were saved
# after training. Exits 1 once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat > "$folder/ask.py" <<'PYTHON'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)
model = transformers.LlamaForCausalLM(config).eval()
model.generation_config.eos_token_id = None
ids = torch.randint(5, 90, (1, 6))
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
expected = model.generate(ids, **options)
cache = transformers.DynamicCache()
given = model.generate(ids, **options, use_cache=False, cache=cache)
print("without:", expected[0, 6:].tolist())
print("given:  ", given[0, 6:].tolist())
print("tokens in the cache:", cache.get_seq_length())
print("Pix2Struct's use_cache:", transformers.Pix2StructConfig().text_config.use_cache)
if torch.equal(given, expected) or cache.get_seq_length() != 76:
    sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
