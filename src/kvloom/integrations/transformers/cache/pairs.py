"""Caches that an encoder-decoder model would misread are refused in its forwards."""

from typing import Any
from weakref import finalize

from transformers import EncoderDecoderCache, PreTrainedModel

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import (
    OF_ENCODER,
    attends_to_encoder,
    takers_of,
)


class PairGuard:
    """Refuses caches in the forwards of a model, as long as a cache holds this.

    Without an encoder's half: such models take a lone cache for that of the encoder's keys as well, or put it
    into a new pair in each forward. With the keys of another input of the encoder, which they would take for
    those of the present one. A saved guard refuses nothing.

    Args:
        model: A model whose cache may be a half; others are not watched.
    """

    def __init__(self, model: Any = None) -> None:
        if isinstance(model, PreTrainedModel) and attends_to_encoder(model):
            for taker in takers_of(model):
                handle = taker.register_forward_pre_hook(_ExpectPair(), with_kwargs=True)
                finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type["PairGuard"], tuple[()]]:
        return PairGuard, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PairGuard":
        return self


class _ExpectPair:
    """Forward pre-hook that refuses such caches; an object of this library counts as no change."""

    def __call__(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs
        if not model.config.is_encoder_decoder:
            if kwargs.get(OF_ENCODER) is None:
                return
            given = {OF_ENCODER: kwargs[OF_ENCODER]}
        for x in (*args, *kwargs.values()):
            if not hasattr(x, "pair_guard"):
                continue
            if isinstance(x, EncoderDecoderCache):
                encoder: Any = x.cross_attention_cache
                encoder.input.expect_same(given, is_new=not encoder.num_rows)
            else:
                raise UnsupportedError(
                    f"cache must be KVCache.for_model(model) for {type(model).__name__}, which has an "
                    f"encoder, got a {type(x).__name__} alone"
                )
