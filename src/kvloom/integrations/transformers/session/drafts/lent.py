"""``LentModel``: a model that drafts for the sessions of another, and is as before between them."""

from typing import Any

from kvloom.errors import StateError
from kvloom.integrations.transformers.attention.latents import SESSION_ATTENTION
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.invariance import Wish, hold_layers, release_layers
from kvloom.integrations.transformers.models.text_config import text_config_of
from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.drafts.assistant import Assistant
from kvloom.integrations.transformers.session.requests.groups import Limits, page_bytes, token_layers_of


class LentModel:
    """A model that drafts for the sessions of another.

    Its keys and values are kept in its own dtype. A model that drafts for itself is not changed again.

    Args:
        model: The assistant.
        user: The model of the session.
        page_size: Tokens in a page.
        holder: Name of the session, for changes of layers.
        wish: Changes of its layers during a session.
    """

    def __init__(self, model: Any, user: Any, page_size: int, holder: str, wish: Wish) -> None:
        self._model, self._user, self._holder, self._wish = model, user, holder, wish
        self._before: str | None = None  # its attention, while a session needs another one
        self._layers = token_layers_of(model)
        self._format = cache_format(text_config_of(model), "auto", page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return page_bytes(self._layers, self._format)

    def begin(self) -> None:
        """Give the model the attention and the layers of a session.

        Raises:
            StateError: another session has it; nothing was changed.
        """
        if self._before is not None or self._model is self._user:
            return
        expect_free(self._model)
        hold_layers(self._model, self._holder, self._wish)
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(SESSION_ATTENTION)
        self._model.eval()

    def end(self) -> None:
        """Restore the model as it was before ``begin``."""
        if self._before is not None:
            self._model.set_attn_implementation(self._before)
            release_layers(self._model, self._holder)
            self._before = None

    def assistant(self, max_pages: int, limits: Limits, share: bool, policy: str) -> Assistant:
        """A new assistant, with as many pages as the session.

        Args:
            max_pages: Largest number of pages.
            limits: Requests and tokens of a step of the session.
            share: Whether texts find pages of others.
            policy: Which pages are evicted first.
        """
        own = Limits(self._layers, self._format, limits.num_requests, limits.max_batch_tokens)
        where = text_config_of(self._model), own, self._model.device
        return Assistant(self._model, BatchCache(*where, max_pages=max_pages, share=share, policy=policy))


def expect_free(model: Any) -> None:
    """Raise StateError if a session has a model."""
    if model.config._attn_implementation == SESSION_ATTENTION:
        raise StateError(f"drafts must be a model that no session holds, got {type(model).__name__} of one")
