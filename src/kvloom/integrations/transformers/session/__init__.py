"""transformers' continuous batching, such as ``generate_batch``, on pages of this library.

Importing this package imports only what every transformers has; the rest needs continuous batching.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from transformers import PreTrainedModel

from kvloom.core.checks import expect_range
from kvloom.errors import ArgumentError, StateError
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.invariance import expect_wish, hold_layers, release_layers
from kvloom.integrations.transformers.models.text_config import expect_model, text_config_of
from kvloom.integrations.transformers.session.drafts import expect_drafts, expect_verifiable
from kvloom.integrations.transformers.session.report import BatchReport, PageMap, RequestPages
from kvloom.integrations.transformers.session.served import SESSIONS, expect_served, expect_stored
from kvloom.integrations.transformers.versions import IS_4, OLDEST
from kvloom.paging import expect_policy

if TYPE_CHECKING:
    from kvloom.store import KVStore

__all__ = ["OLDEST", "SESSIONS", "BatchReport", "PageMap", "RequestPages", "continuous_batching"]

_MANAGER: Final = "_cached_continuous_batching_manager"


def continuous_batching(
    model: Any,
    kv: str | None = "auto",
    *,
    values: str | None = None,
    layout: str = "auto",
    share: bool = True,
    policy: str = "lru",
    batch_invariant: bool | None = None,
    pack: bool | str = False,
    state_interval: int | None = None,
    store: "KVStore | str | Sequence[str] | None" = None,
    drafts: PreTrainedModel | str | None = None,
) -> Any:
    """Let the continuous batching of a model keep its tokens in pages and attend to them in place.

    This applies to each new session of ``model.generate_batch``, ``model.init_continuous_batching`` and its
    context manager; their manager is then a ``BatchingManager``. Calling it again replaces the arguments.
    ``model.generate`` is unchanged; use ``enable`` for that, on the same model if needed.

    Args:
        model: A ``PreTrainedModel`` that generates text with causal attention, on one device.
        kv: Format of keys: ``"auto"`` for the model's dtype, ``"int8"``, ``"int4:g32"`` and the like, as in
            ``KVCache.for_model``. ``None`` restores the model's own continuous batching.
        values: Format of values; as ``kv`` if ``None``.
        layout: Axis order of the pages, as in ``CacheFormat``.
        share: Whether requests find pages that others computed for the same prefix under the same
            ``cache_salt``.
        policy: Which pages are evicted when others need room: ``"lru"``, those that no request held for
            longest, or ``"ours"``, those of least worth by the use of pages so far.
        batch_invariant: Whether a request has the same bits as alone, as in ``enable``, during a session.
            ``None`` means wherever the model is on a CPU, since steps of several tokens take no more time,
            except for attention in bfloat16 on processors with AMX.
        pack: Whether linear layers have packed weights, as in ``enable``, until ``kv=None``.
        state_interval: In a model with recurrent states, prefixes are found at multiples of this number of
            tokens: at the end of a prompt, and where two prompts begin to differ. A multiple of the page
            size; ``None`` for 256, or the next multiple.
        store: A ``KVStore``, or URLs as it takes them, such as ``"file:///var/cache/kvloom"``. Prompts find
            prefixes that any process computed, also with a ``KVPool`` of this model and ``kv``. It is read
            while other requests are computed, and written in the background. The model computes 128 tokens
            before a session, and its weights are read once.
        drafts: ``"lookup"`` lets steps also compute up to 15 tokens after the newest one of a request: those
            that followed where its last tokens came before in its prompt and answer. They are verified, so
            tokens and log probabilities have the bits that they have without. It needs a CPU and batch
            invariance, also of mixers with recurrent states; sessions with ``do_sample`` are refused. A
            smaller ``PreTrainedModel`` with the same tokens also writes drafts, as an assistant, where lookup
            finds none or is less often right. It has as many pages as the session, and its own attention and
            layers between sessions.

    Returns:
        ``model``.

    Raises:
        ArgumentError: ``model`` is no model, ``store`` is no URL of a store or ``share`` is false with it,
            ``drafts`` has other tokens, or as ``KVCache.for_model``; nothing was changed.
        ModuleNotFoundError: a library that the store needs is not installed; nothing was changed.
        UnsupportedError: the model, its assistant or this version of transformers is not supported, or a few
            tokens in a session have other logits than in a plain forward; nothing was changed.
        StateError: a session of the model is running; nothing was changed.
    """
    expect_model(model)
    if kv is None:
        _forget_session(model)
        beneath = _beneath(model)
        vars(model).pop(SESSIONS, None)
        put_beneath(model, beneath)
        release_layers(model, SESSIONS)
        return model
    if not isinstance(share, bool):
        raise ArgumentError(f"share must be True or False, got {share!r}")
    if store is not None and not share:
        raise ArgumentError("share must be True with a store, got False")
    expect_policy(policy)
    if state_interval is not None:
        expect_range("state_interval", state_interval, 1)
    wish = expect_wish(model, batch_invariant, pack, is_free=True)
    expect_served(model)
    expect_drafts(model, drafts, wish)
    cache_format(text_config_of(model), kv, values=values, layout=layout)  # raises for invalid formats
    if store is not None:
        expect_stored(model)
        from kvloom.store.store import open_store

        store = open_store(store)
    from kvloom.integrations.transformers.session.self_check import expect_same_logits

    expect_same_logits(model)
    if isinstance(drafts, PreTrainedModel):
        expect_same_logits(drafts)
    _forget_session(model)
    if pack:
        hold_layers(model, SESSIONS, wish)
    else:
        release_layers(model, SESSIONS)
    options: dict[str, Any] = {"kv": kv, "values": values, "layout": layout, "share": share, "policy": policy}
    options |= {"wish": wish, "state_interval": state_interval, "store": store, "drafts": drafts}
    model.init_continuous_batching = _Init(model, options, _beneath(model))
    return model


def has_sessions(model: Any) -> bool:
    """Whether sessions of a model are those of ``continuous_batching``."""
    return isinstance(vars(model).get(SESSIONS), _Init)


def put_beneath(model: Any, method: Any) -> None:
    """Set what makes sessions of transformers' own, without ``continuous_batching``.

    Args:
        model: A model.
        method: Replacement of the method that makes them; ``None`` for the model's own.
    """
    present = vars(model).get(SESSIONS)
    if isinstance(present, _Init):
        present.beneath = method
    elif method is None:
        vars(model).pop(SESSIONS, None)
    elif hasattr(type(model), SESSIONS) and not IS_4:
        setattr(model, SESSIONS, method)


def _beneath(model: Any) -> Any:
    """What makes sessions of transformers' own, unless it is the model's own method: ``None``."""
    present = vars(model).get(SESSIONS)
    return present.beneath if isinstance(present, _Init) else present


class _Init:
    """Replacement of the model's method that makes a manager.

    Attributes:
        beneath: What made managers before; ``None`` for the model's own method.
    """

    def __init__(self, model: PreTrainedModel, options: dict[str, Any], beneath: Any) -> None:
        self._model, self._options, self.beneath = model, options, beneath

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        from kvloom.integrations.transformers.session.manager import BatchingManager
        from kvloom.integrations.transformers.session.self_check import expect_same_logits

        kept = getattr(self._model, _MANAGER, None)
        if isinstance(kept, BatchingManager):
            kept.switch_to_cb_friendly_attn(self._model)
            return kept
        expect_same_logits(self._model)  # the model may have other weights or another dtype by now
        configs = generation_config, continuous_batching_config, workload_hints
        if isinstance(self._options["drafts"], PreTrainedModel):
            expect_same_logits(self._options["drafts"])
        manager = BatchingManager(self._model, *configs, **self._options)
        if self._options["drafts"] is not None:
            expect_verifiable(manager)
        return manager


def _forget_session(model: PreTrainedModel) -> None:
    """Drop the manager that is kept for the next session, since it has the earlier arguments."""
    kept = getattr(model, _MANAGER, None)
    if kept is None:
        return
    if kept.is_running():
        raise StateError("model must have no running session of continuous batching, stop it first")
    model.destroy_cached_continuous_batching_manager()
