"""Caches of transformers' own that the caller of an enabled model asks for by ``cache_implementation``."""

import logging
from typing import Any, Final

from transformers import PreTrainedModel

from kvloom.errors import UnsupportedError

_LOG: Final = logging.getLogger("kvloom")
_OFFLOADED: Final = "offloaded"
"""What the names of all caches have that keep a layer in host memory until it computes."""
_DEFAULT: Final = "dynamic"
"""Beginning of the names in whose place an enabled model has kvloom's cache."""


def is_default(name: str | None) -> bool:
    """Whether a ``cache_implementation`` means the cache that a model has anyway."""
    return name is None or name.startswith(_DEFAULT)


class StockCaches:
    """Checks of ``cache_implementation`` for one enabled model."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def expect(self, model: PreTrainedModel, name: str | None, given: Any) -> None:
        """Check a cache of transformers' own before it is made; a WARNING says once that it is not kvloom's.

        Args:
            model: The enabled model.
            name: ``cache_implementation``.
            given: Cache of the caller; ``None`` for none.

        Raises:
            UnsupportedError: the cache keeps layers in host memory, and the model is on no CUDA device,
                without which transformers cannot make or use it.
        """
        is_named = name is not None and _OFFLOADED in name
        if (is_named or _is_offloading(given)) and not can_offload(model):
            what = (
                f"cache_implementation={name!r}" if is_named else f"{type(given).__name__}(offloading=True)"
            )
            raise UnsupportedError(
                f"{what} needs a model on a CUDA device, got one on {model.device}: transformers moves each "
                "layer's keys and values there before they are read. Fewer bits take less memory, as "
                'enable(model, kv="int4"); pages that nobody reads wait in host memory with '
                'KVPool.for_model(model, store=KVStore("memory://pages", max_bytes=...))'
            )
        if name is not None and not is_default(name) and name not in self._said:
            self._said.add(name)
            _LOG.warning(
                "cache_implementation=%r is a cache of transformers, which %s uses instead of kvloom's",
                name,
                type(model).__name__,
            )


def can_offload(model: PreTrainedModel) -> bool:
    """Whether transformers' caches can keep the layers of a model in host memory."""
    return bool(model.device.type == "cuda")


def _is_offloading(cache: Any) -> bool:
    return bool(getattr(getattr(cache, "self_attention_cache", cache), "offloading", False))
