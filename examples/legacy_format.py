"""A cache as a tuple of `(key, value)` pairs and back, for code that works on the tensors themselves.

    python examples/legacy_format.py

Needs transformers. Prints what the tuple holds, and a text continued from it and from nothing:

    5 layers, keys (1, 2, 12, 64), values (1, 2, 12, 64)
    same tensors after a round trip: True
    from 9 tokens of the tuple: 'import os ...
    from an empty cache: 'import os ...
"""

import torch
from torch import Tensor

from kvloom import Cache, KVCache, load_model
from kvloom.models import bundled_model_path

PROMPT = "import os\n\ndef main():\n"
DROPPED = 3  # tokens that some logic of our own takes off the end

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
inputs = tokenizer(PROMPT, return_tensors="pt")


def continued(ids: Tensor, cache: KVCache) -> str:
    """A greedy continuation of ``ids``, of which ``cache`` holds the first ones."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(out[0]))


generated = model.generate(
    **inputs,
    cache=KVCache.for_model(model),
    max_new_tokens=4,
    do_sample=False,
    return_dict_in_generate=True,
)
layers = generated.cache.layers
cache = Cache.from_legacy_cache((layer.keys, layer.values) for layer in layers)
legacy = cache.to_legacy_cache()
print(f"{len(legacy)} layers, keys {tuple(legacy[0][0].shape)}, values {tuple(legacy[0][1].shape)}")

again = Cache.from_legacy_cache(legacy).to_legacy_cache()
same = all(torch.equal(a, b) for x, y in zip(legacy, again, strict=True) for a, b in zip(x, y, strict=True))
print("same tensors after a round trip:", same)

refilled = KVCache.for_model(model)
for layer_idx, (key, value) in enumerate(legacy):
    refilled.update(key[:, :, :-DROPPED], value[:, :, :-DROPPED], layer_idx)
num_kept, ids = refilled.get_seq_length(), generated.sequences
print(f"from {num_kept} tokens of the tuple: {continued(ids, refilled)!r}")
print(f"from an empty cache: {continued(ids, KVCache.for_model(model))!r}")
