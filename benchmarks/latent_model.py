"""A small model with latent attention (MLA), trained in minutes on two slow cores and kept for the next time.

DeepSeek V3's attention without experts, with the bundled model's tokenizer and training text, so that latents
have the statistics of a trained model's.
"""

import itertools
import random
import sys
from pathlib import Path
from typing import Any, Final

import kept_model as kept
import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from kvloom.models import bundled_model_path, iter_texts

LENGTH: Final = 512
_ROWS: Final = 2
_STEPS: Final = 1000
_WARMUP: Final = 40
_SEED: Final = 0
_SOURCES: Final = b"".join(Path(str(x)).read_bytes() for x in (__file__, kept.__file__))
"""What decides the weights."""


def untrained_model(layers: int = 3, **sizes: Any) -> Any:
    """The model with random weights, the same ones each time; ``sizes`` are of its configuration."""
    torch.manual_seed(_SEED)
    chosen = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**chosen | sizes)).eval()


def trained_model() -> Any:
    """The trained model: that of the last time, if what decides its weights is as it was then."""
    return kept.kept_model("latents", _SOURCES, untrained_model, train)


def train(model: Any) -> None:
    """Train in place on pieces of the corpus, matrices with Muon; progress goes to stderr."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path(), local_files_only=True)
    texts = itertools.islice(iter_texts("train"), 400)
    ids = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    optimizers = kept.optimizers_of(model)
    peaks = [x.param_groups[0]["lr"] for x in optimizers]
    rng = random.Random(_SEED)
    for step in range(_STEPS):
        factor = min(1.0, (step + 1) / _WARMUP, (_STEPS - step) / _STEPS * 2)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        first = (rng.randrange(len(ids) - LENGTH) for _ in range(_ROWS))
        rows = torch.stack([ids[i : i + LENGTH] for i in first])
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == _STEPS:
            sys.stderr.write(f"step {step}: loss {loss.item():.3f}\n")
