"""The whole library in one page. Read this first."""

import pytest
import torch

from kvloom import Batch, CacheIndex, CacheLayout, KVSpec, KVView, QuantSpec, ops
from kvloom.dialects import pmx

INT8 = QuantSpec(bits=8, group=8, scale_dtype=torch.float32)


def test_layout_is_an_axis_order() -> None:
    cache = torch.arange(2 * 3 * 4 * 8).view(2, 3, 4, 8)
    view = CacheLayout("B H S D").canonical(cache)  # [L, 2, B, S, 1, H, 1, D], no copy
    assert torch.equal(view[0, 0, 1, 2, 0, 0, 0], cache[1, 0, 2])


def test_spec_says_what_a_cache_costs() -> None:
    spec = KVSpec(layers=2, heads=4, head_dim=64, quant=QuantSpec(bits=8, group=64))
    assert spec.nbytes(num_tokens=100) == 2 * 2 * 4 * 100 * (64 + 2)


@pytest.mark.parametrize("quant", [None, INT8], ids=["plain", "int8"])
def test_store_then_load(quant: QuantSpec | None) -> None:
    spec = KVSpec(layers=2, heads=4, head_dim=16, dtype=torch.float32, quant=quant)
    cache, scale = spec.empty(num_tokens=10)
    kv = KVView.joint(spec.axes, cache, scale, layer=1)
    key, value, slots = torch.randn(3, 4, 16), torch.randn(3, 4, 16), torch.tensor([7, 0, 3])
    ops.store(key, value, slots, kv)
    loaded, _ = ops.load(slots, kv)
    step = 0 if scale is None else scale[1, 0, slots].repeat_interleave(8, dim=-1)
    assert ((loaded - key).abs() <= step * 0.5001).all()


def test_attend_reads_pages_in_place() -> None:
    kv = KVView.split(CacheLayout("B S H D"), *torch.zeros(2, 5, 4, 2, 16))  # 5 pages of 4 slots, 2 heads
    pages = CacheIndex.blocks(torch.tensor([[3, 1]]), block_size=4)
    key, value, query = torch.randn(6, 2, 16), torch.randn(6, 2, 16), torch.randn(6, 4, 16)
    ops.store(key, value, torch.tensor([12, 13, 14, 15, 4, 5]), kv)
    out = ops.attend(query, kv, Batch(pages, seqstarts=torch.tensor([0, 6]), kvstarts=torch.tensor([0, 6])))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


def test_standard_operator_keeps_its_document() -> None:
    new, cache = torch.randn(1, 3, 2, 16), torch.zeros(1, 1, 2, 8, 2, 16)
    pmx.key_value_cache(new, new, 0, cache)
    key, _ = pmx.key_value_cache(new, new, 3, cache)
    assert torch.equal(key, torch.cat([new, new], dim=1))


def test_generate_gives_the_same_tokens() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvloom.integrations.transformers import KVCache

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    prompt = torch.tensor([[1, 5, 9, 3]])
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **how)
    assert torch.equal(model.generate(prompt, **how, past_key_values=KVCache.for_model(model)), expected)
