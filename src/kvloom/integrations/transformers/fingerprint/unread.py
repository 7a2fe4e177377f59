"""What a model has that does not change what it computes."""

import logging
from typing import Any, Final

UNWATCHED: Final = frozenset(
    {
        "_experts_implementation_internal",  # changes rounding alone
        "_commit_hash",
        "_output_attentions",
        "_output_capturing_hooks_installed",
        "generation_config",
        "gradient_checkpointing",
        "loss_type",
        "max_seq_len_cached",  # set by dynamic RoPE, whose frequencies are a part of the scope
        "name_or_path",
        "prepare_inputs_for_generation",  # set by a PeftModel while it generates
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "warnings_issued",
        "_is_hf_initialized",
    }
)
"""Attributes that change no keys and values, or are a part of the scope in another way."""
_INERT: Final = ("kvloom.", "transformers.generation.")
"""Packages of classes whose objects do not change what a model computes."""
_CHANGING: Final = "kvloom.measuring."
"""Exception within these packages: its hooks change what a model computes."""


def is_inert(value: Any) -> bool:
    """Whether an object does not change what a model computes."""
    home = f"{type(value).__module__}."
    if isinstance(value, logging.Logger):  # remembers which levels it was asked for
        return True
    return home.startswith(_INERT) and not home.startswith(_CHANGING)
