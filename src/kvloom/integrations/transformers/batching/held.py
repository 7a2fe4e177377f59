"""What each request of a session holds.

Shapes: P pages of a request.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from kvloom.integrations.transformers.batching.newest import Span
from kvloom.integrations.transformers.batching.report import PageMap, RequestPages
from kvloom.paging import PagePool, PageTable

SALT: Final = "cache_salt"
"""Where a request has its salt, among the arguments of its logits processors: those outlive a preemption."""


@dataclass(slots=True, eq=False)
class Held:
    """What one request holds.

    Attributes:
        table: Its pages.
        salt: Under which it finds others.
        num_prompt: Tokens of its prompt.
        num_found: Those of them whose pages were found.
        state: Of the model when it began, as of ``ModelWatch``.
        span: Where its newest tokens are, unquantized.
        first_slots: ``[P]``, where its pages begin, made when that is needed.
    """

    table: PageTable
    salt: str
    num_prompt: int
    num_found: int
    state: str
    span: Span
    first_slots: Tensor | None = None

    @classmethod
    def of(cls, state: Any, table: PageTable, model_state: str, span: Span) -> "Held":
        """Of a request that begins with the pages that it found, and newest tokens in front of their end."""
        return cls(table, salt_of(state), len(state.initial_tokens), table.num_tokens, model_state, span)


def salt_of(state: Any) -> str:
    """The salt of a request."""
    return str(state.logit_processor_kwargs.get(SALT, ""))


def page_map_of(pool: PagePool, held: Mapping[str, Held]) -> PageMap:
    """Which page holds what.

    Args:
        pool: The pages.
        held: What each request holds, by its id.
    """
    requests = tuple(
        RequestPages(
            name, x.salt, x.num_prompt, x.table.num_tokens, x.num_found, tuple(y.id for y in x.table.pages)
        )
        for name, x in held.items()
    )
    states = ["free"] * pool.num_pages
    for ref in pool.evictable():
        states[ref.id] = "evictable"
    for page, count in Counter(page for request in requests for page in request.pages).items():
        states[page] = "shared" if count > 1 else "active"
    return PageMap(tuple(states), requests)
