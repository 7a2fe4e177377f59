"""One system prompt, read once and shared by every question.

    python examples/prefix_reuse.py

Needs transformers. Prints each question with its answer, then what became of the prefix:

    'def main' (2 tokens read): '():\\n    import argparse\\n ...
    'class Reader' (3 tokens read): '(object):\\n ...
    'def read_lines(path' (6 tokens read): '):\\n ...
    the prefix holds 21 tokens, and this is what a write meets:
    this cache is frozen: use a fork of it, cache.fork()
"""

import torch

from kvloom import KVCache, load_model
from kvloom.errors import StateError
from kvloom.models import bundled_model_path

SYSTEM = '"""Utilities for reading and writing files."""\n\nimport os\nimport sys\n\n'
QUESTIONS = ["def main", "class Reader", "def read_lines(path"]

model, tokenizer = load_model(bundled_model_path(), dtype=torch.float32, progress=False)
system_prompt = tokenizer(SYSTEM, return_tensors="pt")
prefix = KVCache.for_model(model)
with torch.no_grad():
    model(**system_prompt, cache=prefix)
prefix.freeze()

for question in QUESTIONS:
    new = tokenizer(question, return_tensors="pt")
    inputs = {name: torch.cat([system_prompt[name], new[name]], dim=1) for name in system_prompt}
    # A fork starts with the pages of the prefix, so generate() reads only what is behind them.
    out = model.generate(**inputs, cache=prefix.fork(), max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    print(f"{question!r} ({new.input_ids.shape[1]} tokens read): {answer!r}")

try:
    model(**new, cache=prefix)
except StateError as error:
    print(f"the prefix holds {prefix.get_seq_length()} tokens, and this is what a write meets:\n{error}")
