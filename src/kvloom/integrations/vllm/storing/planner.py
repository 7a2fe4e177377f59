"""Plans of reads from a store and writes to it: the part of the connector in vLLM's scheduler.

It uses attributes of vLLM's ``Request``, and does not import vLLM.
"""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any, Final

from kvloom.core.text import Text
from kvloom.integrations.vllm.storing.recurrent import StateGroups
from kvloom.store import Fingerprint, KVStore

_PATIENCE: Final = 0.02
"""Seconds that a step waits for an answer of the stores; later answers are taken in the next steps."""
_ATTEMPTS: Final = 2
"""Number of failed reads of a request after which it is computed."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tokens of a request that are read or written.

    Attributes:
        request: Id of the request.
        salt: Salt under which they are stored.
        tokens: Token ids from the start of the text to the last transferred token.
        start: Position of the first transferred token.
        blocks: Ids of the request's blocks in each group of attention layers.
        states: Block with the states after the tokens, in each group of recurrent layers.
    """

    request: str
    salt: str
    tokens: list[int]
    start: int
    blocks: tuple[list[int], ...] = ()
    states: tuple[int, ...] = ()


@dataclass(slots=True)
class TransferPlan:
    """Pages to read and to write in one step.

    Attributes:
        loads: Tokens to be read.
        saves: Tokens to be written after the step.
        states: Recurrent states to be written after the step.
        is_stale: Whether the stores did not have pages that they listed.
        is_idle: Whether nothing is computed in this step.
        is_doubted: Whether the model may have changed since the last step.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    states: list[Transfer] = field(default_factory=list)
    is_stale: bool = False
    is_idle: bool = False
    is_doubted: bool = False


class Planner:
    """Planner that finds the prefixes of requests, and makes the plan of each step.

    Args:
        store: Store of the prefixes.
        fingerprint: Fingerprint of the model.
        page_size: Tokens that are read and written together.
        reads: Whether anything is read.
        writes: Whether anything is written.
        states: Groups of recurrent states, if the model has some. A prefix then ends where they are stored.
    """

    def __init__(
        self,
        store: KVStore,
        fingerprint: Fingerprint,
        page_size: int,
        reads: bool = True,
        writes: bool = True,
        states: StateGroups | None = None,
    ) -> None:
        self._store, self._size = store, page_size
        self._reads, self._writes, self._states = reads, writes, states
        self.know(fingerprint)
        self._finder = ThreadPoolExecutor(1, "kvloom-find")
        self._found: dict[tuple[str, int], Future[int]] = {}
        self._requests: dict[str, Any] = {}
        self._offered: dict[str, int] = {}  # number of tokens of each request that were planned to be written
        self._failures: Counter[str] = Counter()
        self._loads: list[Transfer] = []
        self._is_stale = self._is_doubted = False

    def match(self, request: Any, computed: int) -> int | None:
        """Number of tokens after ``computed`` ones that can be read; ``None`` if stores have not answered."""
        last = (request.num_tokens - 1) // self._size * self._size  # at least one token is computed
        if not self._reads or last <= computed or not is_text(request):
            return 0
        if self._failures[request.request_id] >= _ATTEMPTS:
            return 0
        key = request.request_id, computed
        if key not in self._found:
            tokens = list(request.all_token_ids[:last])
            self._found[key] = self._finder.submit(self._find, request.cache_salt or "", tokens, computed)
        try:
            end = self._found[key].result(_PATIENCE)
        except NotYet:
            return None
        return max(0, end // self._size * self._size - computed)

    def allocated(self, request: Any, blocks: tuple[list[int], ...], num_read: int) -> None:
        """Record that a request has blocks, into which ``num_read`` tokens are to be read."""
        name = request.request_id
        self._requests[name] = request
        self._forget(name)
        if num_read:
            start = request.num_computed_tokens
            tokens = list(request.all_token_ids[: start + num_read])
            states = () if self._states is None else self._states.behind(blocks, len(tokens))
            salt, pages = request.cache_salt or "", self._pages(blocks)
            self._loads.append(Transfer(name, salt, tokens, start, pages, states))

    def plan(
        self,
        scheduled: dict[str, int],
        blocks_of: Any,
        offers: dict[str, list[tuple[int, int, int]]] | None = None,
    ) -> TransferPlan:
        """Make the plan of one step.

        Args:
            scheduled: Number of new tokens of each request.
            blocks_of: Function from a request's id to its blocks in all groups.
            offers: States of each request after whole blocks, which exist after the step: group, block and
                number of tokens.
        """
        plan = TransferPlan(
            self._loads, [], [], self._is_stale, not any(scheduled.values()), self._is_doubted
        )
        self._loads, self._is_stale, self._is_doubted = [], False, False
        for name, new in scheduled.items() if self._writes else ():
            request = self._requests.get(name)
            if request is None or not is_text(request):
                continue
            before = request.num_computed_tokens
            start = min(self._offered.get(name, before), before) // self._size * self._size
            end = min(before + new, request.num_tokens) // self._size * self._size
            if end > start:
                tokens = list(request.all_token_ids[:end])
                pages = self._pages(blocks_of(name))
                plan.saves.append(Transfer(name, request.cache_salt or "", tokens, start, pages))
            self._offered[name] = max(start, end)
        plan.states = self._behind_blocks(offers or {})
        return plan

    def know(self, fingerprint: Fingerprint) -> None:
        """Set the fingerprint; called before there are requests."""
        self._fingerprint = fingerprint
        self._of_states = None if self._states is None else self._states.fingerprint(fingerprint)

    def failed(self, names: set[str]) -> None:
        """Record failed reads of requests, which are looked up once more."""
        self._failures.update(names)
        self._is_stale = self._is_stale or bool(names)
        if names:
            self._finder.submit(self._store.refresh, self._fingerprint)
            if self._of_states is not None:
                self._finder.submit(self._store.refresh, self._of_states)

    def set_aside(self) -> None:
        """Stop reads and writes, since the model no longer matches the fingerprint."""
        self._reads = self._writes = False

    def reset(self) -> None:
        """Forget found prefixes, and have the model checked before the next read."""
        for key in list(self._found):
            self._found.pop(key).cancel()
        self._is_doubted = self._is_stale = True

    def finished(self, name: str) -> None:
        """Forget a request."""
        self._forget(name)
        for known in (self._requests, self._offered, self._failures):
            known.pop(name, None)

    def close(self) -> None:
        """End the thread."""
        self._finder.shutdown()

    def _behind_blocks(self, offers: dict[str, list[tuple[int, int, int]]]) -> list[Transfer]:
        """Recurrent states to be written."""
        found: list[Transfer] = []
        for name, own in offers.items():
            request = self._requests.get(name)
            if self._states is None or not self._writes or request is None or not is_text(request):
                continue
            for end, states in self._states.whole(own).items():
                if end % self._size == 0:
                    tokens = list(request.all_token_ids[:end])
                    found.append(Transfer(name, request.cache_salt or "", tokens, end - 1, (), states))
        return found

    def _pages(self, blocks: tuple[list[int], ...]) -> tuple[list[int], ...]:
        return blocks if self._states is None else self._states.pages(blocks)

    def _find(self, salt: str, tokens: list[int], start: int) -> int:
        text = Text(tokens)
        end = self._store.find(self._fingerprint, salt, text, start)
        if (whose := self._of_states) is None:
            return end
        for behind in range(end // self._size * self._size, start, -self._size):
            if self._store.find(whose, salt, text[:behind], behind - 1) == behind:
                return behind
        return start

    def _forget(self, name: str) -> None:
        for key in [key for key in self._found if key[0] == name]:
            self._found.pop(key).cancel()


def is_text(request: Any) -> bool:
    """Whether a request's keys and values are determined by its token ids: no adapter, picture or vector."""
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.prompt_token_ids is not None
    )
