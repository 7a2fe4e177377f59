"""``CacheGeometry`` of a model of transformers."""

from typing import Any

from kvloom.carry.geometry import CacheGeometry, LayerGeometry
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.models.layer_specs import LayerSpec, layers_of
from kvloom.integrations.transformers.models.seen import entries_seen
from kvloom.integrations.transformers.models.text_config import has_latents, text_config_of


def geometry_of(model: Any) -> CacheGeometry:
    """Sizes of the layers of a model's cache, seen in a forward of one token; it may be on the meta device.

    Raises:
        ArgumentError: ``model`` is no ``PreTrainedModel``.
        UnsupportedError: a layer keeps anything else than keys and values of the tokens.
    """
    config = text_config_of(model)
    specs = layers_of(model)
    for i, spec in enumerate(specs):
        if not spec.tokens or spec.states or spec.index:
            raise UnsupportedError(
                f"model must keep keys and values in every layer and nothing else, got {spec.keeps} in layer "
                f"{i} of {type(model).__name__}"
            )
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"model must be a decoder alone, got {type(model).__name__}")
    entries, rotary, latents = entries_seen(model), rotary_elements(model), has_latents(config)
    return CacheGeometry(
        tuple(_layer(i, spec, entries, rotary, latents) for i, spec in enumerate(specs)),
        config.model_type,
    )


def _layer(number: int, spec: LayerSpec, entries: Any, rotary: int, latents: bool) -> LayerGeometry:
    entry = entries.get(number)
    if entry is None or entry.value is None:
        raise UnsupportedError(f"model must give keys and values to layer {number} of its cache, gives none")
    turned = entry.value.head_dim if latents else entry.key.head_dim
    return LayerGeometry(
        entry.heads,
        entry.key.head_dim,
        entry.value.head_dim,
        min(rotary, turned),
        spec.window,
        has_latents=latents,
    )


def rotary_elements(model: Any) -> int:
    """Elements of a key that RoPE turns, by the frequencies of the part that generates text; 0 without any.

    GPT-J and CodeGen keep sines of positions in place of frequencies; their configurations say the number.

    Raises:
        ArgumentError: layers have several numbers.
    """
    decoder = model.get_decoder()  # a tower of pictures has frequencies of its own
    buffers = (model if decoder is None else decoder).named_buffers()
    found = {2 * x.numel() for name, x in buffers if name.rpartition(".")[2].endswith("inv_freq")}
    if len(found) > 1:
        raise ArgumentError(f"model must turn as many elements in all layers, got {sorted(found)}")
    return found.pop() if found else int(getattr(text_config_of(model), "rotary_dim", None) or 0)
