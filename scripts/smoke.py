"""What an installed kvloom must do, wherever it was installed from: python scripts/smoke.py"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvloom
from kvloom import Batch, CacheIndex, KVCache, KVSpec, KVView, ops
from kvloom.graphics.html import read_page
from kvloom.models import bundled_model_path
from kvloom.ops import cpu_kernels

sys.stdout.write(
    f"kvloom {kvloom.__version__} in {kvloom.__path__[0]}, {cpu_kernels()}, Python {sys.version}\n"
)
assert cpu_kernels() in ("baseline", "neon", "avx2", "avx512", "amx"), cpu_kernels()
assert "site-packages" in kvloom.__path__[0], kvloom.__path__
assert "function element(" in read_page("kvloom.serving.endpoints", "dashboard.html")

spec = KVSpec(layers=1, heads=2, head_dim=16, dtype=torch.float32)
kv = KVView.joint(spec.axes, spec.empty(num_tokens=8)[0])
query, key, value = torch.randn(3, 5, 2, 16)
ops.store(key, value, torch.arange(5), kv, backend="cpu")
assert torch.equal(ops.load(torch.arange(5), kv, backend="cpu")[0], key)
bounds = torch.tensor([0, 5])
out = ops.attend(query, kv, Batch(CacheIndex.offset(torch.tensor([0])), bounds, bounds), backend="cpu")
q, k, v = (x.transpose(0, 1) for x in (query, key, value))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected.transpose(0, 1))

folder = bundled_model_path()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs = AutoTokenizer.from_pretrained(folder)("import os\n\ndef main():\n", return_tensors="pt")
settings = {"max_new_tokens": 8, "do_sample": False}
tokens = model.generate(**inputs, **settings)
assert torch.equal(model.generate(**inputs, **settings, cache=KVCache.for_model(model)), tokens)
sys.stdout.write("stores, attends, generates\n")
