"""A store below the pages of a session: what prompts begin with is read while others are computed."""

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

from kvloom.caches.prefix_group import PrefixGroup
from kvloom.caches.prefixes import Needed
from kvloom.errors import OutOfPages
from kvloom.integrations.transformers.identity import Identity
from kvloom.paging import PageRef
from kvloom.store.below import StoreBelow
from kvloom.store.readers import Readers
from kvloom.store.store import KVStore
from kvloom.store.tier import Piece
from kvloom.store.transfer import layers_of

_MOST: Final = 4
"""Requests for which stores are read at once: what comes is held until they begin."""


class Read(NamedTuple):
    """What is read of a text, ahead of the request that needs it.

    Attributes:
        asked: The arguments of ``StoreBelow.load`` that it answers: salt, start and tokens.
        pieces: Those, and what the store had behind them.
    """

    asked: tuple[str, int, list[int]]
    pieces: Future[list[Piece]]


class Part(NamedTuple):
    """What stores had behind the full pages of a prompt.

    Attributes:
        end: Tokens of the prompt that are known with it.
        refs: The page of each group, held by the caller.
        is_end: Whether a text of a session ended there.
    """

    end: int
    refs: list[PageRef]
    is_end: bool


class SessionBelow(StoreBelow):
    """The store below one group of layers of a session; arguments as of a pool.

    Attributes:
        now: What is read for the request that begins; ``None`` for nothing.
    """

    def __init__(self, *args: Any) -> None:
        self._ahead: dict[tuple[Any, ...], Read] = {}
        self.now: Read | None = None
        super().__init__(*args)

    def read_ahead(self, readers: Readers, needed: Needed, rest: Sequence[int], salt: str) -> "Read | None":
        """Begin to ``load`` what a text lacks; ``None`` if the store has nothing that continues it.

        Args:
            readers: Who read.
            needed: Of the text.
            rest: Tokens behind it that may fill a page in part.
            salt: Under which the store has it.
        """
        tokens, start = [*needed.tokens, *rest], needed.start
        if start >= len(tokens) or self.store.find(self.fingerprint, salt, tokens, start) <= start:
            return None
        key = salt, start, tuple(tokens)
        if key not in self._ahead:
            pieces = readers.submit(partial(super().load, tokens, start, salt))
            self._ahead[key] = Read((salt, start, list(needed.tokens)), pieces)
        return self._ahead[key]

    def forget(self, read: "Read") -> None:
        """Nobody waits for what was read any more."""
        read.pieces.cancel()
        self._ahead = {key: x for key, x in self._ahead.items() if x is not read}

    def load(self, tokens: Sequence[int], start: int, salt: str) -> list[Piece]:
        """As that of a pool, or what was read ahead."""
        read = self.now
        if read is None or read.asked != (salt, start, [*tokens]) or read.pieces.cancelled():
            return super().load(tokens, start, salt)
        return read.pieces.result()


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
        self.state, self._groups, self._readers = state, groups, Readers(_MOST)
        self._reads: dict[str, list[tuple[SessionBelow, Read]]] = {}
        own = zip(identity.fingerprints, identity.storages, strict=True)
        of_layers = {_name(storages): (fingerprint, storages) for fingerprint, storages in own}
        model = identity.seconds_per_token, identity.probe
        self._below = [
            SessionBelow(store, group.pages, group.tree, *of_layers[_name(group.storages)], *model)
            for group in groups
        ]
        for group, below in zip(groups, self._below, strict=True):
            group.below = below

    def is_read(
        self, request_id: str, needed: Callable[[], Sequence[tuple[Needed, Sequence[int]]]], salt: str
    ) -> bool:
        """Whether a request may begin, as nothing is read for it any more. The first call begins to read.

        Args:
            request_id: Of the request.
            needed: Says what each group needs of its prompt, and the tokens behind that may be in part of a
                page.
            salt: Under which stores have it.
        """
        if request_id not in self._reads:
            if sum(map(bool, self._reads.values())) >= _MOST:
                return False
            begun = [
                (below, below.read_ahead(self._readers, own, rest, salt))
                for below, (own, rest) in zip(self._below, needed(), strict=True)
            ]
            self._reads[request_id] = [(below, read) for below, read in begun if read is not None]
            for _, read in self._reads[request_id]:
                read.pieces.add_done_callback(self._on_read)
        return self.is_done(request_id)

    def is_done(self, request_id: str) -> bool:
        """Whether nothing is read for a request any more, or yet."""
        return all(read.pieces.done() for _, read in self._reads.get(request_id, ()))

    def has(self, request_id: str) -> bool:
        """Whether something was read for a request."""
        return bool(self._reads.get(request_id))

    def begin(self, request_id: str) -> None:
        """What was read for a request is what stores have, until it is dropped."""
        for below, read in self._reads.get(request_id, ()):
            below.now = read

    def take_part(self, num_tokens: int, most: int) -> "Part":
        """The page that stores have in part, for the request that begins.

        Args:
            num_tokens: In the full pages of its prompt that are known.
            most: That may be found.

        Returns:
            Without pages if a store has none, or there is no room for them.
        """
        found = []
        for below in self._below:
            read = below.now
            pieces = [] if read is None or read.pieces.cancelled() else read.pieces.result()
            behind = [piece for piece in pieces if piece.segment.end > num_tokens]
            found.append(behind if behind and behind[0].segment.start <= num_tokens else [])
        end = min([most, *(pieces[-1].segment.end if pieces else 0 for pieces in found)])
        refs: list[PageRef] = []
        size = self._groups[0].pages.format.page_size
        if not 0 < end - num_tokens < size or not all(below.has_storages() for below in self._below):
            return Part(num_tokens, refs, False)
        try:
            for group, below, pieces in zip(self._groups, self._below, found, strict=True):
                group.make_room(1)
                refs += group.pages.pool.take(1)
                below.write_part(pieces, refs[-1], num_tokens, end)
        except (OutOfPages, MemoryError):
            for group, ref in zip(self._groups, refs, strict=False):
                group.pages.pool.release(ref)
            return Part(num_tokens, [], False)
        return Part(end, refs, all(_ends_text(pieces[-1], end) for pieces in found))

    def keep_part(self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str) -> None:
        """Give stores the last page of a text, in part full, of each group."""
        for below, ref in zip(self._below, refs, strict=True):
            below.keep_part(tokens, ref, salt)

    def drop(self, request_id: str) -> None:
        """The request has begun, or never will."""
        for below, read in self._reads.pop(request_id, ()):
            below.now = None
            below.forget(read)

    def keep_only(self, waiting: Container[str]) -> None:
        """``drop`` all requests that do not wait."""
        for request_id in [x for x in self._reads if x not in waiting]:
            self.drop(request_id)

    def report(self) -> dict[str, Any]:
        """As ``KVStore.report``, and how long computing takes."""
        return self._below[0].report()


def _ends_text(piece: Piece, end: int) -> bool:
    """Whether ``end`` is that of a run of pages of one token, as ``StoreBelow.keep_part`` writes them."""
    run = piece.run
    return run.page_size == 1 and run.first + len(run.digests) == end


def _name(storages: Any) -> tuple[Any, ...]:
    """Which layers keep what."""
    return tuple(sorted(storages)), layers_of(storages)
