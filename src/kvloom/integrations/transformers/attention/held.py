"""kvloom's attention in a model, for as long as somebody holds it there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION, is_refused_by
from kvloom.integrations.transformers.models.text_config import text_config_of

_HELD: Final = "_kvloom_attention"


@dataclass
class _Held:
    """Attention that a model had before, and the names of those who hold kvloom's there."""

    before: str
    holders: set[str] = field(default_factory=set)


def hold_attention(model: Any, holder: str) -> None:
    """Let a model attend in place until ``release_attention``, unless its attention cannot be replaced."""
    held = getattr(model, _HELD, None)
    if held is None:
        held = _Held(_present(model))
        setattr(model, _HELD, held)
    held.holders.add(holder)
    if not is_refused_by(model):
        set_attention(model, IMPLEMENTATION)


def release_attention(model: Any, holder: str) -> None:
    """Undo ``hold_attention``; without holders the attention is that of before, unless another was set."""
    held = getattr(model, _HELD, None)
    if held is None or holder not in held.holders:
        return
    held.holders.remove(holder)
    if held.holders:
        return
    delattr(model, _HELD)
    if text_config_of(model)._attn_implementation == IMPLEMENTATION:
        set_attention(model, held.before)


@contextmanager
def attending_in_place(model: Any, holder: str) -> Iterator[None]:
    """Context of ``hold_attention``."""
    hold_attention(model, holder)
    try:
        yield
    finally:
        release_attention(model, holder)


def attention_before(model: Any) -> str:
    """Name of the attention that a model has without holders."""
    held = getattr(model, _HELD, None)
    return _present(model) if held is None else held.before


def _present(model: Any) -> str:
    """Name of the attention of a model; with transformers 4 some that have one alone, FSMT's, name none."""
    return str(text_config_of(model)._attn_implementation or "eager")


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the part of a model that generates text."""
    model.set_attn_implementation(named_for(model, name))


def named_for(model: Any, attention: str) -> str | dict[str, str]:
    """Argument of ``set_attn_implementation`` for that part."""
    config = text_config_of(model)
    # Of an encoder-decoder model each is a new copy.
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is config]
    return {names[0]: attention} if names else attention
