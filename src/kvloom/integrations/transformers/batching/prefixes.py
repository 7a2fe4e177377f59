"""Prefixes that the requests of a session share, under their salts and in one state of the model."""

from collections.abc import Sequence

from kvloom.caches.prefixes import Prefixes
from kvloom.integrations.transformers.batching.groups import SessionGroup
from kvloom.integrations.transformers.batching.held import Held
from kvloom.integrations.transformers.origin import scope_of
from kvloom.integrations.transformers.watch import ModelWatch
from kvloom.paging import PageRef


class SessionPrefixes(Prefixes):
    """Finds and publishes pages of a session.

    A model may change while a session is paused. Requests that begin afterwards find no pages of before, and
    those that ran meanwhile publish none, as some of their tokens were computed before and some afterwards.

    Attributes:
        state: Of the model when the present step began.

    Args:
        groups: Those of the session.
        watch: Of the model; ``None`` for one that never changes.
    """

    def __init__(self, groups: Sequence[SessionGroup], watch: ModelWatch | None = None) -> None:
        super().__init__(groups)
        self._watch = watch
        self.state = ""

    def refresh(self, is_thorough: bool = False) -> None:
        """Learn the state of the model: before each step, and thoroughly before pages are found."""
        if self._watch is not None:
            self.state = self._watch.state() if is_thorough else self._watch.quick_state()

    def scope(self, salt: str) -> str:
        """Where the trees have the pages of a salt now."""
        return scope_of(salt, state=self.state)

    def find(self, tokens: Sequence[int], salt: str, max_tokens: int) -> tuple[int, list[list[PageRef]]]:
        """Retain the pages of the longest prefix that is known.

        Args:
            tokens: Of the prompt.
            salt: Under which they are known.
            max_tokens: Of the prefix.

        Returns:
            Pages of the prefix, and those of each group that it needs, held by the caller.
        """
        self.refresh(is_thorough=True)
        scope = self.scope(salt)
        num_pages = self.num_known(tokens, scope, max_tokens)
        return num_pages, [
            group.tree.match(tokens, scope, max_tokens=max_tokens, num_pages=num_pages)
            for group in self.groups
        ]

    def publish(self, held: Held, tokens: Sequence[int]) -> None:
        """Let others find the full pages of a request that began in the present state."""
        self.refresh(is_thorough=True)
        if held.state != self.state:
            return
        self.seal(held.groups, tokens, self.scope(held.salt), held.num_shared)
        if held.num_shared * self.page_size <= len(tokens):
            held.num_shared = 0
