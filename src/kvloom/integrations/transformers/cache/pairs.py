"""A ``KVCache`` without an encoder's half is refused in the forwards of an encoder-decoder model."""

from typing import Any
from weakref import finalize

from transformers import EncoderDecoderCache, PreTrainedModel

from kvloom.errors import UnsupportedError


class PairGuard:
    """Refuses caches without an encoder's half in the forwards of a model, as long as a cache holds this.

    Such models take a lone cache for that of the encoder's keys as well, or put it into a new pair in each
    forward. A saved guard refuses nothing.

    Args:
        model: A model whose cache may be a half; others are not watched.
    """

    def __init__(self, model: Any = None) -> None:
        if isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder:
            handle = model.register_forward_pre_hook(_ExpectPair(), with_kwargs=True)
            finalize(self, handle.remove)

    def __reduce__(self) -> tuple[type["PairGuard"], tuple[()]]:
        return PairGuard, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PairGuard":
        return self


class _ExpectPair:
    """Forward pre-hook that refuses such caches; an object of this library counts as no change."""

    def __call__(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in (*args, *kwargs.values()):
            if hasattr(x, "pair_guard") and not isinstance(x, EncoderDecoderCache):
                raise UnsupportedError(
                    f"cache must be KVCache.for_model(model) for {type(model).__name__}, which has an "
                    f"encoder, got a {type(x).__name__} alone"
                )
