"""``Held``: the pages and states that a request of a session holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.cache_utils import Cache

from kvloom.caches.rows.row import Row
from kvloom.integrations.transformers.session.report import PageMap, RequestPages
from kvloom.integrations.transformers.session.requests.prompt import Prompt
from kvloom.integrations.transformers.session.requests.state_rows import RequestStates
from kvloom.paging import PagePool, PageTable


@dataclass(slots=True, eq=False)
class Held:
    """Pages and states of one request.

    Attributes:
        prompt: Its prompt when it began.
        groups: Its pages in each group of layers.
        num_found: Number of tokens of its prompt whose pages were found.
        state: State of the model when the request began, as ``ModelWatch`` names it.
        num_shared: Number of pages that its prompt shares with a known text; 0 once these are preferred.
        states: Its recurrent states; ``None`` before it has any.
        passed: Its recurrent states behind the first tokens of a step that may be taken back, by number of
            tokens.
        wanted: Numbers of tokens after which copies of its states are kept for others.
        kept: These copies by number of tokens, until they are published.
        went_on: Number of tokens of the last published states that it continued from; 0 for none.
        published: Its tokens whose pages others can find.
        num_stored: Number of these tokens that a store below was given, or had.
        guesses: ``Guesses`` of what follows, from which drafts are taken; ``None`` before the first.
    """

    prompt: Prompt
    groups: list[Row]
    num_found: int
    state: str
    num_shared: int = 0
    states: RequestStates | None = None
    passed: dict[int, RequestStates] = field(default_factory=dict)
    wanted: frozenset[int] = frozenset()
    kept: dict[int, Cache] = field(default_factory=dict)
    went_on: int = 0
    published: Sequence[int] = ()
    num_stored: int = 0
    guesses: Any = None

    @property
    def table(self) -> PageTable:
        """Its pages in the first group."""
        return self.groups[0].table

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have a slot."""
        return self.groups[0].num_tokens


def page_map_of(pool: PagePool, held: Mapping[str, Held], kept: Sequence[PageTable] = ()) -> PageMap:
    """Map of the pages and their holders.

    Args:
        pool: The pages.
        held: ``Held`` of each request, by its id.
        kept: Pages that sessions of agents hold.
    """
    requests = tuple(
        RequestPages(
            name,
            x.prompt.salt,
            len(x.prompt.text),
            x.num_tokens,
            x.num_found,
            tuple(y.id for y in x.table.pages),
        )
        for name, x in held.items()
    )
    states = ["free"] * pool.num_pages
    for ref in pool.evictable():
        states[ref.id] = "evictable"
    for table in kept:
        for ref in table.pages:
            states[ref.id] = "kept"
    for page, count in Counter(page for request in requests for page in request.pages).items():
        states[page] = "shared" if count > 1 else "active"
    return PageMap(tuple(states), requests)
