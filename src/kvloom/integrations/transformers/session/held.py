"""``Held``: the pages and states that a request of a session holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from transformers.cache_utils import Cache

from kvloom.caches.rows.row import Row
from kvloom.integrations.transformers.session.report import PageMap, RequestPages
from kvloom.paging import PagePool, PageTable

SALT: Final = "cache_salt"
"""Key of a request's salt among the arguments of its logits processors, which outlive a preemption."""
CHOICE: Final = "choice"
"""Key of a request's ``Choice`` among these arguments."""


class RequestStates(NamedTuple):
    """The recurrent states of one request.

    Attributes:
        cache: ``StateRows`` with the states, and possibly those of other requests.
        row: Row of the request.
        num_tokens: Number of tokens that the states include.
    """

    cache: Any
    row: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Held:
    """Pages and states of one request.

    Attributes:
        groups: Its pages in each group of layers.
        salt: Its ``cache_salt``.
        num_prompt: Number of tokens of its prompt.
        num_found: Number of tokens of its prompt whose pages were found.
        state: State of the model when the request began, as ``ModelWatch`` names it.
        num_shared: Number of pages that its prompt shares with a known text; 0 once these are preferred.
        states: Its recurrent states; ``None`` before it has any.
        wanted: Numbers of tokens after which copies of its states are kept for others.
        kept: These copies by number of tokens, until they are published.
        went_on: Number of tokens of the last published states that it continued from; 0 for none.
        published: Its tokens whose pages others can find.
        num_stored: Number of these tokens that a store below was given, or had.
    """

    groups: list[Row]
    salt: str
    num_prompt: int
    num_found: int
    state: str
    num_shared: int = 0
    states: RequestStates | None = None
    wanted: frozenset[int] = frozenset()
    kept: dict[int, Cache] = field(default_factory=dict)
    went_on: int = 0
    published: Sequence[int] = ()
    num_stored: int = 0

    @property
    def table(self) -> PageTable:
        """Its pages in the first group."""
        return self.groups[0].table

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have a slot."""
        return self.groups[0].num_tokens


def salt_of(state: Any) -> str:
    """The salt of a request."""
    return str(state.logit_processor_kwargs.get(SALT, ""))


def most_findable(state: Any, tokens: Sequence[int]) -> int:
    """Largest number of tokens of a prompt that may be found.

    The last token is always computed. If the request is to be forked, the last two are computed, since the
    fork happens between them. It is 0 if the logits of all tokens are requested.
    """
    choice = state.logit_processor_kwargs.get(CHOICE)
    if choice is not None and choice.is_scoring:
        return 0
    return max(len(tokens) - (2 if state.num_children else 1), 0)


def page_map_of(pool: PagePool, held: Mapping[str, Held], kept: Sequence[PageTable] = ()) -> PageMap:
    """Map of the pages and their holders.

    Args:
        pool: The pages.
        held: ``Held`` of each request, by its id.
        kept: Pages that sessions of agents hold.
    """
    requests = tuple(
        RequestPages(
            name, x.salt, x.num_prompt, x.num_tokens, x.num_found, tuple(y.id for y in x.table.pages)
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
