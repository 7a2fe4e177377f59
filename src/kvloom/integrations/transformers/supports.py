"""Which uses a model allows, and why not: one table for each model, from the data that the uses read."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvloom.errors import KVError, UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import attends_to_encoder, why_half
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, expect_use, layers_of, sources_of
from kvloom.integrations.transformers.models.text_config import has_latents, text_config_of
from kvloom.integrations.transformers.session.served import expect_served, expect_stored

USES: Final = (
    "KVCache",
    "KVCache, static",
    "KVPool",
    "continuous_batching",
    "continuous_batching with a store",
)
"""Names of the uses."""


@dataclass(frozen=True, slots=True)
class Support:
    """What the layers of a model keep, and which uses it allows.

    Attributes:
        model: Name of the model's class.
        layers: Number of layers that keep the same, by what they keep in words.
        why_not: For each use why the model does not allow it, as a sentence; empty if it does.
        why_half: Why a ``KVCache`` has only the tokens of a model that attends to an encoder; empty if it has
            all.
    """

    model: str
    layers: Mapping[str, int]
    why_not: Mapping[str, str]
    why_half: str = ""

    def answers(self) -> dict[str, tuple[str, str]]:
        """For each use ``"yes"``, ``"half"`` or ``"no"``, and why, as a sentence, unless it is yes."""
        found = {}
        for use, why in self.why_not.items():
            half = self.why_half if use.startswith("KVCache") and not why else ""
            found[use] = ("no" if why else "half" if half else "yes", why or half)
        return found


def support_of(model: Any) -> Support:
    """What the layers of a model keep, and which uses it allows.

    Nothing is computed: whether a model with recurrent states goes on from these, and whether a session has
    the model's logits, is tried when a pool or a session is made.

    Args:
        model: A ``PreTrainedModel``, which may be on the meta device.

    Raises:
        ArgumentError: ``model`` is no model.
    """
    config = text_config_of(model)
    try:
        layers = layers_of(model)
    except UnsupportedError as error:
        return Support(type(model).__name__, {}, dict.fromkeys(USES, str(error)))
    asks: tuple[Callable[[], object], ...] = (
        lambda: expect_use(model, "cache", layers),
        lambda: expect_use(model, "static", layers),
        lambda: expect_use(model, "pool", layers),
        lambda: expect_served(model),
        lambda: [expect(model) for expect in (expect_served, expect_stored)],
    )
    words = Counter(_words(x, has_latents(config)) for x in layers)
    if sources := _sources_of(config):
        words["nothing, and reads the keys of an earlier layer"] = len(sources)
    if attends_to_encoder(model):
        words["keys and values of an encoder"] = sum(x.tokens for x in layers)
    why_not = {use: _why_not(ask) for use, ask in zip(USES, asks, strict=True)}
    return Support(type(model).__name__, dict(words), why_not, why_half(model))


def _words(layer: LayerSpec, is_latent: bool) -> str:
    """What a layer keeps, with its window."""
    keeps = layer.keeps
    if layer.tokens and is_latent:
        keeps = keeps.replace("keys and values", "latents and rope keys")
    if layer.states and not layer.tokens:
        keeps = "a recurrent state"
    if layer.tokens and layer.window is not None:
        keeps += f" of the last {layer.window} tokens"
    return keeps


def _sources_of(config: Any) -> Mapping[int, int]:
    try:
        return sources_of(config)
    except (KVError, AttributeError):  # it reads those of another model, or names no layers
        return {}


def _why_not(ask: Callable[[], object]) -> str:
    try:
        ask()
    except KVError as error:
        return str(error)
    return ""
