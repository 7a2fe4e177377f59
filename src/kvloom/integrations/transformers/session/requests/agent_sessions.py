"""Sessions of agents: texts whose pages are held between requests, within a budget of their owner."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Final, NamedTuple

from kvloom.caches.rows.row import Row
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.session.requests.held import Held
from kvloom.integrations.transformers.session.requests.prompt import Prompt
from kvloom.paging import PageRef, PageTable

_MOST: Final = 1024
"""Largest number of sessions of one owner, with and without pages."""

_NEW: Final = "no session of this id is known"


@dataclass(slots=True, eq=False)
class AgentSession:
    """One session of an agent.

    Attributes:
        owner: Its owner.
        name: Name by which requests refer to it.
        salt: Salt of its pages.
        state: State of the model that computed them.
        tokens: Computed tokens of prompt and answer of its last request.
        groups: Its pages in each group of layers; empty if they were released.
        reason: Why they were released.
        began: Time when it began, in seconds of ``time.time``.
        used: Time when its last request ended.
    """

    owner: str
    name: str
    salt: str
    state: str
    tokens: Sequence[int]
    groups: list[Row]
    began: float
    used: float
    reason: str = ""


class AgentReport(NamedTuple):
    """Report on a session of an agent at one moment.

    Attributes:
        name: Name by which requests refer to it.
        num_tokens: Number of computed tokens of prompt and answer of its last request.
        is_held: Whether it holds their pages.
        reason: Why it does not; empty if it does.
        began: Time when it began, in seconds of ``time.time``.
        used: Time when its last request ended.
        expires: Time when it is forgotten if it is not used.
    """

    name: str
    num_tokens: int
    is_held: bool
    reason: str
    began: float
    used: float
    expires: float


@dataclass(slots=True)
class _Owner:
    """Sessions of one owner, the longest unused first, and the number of holders of each page of a group."""

    sessions: OrderedDict[str, AgentSession] = field(default_factory=OrderedDict)
    holders: list[Counter[PageRef]] = field(default_factory=list)


class AgentSessions:
    """The sessions of all owners. The caller holds ``lock``, except for ``report`` and ``forget``.

    A session holds the pages of its last request, the last page possibly in part, until it is used again. It
    releases them if its owner's sessions exceed their budget (the longest unused first), if a request could
    not run otherwise, and when it expires.

    Args:
        share: Share of all pages that sessions may hold, divided equally among owners; 0 holds none.
        num_owners: Number of owners.
        seconds: Time after which an unused session is forgotten.
        clock: Function that returns seconds, such as ``time.time``.

    Attributes:
        seconds: As above.
        lock: Lock of the ``BatchCache`` that has the pages.

    Raises:
        ArgumentError: ``share`` is not from 0 to 1, there are no owners, or ``seconds`` is below 0.
    """

    def __init__(
        self,
        share: float = 0.5,
        num_owners: int = 1,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 <= share <= 1:
            raise ArgumentError(f"share must be from 0 to 1, got {share}")
        if num_owners < 1:
            raise ArgumentError(f"num_owners must be at least 1, got {num_owners}")
        if not seconds >= 0:
            raise ArgumentError(f"seconds must be at least 0, got {seconds}")
        self.seconds, self.lock = seconds, RLock()
        self._share, self._clock = share / num_owners, clock
        self._owners: dict[str, _Owner] = {}

    def __iter__(self) -> Iterator[AgentSession]:
        """All sessions."""
        return (x for owner in self._owners.values() for x in owner.sessions.values())

    def report(self, owner: str) -> list[AgentReport]:
        """Reports on the sessions of an owner, the longest unused first; from any thread."""
        with self.lock:
            self.expire()
            sessions = self._owners[owner].sessions.values() if owner in self._owners else ()
            return [
                AgentReport(
                    x.name, len(x.tokens), bool(x.groups), x.reason, x.began, x.used, x.used + self.seconds
                )
                for x in sessions
            ]

    def usable(self, prompt: Prompt, state: str) -> AgentSession | None:
        """The session of a request, if it has pages of its salt and state, and the same first token.

        Args:
            prompt: Prompt of the request.
            state: State of the model.
        """
        session = None if prompt.turn is None else self._find(prompt.turn.owner, prompt.turn.name)
        if session is None or not session.groups or (session.salt, session.state) != (prompt.salt, state):
            return None
        return session if prompt.text[:1] == session.tokens[:1] else None

    def note(self, prompt: Prompt, state: str, num_found: int, is_end: bool = False) -> None:
        """Note in the turn of a request that begins, if it has one, what it found of its session; done once.

        Args:
            prompt: Prompt of the request.
            state: State of the model.
            num_found: Number of tokens of the prompt that need no compute.
            is_end: Whether a store has a text of a session that ends after these tokens.
        """
        turn = prompt.turn
        if turn is None or turn.num_kept is not None:
            return
        session = self._find(turn.owner, turn.name)
        if session is None:
            turn.num_kept = turn.num_restored = num_found if is_end else 0
            turn.reason = "" if is_end else _NEW
            return
        turn.num_kept = kept = len(session.tokens)
        num_same = num_common(session.tokens, prompt.text)
        turn.num_restored = min(num_found, num_same)
        if session.groups and session.state != state:
            self._give_up(session, "the model has changed")
        if turn.num_restored == kept:
            turn.reason = ""
        elif session.salt != prompt.salt:
            turn.reason = "the session has another cache_salt"
        elif not session.groups:
            turn.reason = session.reason
        elif num_same < kept:
            turn.reason = f"the prompt has the first {num_same} of the session's {kept} tokens"
        elif len(prompt.text) == kept:
            turn.reason = "the last token of a prompt is always computed"
        else:
            turn.reason = "recurrent states are found at some tokens only"

    def keep(self, held: Held, tokens: Sequence[int], groups: Sequence[Row], limits: Sequence[int]) -> None:
        """Let the session of a request that has ended hold its pages, instead of its earlier pages.

        Args:
            held: What the request held, with a turn.
            tokens: Computed tokens.
            groups: Pages of ``tokens`` in each group; the session takes them over.
            limits: Largest number of pages in each group.
        """
        turn, now = held.prompt.turn, self._clock()
        if turn is None:
            return
        owner = self._owners.setdefault(turn.owner, _Owner())
        owner.holders = owner.holders or [Counter() for _ in groups]
        before = owner.sessions.get(turn.name)
        if before is not None:
            self._give_up(before, "")
        began, kept = now if before is None else before.began, (tokens, [*groups])
        own = turn.owner, turn.name, held.prompt.salt, held.state
        owner.sessions[turn.name] = AgentSession(*own, *kept, began, now)
        owner.sessions.move_to_end(turn.name)
        for holders, row in zip(owner.holders, groups, strict=True):
            holders.update(row.table.pages)
        self._fit(owner, [int(self._share * limit) for limit in limits])
        while len(owner.sessions) > _MOST:
            self.forget(turn.owner, next(iter(owner.sessions)))

    def _fit(self, owner: _Owner, budgets: Sequence[int]) -> None:
        """Release pages of an owner until its sessions hold no more than ``budgets`` in each group."""
        for session in [x for x in owner.sessions.values() if x.groups]:
            over = [len(x) > budget for x, budget in zip(owner.holders, budgets, strict=True)]
            if not any(over):
                return
            self._give_up(session, "the pages were more than sessions may hold")

    def give_way(self) -> bool:
        """Release the pages of the longest unused session of all; returns whether there was one."""
        holding = [x for x in self if x.groups]
        if holding:
            self._give_up(min(holding, key=lambda x: x.used), "a request needed the pages")
        return bool(holding)

    def give_up_all(self, reason: str) -> None:
        """Release the pages of all sessions."""
        for session in self:
            self._give_up(session, reason)

    def lose_all(self, reason: str) -> None:
        """Forget the pages of all sessions, without release, since their ``BatchCache`` no longer exists."""
        for session in self:
            session.groups, session.reason = [], reason
        for owner in self._owners.values():
            owner.holders = []

    def expire(self) -> None:
        """Forget sessions that were not used for ``seconds``."""
        oldest = self._clock() - self.seconds
        for name, owner in self._owners.items():
            while owner.sessions and next(iter(owner.sessions.values())).used <= oldest:
                self.forget(name, next(iter(owner.sessions)))

    def forget(self, owner: str, name: str) -> bool:
        """Forget a session and release its pages, from any thread; returns whether it existed."""
        with self.lock:
            session = self._find(owner, name)
            if session is not None:
                self._give_up(session, "")
                del self._owners[owner].sessions[name]
            return session is not None

    def tables(self, group: int) -> list[PageTable]:
        """Page tables that sessions hold in a group."""
        return [session.groups[group].table for session in self if session.groups]

    def _find(self, owner: str, name: str) -> AgentSession | None:
        return self._owners[owner].sessions.get(name) if owner in self._owners else None

    def _give_up(self, session: AgentSession, reason: str) -> None:
        if session.groups:
            session.reason = reason
            for holders, own in zip(self._owners[session.owner].holders, session.groups, strict=True):
                for ref in own.table.pages:
                    holders[ref] -= 1
                    if not holders[ref]:
                        del holders[ref]
                own.table.release()
            session.groups = []


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is many times as fast as comparing single tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
