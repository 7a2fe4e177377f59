#!/usr/bin/env bash
# transformers 5.24.0: generate() of an encoder-decoder feeds tokens again that a given cache already has.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0: a small random T5, 5 tokens of the decoder, then 4 more with the
# cache of the first call and the whole text so far as decoder_input_ids. A decoder-only model leaves out what its
# cache has. Here all 6 tokens are stored behind the 5 that are there, and the text is another one, with
# no warning: generate() tells by the decoder's mask, which nobody has to pass and which it does not make itself. With
# a decoder_attention_mask of ones the text is right. 4.57.6 was right without. Exits 1 once this is no longer so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
cat > "$folder/ask.py" <<'PYTHON'
import copy
import sys

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

transformers.logging.set_verbosity_error()
torch.manual_seed(1)
sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
config = transformers.T5Config(**sizes, initializer_factor=2.0, decoder_start_token_id=1)
model = transformers.T5ForConditionalGeneration(config).eval()
model.generation_config.eos_token_id = None
ids, start = torch.randint(5, 90, (1, 20)), torch.tensor([[1]])
options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
expected = model.generate(ids, **options, decoder_input_ids=start, max_new_tokens=9)
cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
first = model.generate(ids, **options, decoder_input_ids=start, max_new_tokens=5, cache=cache)
held = cache.get_seq_length()
other = copy.deepcopy(cache)
given = model.generate(ids, **options, decoder_input_ids=first, max_new_tokens=4, cache=cache)
ones = torch.ones_like(first)
masked = model.generate(
    ids, **options, decoder_input_ids=first, decoder_attention_mask=ones, max_new_tokens=4, cache=other
)
print("in one call:   ", expected[0].tolist())
print("in two:        ", given[0].tolist(), "and", cache.get_seq_length(), "tokens in the cache, before", held)
print("two, with mask:", masked[0].tolist(), "and", other.get_seq_length(), "tokens")
if torch.equal(given, expected) or cache.get_seq_length() != 14 or not torch.equal(masked, expected):
    sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
