"""What a pool reads of the configuration of its model, which may be changed while the pool is there."""

from collections.abc import Sequence
from typing import Any, Final

from kvloom.errors import StateError
from kvloom.integrations.transformers.models.content import placeholders_of
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, expect_use, layers_of
from kvloom.integrations.transformers.models.rope import DynamicRope, dynamic_rope
from kvloom.integrations.transformers.models.text_config import text_config_of

_KEPT: Final = "kind", "tokens", "window", "index", "has_index", "states", "crosses", "is_used"
"""Attributes of ``LayerSpec`` on which the layers of a cache depend."""


class Configured:
    """Facts of a model's configuration, read again in each new state of the model.

    Attributes:
        rope: Dynamic RoPE of the model, if it has one.
        placeholders: Its tokens for pictures, audio and the like, with their names.

    Args:
        model: A ``PreTrainedModel`` in the state whose name is empty.
    """

    rope: DynamicRope | None
    placeholders: dict[int, str]

    def __init__(self, model: Any) -> None:
        self._model, self._state = model, ""
        self._layers = layers_of(model)
        self._read()

    def follow(self, state: str) -> None:
        """Read again what may be other in a state of the model; does nothing if it was the last one.

        Raises:
            StateError: its layers keep other tokens than when the pool was made.
            UnsupportedError: it now attends to later tokens, or is otherwise none that a pool takes.
        """
        if state == self._state:
            return
        layers = layers_of(self._model)
        expect_use(self._model, "pool", layers)
        expect_same_layers(self._layers, layers, "pool")
        self._read()
        self._state = state

    def _read(self) -> None:
        config = self._model.config
        self.rope = dynamic_rope(self._model)
        self.placeholders = placeholders_of(config) | placeholders_of(text_config_of(self._model))


def expect_same_layers(before: Sequence[LayerSpec], now: Sequence[LayerSpec], owner: str) -> None:
    """Raise StateError if layers of a model keep something else than what their caches were made for.

    Args:
        before: Layers for which caches were made.
        now: The present ones.
        owner: Who made them, and must be made again: ``"pool"`` or ``"session"``.
    """
    if len(before) != len(now):
        raise StateError(
            f"model must have the {len(before)} layers with which its {owner} was made, got {len(now)}: make "
            f"another {owner}"
        )
    for old, new in zip(before, now, strict=True):
        for name in _KEPT:
            was, found = getattr(old, name), getattr(new, name)
            if was != found:
                raise StateError(
                    f"model must keep what it kept when its {owner} was made, got {name} {found!r} of layer "
                    f"{new.number}, which was {was!r}: make another {owner}"
                )
