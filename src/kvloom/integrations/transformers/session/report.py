"""Reports and page maps of a session of continuous batching."""

from dataclasses import asdict, dataclass, field
from typing import Any

from kvloom.terminal import TableReport


@dataclass(frozen=True, slots=True)
class RequestPages:
    """One request that holds pages.

    Attributes:
        request_id: Id of the request in the manager.
        salt: Its ``cache_salt``.
        num_prompt: Number of tokens of its prompt; a preemption adds the tokens generated so far.
        num_tokens: Number of tokens that have a slot, those of the current step included.
        num_found: Number of tokens of its prompt whose pages were found, and needed no compute.
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
    """Report of a session at one moment; ``free + active + evictable == num_pages``.

    Attributes:
        kv: Format string of keys and values, such as ``"int8:g32"``, as ``CacheFormat.kind``.
        page_size: Tokens in a page.
        page_bytes: Bytes of a page in the layers that attend to all tokens, or of the shortest window if
            there are none; scales included. The page counts are those of these layers.
        max_pages: Largest number of pages.
        num_pages: Number of allocated pages; grows on demand.
        free: Allocated pages that hold nothing.
        active: Pages that requests or sessions of agents hold.
        shared: Active pages that two or more requests hold.
        kept: Active pages that sessions of agents hold, and no request.
        evictable: Pages that nobody holds and that can be found again; evicted when others need them.
        waiting: Requests that hold no pages yet.
        running: Requests that take part in steps.
        finished: Requests that ended, cancelled and failed ones included.
        preemptions: Number of times that a request lost its pages to others, and is computed again.
        tokens_asked: Number of prompt tokens that were looked up.
        tokens_found: Number of these tokens that were found, and needed no compute.
        steps: Number of forwards of the model.
        tokens_computed: Number of tokens in these forwards.
        tokens_drafted: Number of drafted tokens among them.
        tokens_accepted: Number of drafted tokens that were chosen; each saved a step of its request.
        tokens_assisted: Number of these that an assistant had drafted.
        window_bytes: Bytes allocated for the layers of other windows, beside these pages.
        recent_bytes: Bytes allocated for residual windows, of running requests and of texts that can be
            found; 0 without ``recent``.
        state_bytes: Bytes of the recurrent states of running requests.
        found_state_bytes: Bytes allocated for states that requests can find.
        batch_invariant: Whether a request has the same bits as alone, in all layers of the model.
        packed_bytes: Bytes of the packed weights of linear layers.
        not_invariant: Numbers of layers whose rows may differ, by the reason.
        not_packed: Numbers of linear layers that could not be packed, by the reason.
        smoothing: Layers by the reason that says how their keys are smoothed.
        store: Report of the store below the pages, as ``KVStore.report``.
        assistant: Pages of an assistant, of as many tokens: ``max_pages``, ``num_pages``, ``active``,
            ``evictable`` and their ``nbytes``; and ``tokens_computed`` by it. Empty without one.
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
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    tokens_assisted: int = 0
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
    assistant: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(TableReport(asdict(self)))

    def _repr_html_(self) -> str:
        return TableReport(asdict(self))._repr_html_()


@dataclass(frozen=True, slots=True)
class PageMap:
    """Map of the pages and their holders at one moment.

    Attributes:
        states: State of each allocated page: ``"free"``, ``"active"``, ``"shared"``, ``"kept"`` for a session
            of an agent, or ``"evictable"``.
        requests: Requests that hold pages.
    """

    states: tuple[str, ...]
    requests: tuple[RequestPages, ...]
