"""What a session of continuous batching says of its pages, for metrics and maps."""

from dataclasses import dataclass


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
        page_bytes: Bytes of a page in all layers, scales included.
        max_pages: Pages that there can be.
        num_pages: Pages that are allocated; they grow on demand.
        free: Allocated pages that hold nothing.
        active: Pages that requests hold.
        shared: Those of them that two requests or more hold.
        evictable: Pages that nobody holds and that can be found again; given up when others need them.
        waiting: Requests that hold no pages yet.
        running: Requests that take part in steps.
        finished: Requests that ended, cancelled and failed ones among them.
        preemptions: How often a request lost its pages to others, to be computed again.
        tokens_asked: Tokens of prompts that were looked up.
        tokens_found: Those of them that were found, and needed no compute.
        steps: Forwards of the model.
        tokens_computed: Tokens that went through the model.
        recent_bytes: Of the newest tokens as they were computed, beside the pages; 0 without ``recent``.
    """

    kv: str
    page_size: int
    page_bytes: int
    max_pages: int
    num_pages: int
    free: int
    active: int
    shared: int
    evictable: int
    waiting: int
    running: int
    finished: int
    preemptions: int
    tokens_asked: int
    tokens_found: int
    steps: int
    tokens_computed: int
    recent_bytes: int


@dataclass(frozen=True, slots=True)
class PageMap:
    """Which page holds what, at one moment.

    Attributes:
        states: Of each allocated page, ``"free"``, ``"active"``, ``"shared"`` or ``"evictable"``.
        requests: Those that hold pages.
    """

    states: tuple[str, ...]
    requests: tuple[RequestPages, ...]
