"""A smaller cache for `generate()`: one line more.

    python examples/drop_in.py

Needs transformers. Prints a text that was generated from int8 keys and values, and what a token costs:

    import os

    def main():
        ...

    int8: 1,320 bytes per token, float32: 5,120
"""

import torch

from kvloom import enable, load_model
from kvloom.models import bundled_model_path

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
inputs = tokenizer("import os\n\ndef main():\n", return_tensors="pt")

enable(model, kv="int8")
out = model.generate(**inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
print(tokenizer.decode(out.sequences[0]))

enable(model)
plain = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
int8, float32 = (x.cache.nbytes_per_token for x in (out, plain))
print(f"\nint8: {int8:,.0f} bytes per token, float32: {float32:,.0f}")
