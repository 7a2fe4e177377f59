"""Tokens are evicted, more in each further layer, and what remains is quantized: the savings multiply.

    python examples/eviction.py

Needs transformers. Prints how many tokens of a prompt each layer keeps, and for each kind of cache its bytes
and the mean loss of the text behind the prompt, with all tokens and with those that were kept:

    of 480 tokens layers keep [432, 366, 300, 234, 168]
    float32       all tokens: 2,457,600 bytes, loss 2.36  evicted: 1,556,480 bytes, loss 2.40
    int8          all tokens:   633,600 bytes, loss 2.36  evicted:   401,280 bytes, loss 2.41
    int4,recent=0 all tokens:   326,400 bytes, loss 2.41  evicted:   206,720 bytes, loss 2.48

The press below is a small one. Those of kvpress work in the same way: a hook of each attention layer assigns
other keys and values to the layer of the cache.
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from kvloom.integrations.transformers import KVCache, load_model
from kvloom.models import bundled_model_path

PROMPT, AFTER, NEWEST = 480, 64, 32

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
model.set_attn_implementation("kvloom")
text = tokenizer(inspect.getsource(textwrap), return_tensors="pt").input_ids[:, : PROMPT + AFTER]


def press(cache: KVCache) -> Callable[..., None]:
    """A hook that keeps the newest tokens, and in each head those whose keys have the smallest norms."""

    def evict(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        keys, values = layer.keys, layer.values
        share = 0.9 - 0.55 * module.layer_idx / (module.config.num_hidden_layers - 1)
        norms = keys.norm(dim=-1)
        norms[:, :, -NEWEST:] = 0
        kept = norms.topk(int(share * keys.shape[2]), largest=False).indices.sort().values
        where = kept.unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
        layer.keys = keys.gather(2, where)
        layer.values = values.gather(2, where)

    return evict


def measure(kv: str, evicts: bool) -> tuple[KVCache, int, float]:
    """A cache of the prompt, its bytes, and the mean loss of what follows."""
    cache = KVCache.for_model(model, kv=kv)
    hook = press(cache)
    hooks = [x.self_attn.register_forward_hook(hook) for x in model.model.layers if evicts]
    with torch.no_grad():
        model(text[:, :PROMPT], cache=cache)
        for x in hooks:
            x.remove()
        nbytes = cache.nbytes
        # The cache holds fewer tokens than were read, so positions are said.
        positions = torch.arange(PROMPT, PROMPT + AFTER)[None]
        logits = model(text[:, PROMPT:], position_ids=positions, cache=cache).logits[0, :-1]
    return cache, nbytes, float(torch.nn.functional.cross_entropy(logits, text[0, PROMPT + 1 :]))


evicted = measure("float32", True)[0]
print(f"of {PROMPT} tokens layers keep {[layer.get_seq_length() - AFTER for layer in evicted.layers]}")
for kv in ("float32", "int8", "int4,recent=0"):
    columns = []
    for name, evicts in (("all tokens", False), ("evicted", True)):
        _, nbytes, loss = measure(kv, evicts)
        columns.append(f"{name}: {nbytes:9,} bytes, loss {loss:.2f}")
    print(f"{kv:13} {'  '.join(columns)}")
