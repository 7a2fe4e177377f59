"""Greedy generation written out: what `generate()` does around a cache, one step at a time.

    python examples/generation_loop.py

Needs transformers. Prints what the model reads in the first steps, and the two texts:

    step 0 reads positions 0 to 10, mask (2, 11)
    step 1 reads positions 11 to 11, mask (2, 12)
    step 2 reads positions 12 to 12, mask (2, 13)

    import os

    def main():
        ...
"""

import torch

from kvloom import KVCache, load_model
from kvloom.models import bundled_model_path

PROMPTS = ["import os\n\ndef main():\n", "class Reader:\n    def __init__(self, "]
NEW_TOKENS = 24

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
cache = KVCache.for_model(model)

inputs = dict(tokenizer(PROMPTS, padding=True, return_tensors="pt"))  # the shorter one is padded on its left
ids = inputs["input_ids"]
cache_position = torch.arange(ids.shape[1])  # padding counts

with torch.no_grad():
    for step in range(NEW_TOKENS):
        if step < 3:
            first, last = cache_position[[0, -1]].tolist()
            shape = tuple(inputs["attention_mask"].shape)
            print(f"step {step} reads positions {first} to {last}, mask {shape}")
        # Recent transformers ask the cache where it ends and ignore the positions.
        outputs = model(**inputs, cache_position=cache_position, cache=cache, use_cache=True)
        new = outputs.logits[:, -1:].argmax(dim=-1)
        ids = torch.cat([ids, new], dim=1)
        # The cache holds what was read, so only the new token goes in; the mask covers both.
        mask = inputs["attention_mask"]
        inputs = {"input_ids": new, "attention_mask": torch.cat([mask, torch.ones_like(new)], dim=1)}
        cache_position = cache_position[-1:] + 1

for text in tokenizer.batch_decode(ids, skip_special_tokens=True):
    print(f"\n{text}")
