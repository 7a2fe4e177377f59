"""Loading local models, and streaming their text."""

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    TextStreamer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from kvloom.errors import ArgumentError
from kvloom.models import check_model_folder


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    *,
    progress: bool = True,
    with_encoder: bool = False,
) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` of a causal language model, one that sees or not, from a local folder.

    Never downloads, never unpickles, never runs code of the folder, and never asks whether to do so.

    Args:
        path: The folder.
        dtype: Dtype of the weights and of the computation; that of the file if ``None``.
        progress: Show a bar while weights are loaded.
        with_encoder: Whether encoder-decoders that read texts are loaded, too.

    Raises:
        ArgumentError: ``path`` is no such folder, as of another model with an encoder, a file of it is
            damaged or missing, or its weights do not match its configuration.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path must be the name of a folder, got {path!r}")
    check_model_folder(Path(path))
    only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    shown = is_progress_bar_enabled()
    if not progress:
        disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **only)
        config = AutoConfig.from_pretrained(path, **only)
        auto: Any = AutoModelForImageTextToText if is_seeing(config) else AutoModelForCausalLM
        if config.is_encoder_decoder:  # of which transformers would load the decoder alone
            if not with_encoder:
                raise ArgumentError(
                    f"model must be a decoder, got the encoder and decoder of {type(config).__name__} in "
                    f"{str(path)!r}: load it with transformers and enable it"
                )
            auto = AutoModelForSeq2SeqLM
            if type(config) not in auto._model_mapping:
                raise ArgumentError(
                    f"model must have an encoder of texts alone, got {type(config).__name__} in "
                    f"{str(path)!r}: load it with transformers, and give kvloom.quality its encoder_inputs"
                )
        model, report = auto.from_pretrained(
            path, use_safetensors=True, dtype=dtype or "auto", output_loading_info=True, **only
        )
    except ArgumentError:
        raise
    except Exception as error:  # whatever a damaged folder makes transformers raise
        raise ArgumentError(
            f"model must be one that loads, got {str(path)!r}: {summary_of(error)}"
        ) from error
    finally:
        if shown:
            enable_progress_bar()
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ArgumentError(
            f"model must have all its weights, got none for {shorten(missing, 120)} in {str(path)!r}"
        )
    return model.eval(), tokenizer


def is_seeing(config: Any) -> bool:
    """Whether a configuration is of models that read texts with pictures."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def summary_of(error: BaseException) -> str:
    """The error's class and the beginning of what it says, on one line."""
    # Older versions of transformers have a long message with each tensor; newer ones log it.
    if any(words in str(error) for words in ("size mismatch", "ignore_mismatched_sizes")):
        return "its weights have other shapes than its config.json says"
    return shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


class Streamer(TextStreamer):  # type: ignore[misc]
    """Streamer that passes decoded text to ``write`` as tokens come, in whole characters."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each piece of text that will not change any more."""
        self._write(text)
