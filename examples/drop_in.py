"""A smaller cache for `generate()`: three lines, one of them new.

    python examples/drop_in.py

Needs transformers. Prints a text that was generated from int8 keys and values, and what a token costs:

    import os

    def main():
        ...

    int8: 1,320 bytes per token, float32: 5,120
"""

import torch

from kvloom.integrations.transformers import KVCache, load_model
from kvloom.models import bundled_model_path

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
inputs = tokenizer("import os\n\ndef main():\n", return_tensors="pt")

cache = KVCache.for_model(model, kv="int8")
out = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(out[0]))

plain = KVCache.for_model(model)
model.generate(**inputs, past_key_values=plain, max_new_tokens=1)
print(f"\nint8: {cache.nbytes_per_token:,.0f} bytes per token, float32: {plain.nbytes_per_token:,.0f}")
