"""A store below the pages of a session: what prompts begin with is read while others are computed."""

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from kvloom.caches.prefix_group import PrefixGroup
from kvloom.caches.prefixes import Needed
from kvloom.integrations.transformers.identity import Identity
from kvloom.store.below import StoreBelow
from kvloom.store.readers import Readers
from kvloom.store.store import KVStore
from kvloom.store.tier import Piece
from kvloom.store.transfer import layers_of

_MOST: Final = 4
"""Requests for which stores are read at once: what comes is held until they begin."""


class SessionBelow(StoreBelow):
    """The store below one group of layers of a session; arguments as of a pool."""

    def __init__(self, *args: Any) -> None:
        self._ahead: dict[tuple[Any, ...], Future[list[Piece]]] = {}
        super().__init__(*args)

    def read_ahead(self, readers: Readers, needed: Needed, salt: str) -> Future[list[Piece]] | None:
        """Begin to ``load`` what a text lacks; ``None`` if the store has nothing that continues it."""
        tokens, start = needed.tokens, needed.start
        if start >= len(tokens) or self.store.find(self.fingerprint, salt, tokens, start) <= start:
            return None
        key = salt, start, tuple(tokens)
        if key not in self._ahead:
            self._ahead[key] = readers.submit(partial(super().load, tokens, start, salt))
        return self._ahead[key]

    def forget(self, read: Future[list[Piece]]) -> None:
        """Nobody waits for what was read any more."""
        read.cancel()
        self._ahead = {key: x for key, x in self._ahead.items() if x is not read}

    def load(self, tokens: Sequence[int], start: int, salt: str) -> list[Piece]:
        """As that of a pool, or what was read ahead."""
        read = self._ahead.get((salt, start, tuple(tokens)))
        return super().load(tokens, start, salt) if read is None or read.cancelled() else read.result()


class StoreReads:
    """What is read for the requests of a session that wait. Whoever calls holds the lock of the session.

    Args:
        store: Where pages are.
        groups: Of layers, below which it is put.
        identity: Of the model in one of its states.
        state: The name of that state, as of ``ModelWatch``.
        on_read: Called in any thread when something was read.

    Attributes:
        state: As above; in another state nothing is read nor written.
    """

    def __init__(
        self,
        store: KVStore,
        groups: Sequence[PrefixGroup],
        identity: Identity,
        state: str,
        on_read: Callable[[], None],
    ) -> None:
        self._on_read: Callable[[object], None] = lambda read: on_read()
        self.state, self._readers = state, Readers(_MOST)
        self._reads: dict[str, list[tuple[SessionBelow, Future[list[Piece]]]]] = {}
        own = zip(identity.fingerprints, identity.storages, strict=True)
        of_layers = {_name(storages): (fingerprint, storages) for fingerprint, storages in own}
        model = identity.seconds_per_token, identity.probe
        self._below = [
            SessionBelow(store, group.pages, group.tree, *of_layers[_name(group.storages)], *model)
            for group in groups
        ]
        for group, below in zip(groups, self._below, strict=True):
            group.below = below

    def is_read(self, request_id: str, needed: Callable[[], Sequence[Needed]], salt: str) -> bool:
        """Whether a request may begin, as nothing is read for it any more. The first call begins to read.

        Args:
            request_id: Of the request.
            needed: Says what each group needs of its prompt.
            salt: Under which stores have it.
        """
        if request_id not in self._reads:
            if sum(map(bool, self._reads.values())) >= _MOST:
                return False
            begun = [
                (below, below.read_ahead(self._readers, own, salt))
                for below, own in zip(self._below, needed(), strict=True)
            ]
            self._reads[request_id] = [(below, read) for below, read in begun if read is not None]
            for _, read in self._reads[request_id]:
                read.add_done_callback(self._on_read)
        return self.is_done(request_id)

    def is_done(self, request_id: str) -> bool:
        """Whether nothing is read for a request any more, or yet."""
        return all(read.done() for _, read in self._reads.get(request_id, ()))

    def has(self, request_id: str) -> bool:
        """Whether something was read for a request."""
        return bool(self._reads.get(request_id))

    def drop(self, request_id: str) -> None:
        """The request has begun, or never will."""
        for below, read in self._reads.pop(request_id, ()):
            below.forget(read)

    def keep_only(self, waiting: Container[str]) -> None:
        """``drop`` all requests that do not wait."""
        for request_id in [x for x in self._reads if x not in waiting]:
            self.drop(request_id)

    def report(self) -> dict[str, Any]:
        """As ``KVStore.report``, and how long computing takes."""
        return self._below[0].report()


def _name(storages: Any) -> tuple[Any, ...]:
    """Which layers keep what."""
    return tuple(sorted(storages)), layers_of(storages)
