"""What each request of a session holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from transformers.cache_utils import Cache

from kvloom.caches.prefix_group import GroupTable
from kvloom.integrations.transformers.batching.report import PageMap, RequestPages
from kvloom.paging import PagePool, PageTable

SALT: Final = "cache_salt"
"""Where a request has its salt, among the arguments of its logits processors: those outlive a preemption."""
CHOICE: Final = "choice"
"""Where it has its ``Choice``, the same."""


class RequestStates(NamedTuple):
    """The recurrent states of one request.

    Attributes:
        cache: ``StateRows`` where they are, perhaps beside those of others.
        row: Which of its rows they are.
        num_tokens: Tokens of which they know.
    """

    cache: Any
    row: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Held:
    """What one request holds.

    Attributes:
        groups: Its pages in each group of layers.
        salt: Under which it finds others.
        num_prompt: Tokens of its prompt.
        num_found: Those of them whose pages were found.
        state: Of the model when it began, as of ``ModelWatch``.
        num_shared: Pages that its prompt has in common with a text that was known; 0 once that is noted.
        states: Its recurrent states; ``None`` before it has any.
        wanted: Numbers of its first tokens behind which copies of its states are kept for others.
        kept: Those copies, by these numbers, until others can find them.
        went_on: Tokens behind the states that others find and it went on from; 0 for none.
        published: Its tokens as far as others find their pages.
        num_stored: Those of them that a store below was given, or had.
    """

    groups: list[GroupTable]
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
        """Tokens that have their place."""
        return self.groups[0].num_tokens


def salt_of(state: Any) -> str:
    """The salt of a request."""
    return str(state.logit_processor_kwargs.get(SALT, ""))


def most_findable(state: Any, tokens: Sequence[int]) -> int:
    """Tokens at the beginning of a prompt that may be found.

    The last one is left to compute, and so is the one before it if the request is to be forked, which happens
    between the two. None may be where the logits of all of them are asked for.
    """
    choice = state.logit_processor_kwargs.get(CHOICE)
    if choice is not None and choice.is_scoring:
        return 0
    return max(len(tokens) - (2 if state.num_children else 1), 0)


def page_map_of(pool: PagePool, held: Mapping[str, Held], kept: Sequence[PageTable] = ()) -> PageMap:
    """Which page holds what.

    Args:
        pool: The pages.
        held: What each request holds, by its id.
        kept: What sessions of agents hold.
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
