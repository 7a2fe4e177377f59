"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence

from kvloom.integrations.transformers.batching.held import Held
from kvloom.integrations.transformers.origin import scope_of
from kvloom.integrations.transformers.watch import ModelWatch
from kvloom.paging import PageRef, PrefixTree


class SessionPrefixes:
    """Finds and publishes pages of a session.

    A model may change while a session is paused. Requests that begin afterwards find no pages of before, and
    those that ran meanwhile publish none, as some of their tokens were computed before and some afterwards.

    Attributes:
        state: Of the model when the present step began.

    Args:
        tree: Of the pages.
        watch: Of the model; ``None`` for one that never changes.
    """

    def __init__(self, tree: PrefixTree, watch: ModelWatch | None = None) -> None:
        self._tree, self._watch = tree, watch
        self.state = ""

    def refresh(self, is_thorough: bool = False) -> None:
        """Learn the state of the model: before each step, and thoroughly before pages are found."""
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Where the tree has the pages of a salt now."""
        return scope_of(salt, state=self.state)

    def num_known(self, tokens: Sequence[int], salt: str, max_tokens: int) -> int:
        """Pages that would be found of some tokens."""
        return self._tree.num_known(tokens, self.scope(salt), max_tokens=max_tokens)

    def match(self, tokens: Sequence[int], salt: str, max_tokens: int) -> list[PageRef]:
        """Those pages, held by the caller."""
        self.refresh(is_thorough=True)
        return self._tree.match(tokens, self.scope(salt), max_tokens=max_tokens)

    def publish(self, held: Held, tokens: Sequence[int]) -> None:
        """Let others find the full pages of a request that began in the present state."""
        self.refresh(is_thorough=True)
        if held.state != self.state:
            return
        held.table.claim()
        refs = self._tree.insert(tokens, held.table.pages, self.scope(held.salt))
        if refs != [*held.table.pages]:
            held.table.replace(refs)
            held.first_slots = None
