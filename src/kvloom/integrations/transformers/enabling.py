"""``enable``: a model that uses this library's cache and attention without arguments of the caller."""

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.assisted import VALIDATE, ValidateMode, prepare_drafts
from kvloom.integrations.transformers.attention.held import (
    attention_before,
    hold_attention,
    named_for,
    release_attention,
    set_attention,
)
from kvloom.integrations.transformers.attention.in_place import IMPLEMENTATION
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.cache.layers import KVCacheLayer
from kvloom.integrations.transformers.fingerprint.per_state import forget_states
from kvloom.integrations.transformers.invariance import expect_wish, hold_layers, release_layers
from kvloom.integrations.transformers.models.cache_argument import (
    CACHE_ARGUMENT,
    CACHE_ARGUMENTS,
    argument_of,
    as_argument,
    given_cache,
)
from kvloom.integrations.transformers.models.text_config import expect_model, text_config_of
from kvloom.integrations.transformers.session import SESSIONS, put_beneath
from kvloom.integrations.transformers.session.drafts.generate import GENERATE, Generate
from kvloom.integrations.transformers.stock_caches import StockCaches, is_default

_LOG: Final = logging.getLogger("kvloom")
_ENABLED: Final = "_kvloom_enabled"
_PREPARE: Final = "_prepare_cache_for_generation"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def enable(
    model: Any,
    kv: str | Path = "auto",
    *,
    batch_invariant: bool | None = None,
    pack: bool | str = False,
    verbose: bool = False,
    **options: Any,
) -> None:
    """Let a model use a ``KVCache``, and attention that reads it in place, wherever it is given no cache.

    This applies to ``model.generate``, to pipelines of the model, and to ``model(...)`` where a cache is
    used. A cache or ``cache_implementation`` of the caller takes precedence, and so does an attention
    implementation that is set later. A copy of the model is enabled, too. Enabling again replaces the
    arguments. ``generate`` also takes ``prompt_lookup_num_tokens`` for several rows, on a CPU. ``disable``
    undoes it. Disable the model before training, since the cache passes no gradient,
    and before an export with a cache, which raises ``UnsupportedError`` otherwise.

    Args:
        model: A ``PreTrainedModel`` that generates, or a ``PeftModel`` around one.
        kv: Cache format of keys and values, as in ``KVCache.for_model``.
        batch_invariant: Whether linear layers, experts and activations give a token the same bits in any
            batch, and however its text is cut into forwards. ``None`` means wherever it takes no more time:
            in bfloat16, and with ``pack``. A step of one token in float32 takes about twice the time. On
            processors with AMX, ``True`` also makes attention in bfloat16 batch invariant, which is slower
            for prompts: ``ops.BatchInvariance``.
        pack: Whether linear layers also keep their weights in the order in which oneDNN reads them, which
            takes less time and the memory of a second copy; ``"only"`` keeps no other copy.
        verbose: Whether to write what was done to standard error, too, in the line that the log ``kvloom``
            has at INFO.
        options: The other arguments of ``KVCache.for_model``.

    Raises:
        ArgumentError: ``model`` is no model, an argument has an invalid value, or as ``KVCache.for_model``;
            nothing was changed.
        UnsupportedError: the model takes no cache; nothing was changed. Layers without keys and values, and
            attention that cannot be replaced, stay unchanged; a WARNING names them.
    """
    model = _base_of(model)
    expect_model(model)
    if argument_of(model) is None:
        raise UnsupportedError(f"{type(model).__name__} takes no cache")
    cache = KVCache.for_model(model, kv, **options)
    wish = expect_wish(model, batch_invariant, pack)
    disable(model)
    hold_layers(model, _ENABLED, wish)
    setattr(model, _ENABLED, _Enabled(model, {"kv": kv, **options}))
    done = _done(model, cache, str(kv))
    _LOG.info(done)
    if verbose:
        sys.stderr.write(f"kvloom: {done}\n")


def _done(model: PreTrainedModel, cache: KVCache, kv: str) -> str:
    """A line that says what ``enable`` did."""
    attention = text_config_of(model)._attn_implementation
    kept = [layer for layer in cache.layers if isinstance(layer, KVCacheLayer)]
    smoothed = sum(layer.pages.format.smoothing is not None for layer in kept)
    where = "reads its pages in place" if attention == IMPLEMENTATION else f"stays {attention!r}"
    return (
        f"{type(model).__name__} keeps kv={kv!r} in {len(kept)} of {len(cache.layers)} layers, smoothed keys "
        f"in {smoothed}; attention {where}"
    )


def disable(model: Any) -> None:
    """Undo ``enable``: restore the caches and the attention that the model had before.

    An attention implementation that was set in between stays. A model that is not enabled is unchanged.

    Raises:
        ArgumentError: ``model`` is no model, such as a module around one.
    """
    given, model = model, _base_of(model)
    expect_model(model)
    enabled = getattr(model, _ENABLED, None)
    if enabled is not None:
        enabled.remove(model)
        forget_states(given)
        forget_states(model)
        delattr(model, _ENABLED)
        release_layers(model, _ENABLED)


def _base_of(model: Any) -> Any:
    """The model within a ``PeftModel``, which calls its ``generate`` and forward; else the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Enabled:
    """Changes of an enabled model, and the options of its caches.

    It has no reference to the model, so copies of the model can share it.

    Attributes:
        options: Arguments of ``KVCache.for_model``.
        stock_caches: What is said of caches that the caller asks for instead.
    """

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.options, self.stock_caches = options, StockCaches()
        hold_attention(model, _ENABLED)
        if (attention := text_config_of(model)._attn_implementation) != IMPLEMENTATION:
            _LOG.warning("attention of %s stays %r: it cannot be replaced", type(model).__name__, attention)
        self._hook = model.register_forward_pre_hook(_ForwardHook(self), with_kwargs=True)
        if hasattr(type(model), _PREPARE):
            setattr(model, _PREPARE, _PrepareCache(model, self))
            setattr(model, VALIDATE, ValidateMode(model))
            if Generate.suits(model):
                setattr(model, GENERATE, Generate(model))
        put_beneath(model, _TheirSessions(model))

    def remove(self, model: PreTrainedModel) -> None:
        """Undo the changes of a model."""
        self._hook.remove()
        for name in vars(model).keys() & {_PREPARE, VALIDATE, GENERATE}:
            delattr(model, name)
        put_beneath(model, None)
        release_attention(model, _ENABLED)

    def cache(self, model: PreTrainedModel) -> Any:
        """An empty cache for ``model``."""
        return KVCache.for_model(model, **self.options)


class _TheirSessions:
    """Replacement of the method that makes a session of transformers' own, with the attention of before.

    Such sessions refuse kvloom's attention, which comes back when the session stops.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, begin = self._model, getattr(type(self._model), SESSIONS)
        if text_config_of(model)._attn_implementation != IMPLEMENTATION:
            return begin(model, *args, **kwargs)
        set_attention(model, attention_before(model))
        try:
            manager = begin(model, *args, **kwargs)
        except BaseException:
            set_attention(model, IMPLEMENTATION)
            raise
        manager._original_attn_impl = named_for(model, IMPLEMENTATION)
        return manager


class _ForwardHook:
    """Forward pre-hook that adds a cache if the forward uses one and none is given."""

    def __init__(self, enabled: _Enabled) -> None:
        self._enabled = enabled

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        if given_cache(kwargs) is not None or kwargs.get("use_cache") is False:
            return None
        if torch.compiler.is_exporting():
            return self._with_cache(model, args, kwargs)
        changed: _Arguments | None = _between_graphs(self._with_cache, model, args, kwargs)
        return changed

    def _with_cache(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        signature = inspect.signature(model.forward)
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if given_cache(given) is not None or not _uses_cache(model, given.get("use_cache")):
            return None
        if torch.compiler.is_exporting():
            raise UnsupportedError(
                "an enabled model has a cache that no exported graph has: disable(model) before the export, "
                "or export with use_cache=False"
            )
        kwargs = {key: value for key, value in kwargs.items() if key not in CACHE_ARGUMENTS}  # ``None``
        argument = as_argument(model, self._enabled.cache(model))
        ((name, cache),) = argument.items()
        where = list(signature.parameters).index(name)
        if where < len(args):
            return (*args[:where], cache, *args[where + 1 :]), kwargs
        return args, kwargs | argument


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="kvloom makes the cache of an enabled model outside of graphs: use fullgraph=True with a cache "
    "that is given to the model"
)
def _between_graphs(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _uses_cache(model: PreTrainedModel, use_cache: bool | None) -> bool:
    """Whether a forward keeps keys and values; ``None`` means as the configuration says."""
    return bool(getattr(text_config_of(model), "use_cache", False) if use_cache is None else use_cache)


def _expect_new_tokens(
    cache: KVCache, generation_config: Any, model_kwargs: dict[str, Any], *, is_of_encoder: bool
) -> None:
    """Raise ArgumentError if ``generate`` would feed tokens again that a cache has.

    Args:
        cache: The cache.
        generation_config: The configuration of ``generate``.
        model_kwargs: Its other arguments.
        is_of_encoder: Whether the attention mask is of what an encoder reads.
    """
    if generation_config.use_cache is False:
        raise ArgumentError(
            "use_cache must be True with a cache, which generate fills with the whole text in each step "
            "otherwise, got False: pass use_cache=True, or no cache"
        )
    mask = model_kwargs.get("attention_mask")
    length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]
    held = int(cache.get_seq_length())
    if not is_of_encoder and length is not None and 0 < length <= held:
        raise ArgumentError(
            f"input_ids must have tokens that are not in the cache, got {length} and a cache of {held}: "
            "give the whole text, after crop(-1) if the cache has all of it"
        )


def _expect_all_seen(given: KVCache, own: Any, model: PreTrainedModel) -> None:
    """Raise ArgumentError if a layer of the ``given`` cache drops tokens that the model attends to.

    Args:
        given: The caller's cache, perhaps of another model.
        own: An empty cache for ``model``.
        model: The model.
    """
    for i, (layer, wanted) in enumerate(zip(given.layers, own.layers, strict=False)):
        window, seen = getattr(layer, "window", None), getattr(wanted, "window", None)
        if window is not None and (seen is None or window < seen):
            raise ArgumentError(
                f"cache must keep what {type(model).__name__} attends to, got the last {window} tokens in "
                f"layer {i}, which attends to {seen or 'all'}: make it with KVCache.for_model of this model"
            )


class _PrepareCache:
    """Replacement of ``generate``'s method that makes a cache if the caller gave none."""

    def __init__(self, model: PreTrainedModel, enabled: _Enabled) -> None:
        self._model = model
        self._enabled = enabled

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        model, given = self._model, given_cache(model_kwargs)
        is_given = given is not None
        if generation_config.use_cache is not False:
            name = None if is_given else generation_config.cache_implementation
            self._enabled.stock_caches.expect(model, name, given)
        if isinstance(given, KVCache):
            of_encoder = model.config.is_encoder_decoder
            _expect_new_tokens(given, generation_config, model_kwargs, is_of_encoder=of_encoder)
            _expect_all_seen(given, self._enabled.cache(model), model)
        result = getattr(type(model), _PREPARE)(model, generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(CACHE_ARGUMENT)
        if made is not None and not is_given and is_default(generation_config.cache_implementation):
            model_kwargs[CACHE_ARGUMENT] = cache = self._enabled.cache(model)
            if isinstance(cache, KVCache):
                cache.remembered.claim()
            # Removing an assistant's drafts may need tokens that a window no longer keeps.
            if generation_config.is_assistant and hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()
        prepare_drafts(model, given_cache(model_kwargs), generation_config, (*args, *kwargs.values()))
        return result
