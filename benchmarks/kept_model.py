"""Small models that benchmarks train: by which optimizers, and where they are kept for the next time."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def kept_model(name: str, sources: bytes, untrained: Callable[[], Any], train: Callable[[Any], None]) -> Any:
    """A trained model in float32: that of the last time, if what decides its weights is as it was then.

    Args:
        name: Of the model.
        sources: What decides the weights.
        untrained: Makes the model.
        train: Trains it in place.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(caches) / "kvloom" / f"{name}-{hashlib.sha256(sources).hexdigest()[:16]}"
    model = untrained()
    if not folder.exists():
        train(model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(dir=folder.parent)
        model.save_pretrained(unfinished)
        Path(unfinished).rename(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def optimizers_of(model: Any) -> list[Any]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [x for x in model.model.layers.parameters() if x.dim() == 2]
    others = [x for x in model.parameters() if x.dim() == 1] + [model.get_input_embeddings().weight]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    return [muon, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)]
