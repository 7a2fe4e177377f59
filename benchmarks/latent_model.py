"""A small model with latent attention (MLA), trained in minutes on two slow cores and kept for the next time.

DeepSeek V3's attention without experts, with the bundled model's tokenizer and training text, so that latents
have the statistics of a trained model's.
"""

import hashlib
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from kvloom.models import bundled_model_path, iter_texts

LENGTH: Final = 512
_ROWS: Final = 2
_STEPS: Final = 1000
_WARMUP: Final = 40
_SEED: Final = 0
_SOURCE: Final = Path(__file__).read_bytes()
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
    """The trained model: that of the last time, if this file is as it was then."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches) / "kvloom" / f"latents-{hashlib.sha256(_SOURCE).hexdigest()[:16]}"
    if not folder.exists():
        model = untrained_model()
        train(model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(dir=folder.parent)
        model.save_pretrained(unfinished)
        Path(unfinished).rename(folder)
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train(model: Any, steps: int = _STEPS) -> None:
    """Train in place on pieces of the corpus, matrices with Muon; progress goes to stderr."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path(), local_files_only=True)
    texts = itertools.islice(iter_texts("train"), 400)
    ids = torch.cat([torch.tensor(tokenizer(text)["input_ids"]) for text in texts])
    matrices = [x for x in model.model.layers.parameters() if x.dim() == 2]
    others = [x for x in model.parameters() if x.dim() == 1] + [model.get_input_embeddings().weight]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    optimizers = [muon, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)]
    peaks = [x.param_groups[0]["lr"] for x in optimizers]
    rng = random.Random(_SEED)
    for step in range(steps):
        factor = min(1.0, (step + 1) / _WARMUP, (steps - step) / steps * 2)
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
        if step % 100 == 0 or step + 1 == steps:
            sys.stderr.write(f"step {step}: loss {loss.item():.3f}\n")
