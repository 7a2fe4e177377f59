"""What a session of continuous batching says of its pages, for metrics and maps."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestPages:
    """One request that holds pages.

    Attributes:
        request_id: Of the manager.
        salt: Its ``cache_salt``.
        num_prompt: Tokens of its prompt, to which a preemption adds those that it has generated.
        num_tokens: Tokens that have their place, those of the current step among them.
        num_found: Tokens of its prompt whose pages were found, and needed no compute.
        pages: Ids of its pages, in order.
    """

    request_id: str
    salt: str
    num_prompt: int
    num_tokens: int
    num_found: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A session at one moment; ``free + active + evictable == num_pages``.

    Attributes:
        kv: How keys and values are kept, such as ``"int8:g32"``, as of ``CacheFormat.kind``.
        page_size: Tokens in a page.
        page_bytes: Bytes of a page in the layers that attend to all tokens, or of the shortest window if
            there are none; scales included. Pages here are those of these layers.
        max_pages: Pages that there can be.
        num_pages: Pages that are allocated; they grow on demand.
        free: Allocated pages that hold nothing.
        active: Pages that requests or sessions of agents hold.
        shared: Those of them that two requests or more hold.
        kept: Those of them that sessions of agents hold, and no request does.
        evictable: Pages that nobody holds and that can be found again; given up when others need them.
        waiting: Requests that hold no pages yet.
        running: Requests that take part in steps.
        finished: Requests that ended, cancelled and failed ones among them.
        preemptions: How often a request lost its pages to others, to be computed again.
        tokens_asked: Tokens of prompts that were looked up.
        tokens_found: Those of them that were found, and needed no compute.
        steps: Forwards of the model.
        tokens_computed: Tokens that went through the model.
        window_bytes: Allocated for the layers of other windows, beside these pages.
        recent_bytes: Allocated for residual windows, of running requests and of texts that can be found; 0
            without ``recent``.
        state_bytes: Of the recurrent states of running requests.
        found_state_bytes: Allocated for states that requests can find.
        batch_invariant: Whether a request has the bits that it has alone, in all layers of the model.
        packed_bytes: Of the packed weights of linear layers.
        not_invariant: Numbers of layers whose rows may differ, by the reason.
        not_packed: Numbers of linear layers that could not be packed, by the reason.
        smoothing: Layers by what was done to smooth their keys, and why not more.
        store: That of the store below the pages, as of ``KVStore.report``.
    """

    kv: str
    page_size: int
    page_bytes: int = 0
    max_pages: int = 0
    num_pages: int = 0
    free: int = 0
    active: int = 0
    shared: int = 0
    kept: int = 0
    evictable: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    preemptions: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0
    steps: int = 0
    tokens_computed: int = 0
    window_bytes: int = 0
    recent_bytes: int = 0
    state_bytes: int = 0
    found_state_bytes: int = 0
    batch_invariant: bool = False
    packed_bytes: int = 0
    not_invariant: dict[str, int] = field(default_factory=dict)
    not_packed: dict[str, int] = field(default_factory=dict)
    smoothing: dict[str, list[int]] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PageMap:
    """Which page holds what, at one moment.

    Attributes:
        states: Of each allocated page, ``"free"``, ``"active"``, ``"shared"``, ``"kept"`` for a session of an
            agent, or ``"evictable"``.
        requests: Those that hold pages.
    """

    states: tuple[str, ...]
    requests: tuple[RequestPages, ...]
