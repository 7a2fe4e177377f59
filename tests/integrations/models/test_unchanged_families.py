"""Models that nobody changed find what they computed: in pools, in stores and in sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from campaign import is_whole
from integrations.models.test_families import SMALL
from transformers import AutoModelForCausalLM

from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.isolation import check_isolation
from kvloom.store import KVStore

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "Llama": ("LlamaConfig", {}),
    "Llama of YaRN": ("LlamaConfig", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "Phi": ("PhiConfig", {}),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "Gemma": ("GemmaConfig", {"head_dim": 8}),
    "Granite": ("GraniteConfig", {}),
    "OLMo-2": ("Olmo2Config", {}),
    "Cohere": ("CohereConfig", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "Falcon": ("FalconConfig", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "StableLM": ("StableLmConfig", {}),
    "Bloom": ("BloomConfig", {}),
}
# ``--campaign`` asks all families what they are isolated from: what is changed there is the same in each.
ISOLATED = list(FAMILIES) if is_whole() else [*FAMILIES][4::4]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_finds_its_text_and_nothing_else(name: str, tmp_path: Path) -> None:
    config, differs = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | differs)).eval()
    ids = torch.randint(3, 99, (2, 22), generator=torch.Generator().manual_seed(1))
    for found in (0, 20):  # each store is one of a process of its own
        with KVStore(f"file://{tmp_path}", read="always") as store:
            pool = KVPool.for_model(model, page_size=4, max_tokens=400, store=store)
            for expected in (found, 20, 20):
                cache = pool.begin(ids)
                assert cache.get_seq_length() == expected
                out = model.generate(
                    ids, past_key_values=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False
                )
                pool.commit(cache, out)
    if name in ISOLATED:
        assert [x for x in check_isolation(model) if x.problem] == []


@pytest.mark.parametrize("name", [x for x in FAMILIES if x != "Bloom"])  # which takes no positions
def test_a_family_finds_the_texts_of_padded_rows(name: str) -> None:
    """Each row is answered as alone, cold and warm, and its text is found alone."""
    config, differs = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | differs)).eval()
    ids = torch.randint(3, 99, (3, 22), generator=torch.Generator().manual_seed(1))
    padding = [0, 9, 20]
    mask = (torch.arange(22) >= torch.tensor(padding).unsqueeze(1)).long()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    rows = [own[None, first:] for own, first in zip(ids, padding, strict=True)]
    alone = [model.generate(row, attention_mask=torch.ones_like(row), **options)[0, -6:] for row in rows]
    pool = KVPool.for_model(model, page_size=4, max_tokens=400)
    for found in (0, 20):
        cache = pool.begin(ids, attention_mask=mask)
        assert cache.get_seq_length() == found
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(out[:, -6:], torch.stack(alone))
        pool.commit(cache, out)
    assert [pool.begin(row).get_seq_length() for row in rows] == [20, 12, 0]
