"""Local models and their text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from kvloom.errors import ArgumentError


def head_dim_of(config: Any) -> int:
    """Elements of a head vector of a text model, which not every configuration states."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load_model(
    path: str | Path, dtype: torch.dtype | None = None, *, progress: bool = True
) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` of a causal language model from a local folder; never downloads.

    Args:
        path: The folder.
        dtype: Of the weights and of the computation; that of the file if ``None``.
        progress: Show a bar while weights are loaded.

    Raises:
        ArgumentError: ``path`` is no folder with a ``config.json``.
    """
    if not (Path(path) / "config.json").is_file():
        raise ArgumentError(f"model must be a local folder with a config.json, got {str(path)!r}")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    shown = is_progress_bar_enabled()
    if not progress:
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype or "auto")
    finally:
        if shown:
            enable_progress_bar()
    return model.eval(), tokenizer


class Streamer(TextStreamer):  # type: ignore[misc]
    """Hands decoded text to ``write`` as tokens come, whole characters only."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each piece of text that will not change any more."""
        self._write(text)
