"""A store below the pages of a session: prefixes of prompts are read while other requests are computed."""

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.search import Needed
from kvloom.core.text import Text
from kvloom.errors import OutOfPages
from kvloom.integrations.transformers.pool.identity import Identity
from kvloom.integrations.transformers.session.requests.prompt import Prompt
from kvloom.paging import PageRef
from kvloom.store.below import StoreBelow
from kvloom.store.store import KVStore
from kvloom.store.tiers.readers import Readers
from kvloom.store.tiers.tier import ReadPages
from kvloom.store.transfer import entries_of

_MOST: Final = 4
"""Largest number of requests for which stores are read at once, since results are held in memory."""


class Read(NamedTuple):
    """Pieces of a text that are read before the request that needs them begins.

    Attributes:
        asked: Arguments of the ``StoreBelow.load`` that it replaces: salt, start and tokens.
        pieces: Pieces of these tokens, and of tokens after them that the store had.
    """

    asked: tuple[str, int, Sequence[int]]
    pieces: Future[list[ReadPages]]


class PartialPage(NamedTuple):
    """Partial page that stores had after the full pages of a prompt.

    Attributes:
        end: Number of tokens of the prompt that are known with it.
        refs: The page of each group, held by the caller.
        is_end: Whether a text of a session ended there.
    """

    end: int
    refs: list[PageRef]
    is_end: bool


class SessionBelow(StoreBelow):
    """The store below one group of layers of a session; arguments as for a pool.

    Attributes:
        now: Read of the request that begins; ``None`` for none.
    """

    def __init__(self, *args: Any) -> None:
        self._ahead: dict[tuple[Any, ...], Read] = {}
        self.now: Read | None = None
        super().__init__(*args)

    def read_ahead(self, readers: Readers, needed: Needed, text: Text, salt: str) -> "Read | None":
        """Start to ``load`` the missing part of a text; ``None`` if the store has no continuation of it.

        Args:
            readers: Threads that read.
            needed: First tokens of the text, and the first missing one.
            text: These, and tokens after them that may fill a page in part.
            salt: Scope of the text in the store.
        """
        start = needed.start
        if start >= len(text) or self.store.find(self.fingerprint, salt, text, start) <= start:
            return None
        key = salt, start, tuple(text)
        if key not in self._ahead:
            pieces = readers.submit(partial(super().load, text, start, salt))
            self._ahead[key] = Read((salt, start, needed.tokens), pieces)
        return self._ahead[key]

    def forget(self, read: "Read") -> None:
        """Cancel and drop a read."""
        read.pieces.cancel()
        self._ahead = {key: x for key, x in self._ahead.items() if x is not read}

    def load(self, tokens: Sequence[int], start: int, salt: str) -> list[ReadPages]:
        """Pieces that were read ahead if they match the arguments, else as in a pool."""
        read = self.now
        if read is None or read.asked != (salt, start, tokens) or read.pieces.cancelled():
            return super().load(tokens, start, salt)
        return read.pieces.result()


class StoreReads:
    """Reads from a store for the waiting requests of a session. The caller holds the session's lock.

    Args:
        store: The store.
        groups: Groups of layers, below which it is put.
        identity: Identity of the model in one of its states.
        state: Name of that state, as in ``ModelWatch``.
        on_read: Called in any thread when a read is done.

    Attributes:
        state: As above; in other states nothing is read or written.
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
        self._texts: dict[str, Text] = {}
        own = zip(identity.fingerprints, identity.storages, strict=True)
        of_layers = {_name(storages): (fingerprint, storages) for fingerprint, storages in own}
        model = identity.seconds_per_token, identity.probe
        self._below = [
            SessionBelow(store, group.pages, group.tree, *of_layers[_name(group.storages)], *model)
            for group in groups
        ]
        for group, below in zip(groups, self._below, strict=True):
            group.below = below

    def is_read(self, prompt: Prompt, needed: Callable[[], Sequence[tuple[Needed, Text]]], salt: str) -> bool:
        """Whether a request may begin, since its reads are done. The first call starts them.

        Args:
            prompt: Prompt of the request.
            needed: Function that returns, for each group, the needed tokens of the prompt, and the text of
                these and of those after them that may fill a page in part.
            salt: Scope of the prompt in stores.
        """
        if prompt.name not in self._reads:
            if sum(map(bool, self._reads.values())) >= _MOST:
                return False
            begun = [
                (below, below.read_ahead(self._readers, own, text, salt))
                for below, (own, text) in zip(self._below, needed(), strict=True)
            ]
            self._texts[prompt.name] = prompt.text
            self._reads[prompt.name] = [(below, read) for below, read in begun if read is not None]
            for _, read in self._reads[prompt.name]:
                read.pieces.add_done_callback(self._on_read)
        return self.is_done(prompt.name)

    def is_done(self, request_id: str) -> bool:
        """Whether no read of a request is running."""
        return all(read.pieces.done() for _, read in self._reads.get(request_id, ()))

    def has(self, request_id: str) -> bool:
        """Whether there are reads for a request."""
        return bool(self._reads.get(request_id))

    def begin(self, prompt: Prompt) -> Text:
        """Let ``load`` return the reads of a request, until ``drop``; its text, whose digests are known."""
        for below, read in self._reads.get(prompt.name, ()):
            below.now = read
        text = self._texts.get(prompt.name)
        return prompt.text if text is None or text != prompt.text else text

    def take_part(self, num_tokens: int, most: int) -> "PartialPage":
        """The partial page that stores have, for the request that begins.

        Args:
            num_tokens: Number of tokens in the known full pages of its prompt.
            most: Largest number of tokens that may be found.

        Returns:
            A part without pages if a store has none, or if there is no room.
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
            return PartialPage(num_tokens, refs, False)
        try:
            for group, below, pieces in zip(self._groups, self._below, found, strict=True):
                group.pages.make_room(1)
                refs += group.pages.pool.take(1)
                below.write_part(pieces, refs[-1], num_tokens, end)
        except (OutOfPages, MemoryError):
            for group, ref in zip(self._groups, refs, strict=False):
                group.pages.pool.release(ref)
            return PartialPage(num_tokens, [], False)
        return PartialPage(end, refs, all(_ends_text(pieces[-1], end) for pieces in found))

    def keep_part(self, tokens: Sequence[int], refs: Sequence[PageRef], salt: str) -> None:
        """Pass the partial last page of a text in each group to stores."""
        for below, ref in zip(self._below, refs, strict=True):
            below.keep_part(tokens, ref, salt)

    def drop(self, request_id: str) -> None:
        """Drop the reads of a request that has begun or was cancelled."""
        self._texts.pop(request_id, None)
        for below, read in self._reads.pop(request_id, ()):
            below.now = None
            below.forget(read)

    def keep_only(self, waiting: Container[str]) -> None:
        """``drop`` the reads of all requests that are not waiting."""
        for request_id in [x for x in self._reads if x not in waiting]:
            self.drop(request_id)

    def report(self) -> dict[str, Any]:
        """Report of the store, as ``StoreBelow.report``."""
        return self._below[0].report()


def _ends_text(piece: ReadPages, end: int) -> bool:
    """Whether a segment with pages of one token, as ``StoreBelow.keep_part`` writes them, ends at ``end``."""
    run = piece.run
    return run.page_size == 1 and run.first + len(run.digests) == end


def _name(storages: Any) -> tuple[Any, ...]:
    """Key of a group of layers: their numbers and formats."""
    return tuple(sorted(storages)), entries_of(storages)
