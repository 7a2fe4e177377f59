"""Random language models and transformers' own cache, to compare generation with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvloom.models import bundled_model_path
from kvloom.quant.affine import dequantize, quantize

NEW_TOKENS = 16


def make_model(
    attention: str = "sdpa", dtype: torch.dtype = torch.float32, num_layers: int = 3
) -> LlamaForCausalLM:
    """A random Llama whose weights are wide enough that greedy tokens do not repeat."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.25,
        attn_implementation=attention,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def make_prompts(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), width, dtype=torch.int64),
        torch.zeros(len(lengths), width, dtype=torch.int64),
    )
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, 199, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], cache: Any) -> Any:
    """Greedy continuation with logits; ``min_new_tokens`` keeps all rows going."""
    return model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


class FakeQuantCache(DynamicCache):
    """transformers' own cache of keys and values that were quantized and dequantized on their way in."""

    bits, group = 8, 16

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Round both, then store them as they are."""
        return super().update(self.round_trip(key), self.round_trip(value), layer_idx, *args, **kwargs)

    def round_trip(self, x: Tensor) -> Tensor:
        """What comes back of ``x``, of 4 bits in full range."""
        codes, scale = quantize(x, self.bits, self.group, torch.float16, full_range=True)
        return dequantize(codes, scale, self.bits, x.dtype)


class FakeQuantCache4(FakeQuantCache):
    """The same with 4 bits."""

    bits = 4


class FakeQuantCache2(FakeQuantCache):
    """The same with 2 bits."""

    bits = 2


def short_model(folder: Path, num_positions: int) -> Path:
    """A copy of the bundled model whose configuration says so many positions."""
    copied = folder / "short"
    shutil.copytree(bundled_model_path(), copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_positions}))
    return copied


def kosmos() -> Any:
    """A random model that counts positions itself."""
    torch.manual_seed(0)
    text = {"vocab_size": 99, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 32, "d_ff": 48, "d_kv": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Kosmos2_5Config(text_config=text, vision_config=vision)
    model = transformers.Kosmos2_5ForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model
