"""Operations in any order on small pools: the model predicts every answer, and reads every slot."""

from __future__ import annotations

from campaign import times
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paging.oracle import Oracle
from paging.world import Request

SALTS = ("", "a")
indices = st.integers(0, 3)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
few_tokens = st.lists(st.integers(0, 1), max_size=4)
has_requests = precondition(lambda machine: machine.world.requests)
has_room = precondition(lambda machine: len(machine.world.requests) < 4)
has_sealed = precondition(lambda machine: machine.world.sealed)


class BlocksMachine(RuleBasedStateMachine):
    """Two tokens and two salts, so that sequences meet."""

    @initialize(num_pages=st.sampled_from(range(8, 0, -1)), page_size=st.sampled_from((3, 2, 4, 1)))
    def start(self, num_pages: int, page_size: int) -> None:
        self.world = Oracle(num_pages, page_size)

    def request(self, index: int) -> Request:
        return self.world.requests[index % len(self.world.requests)]

    @has_room
    @rule(salt=st.sampled_from(SALTS), tokens=prompts)
    def begin(self, salt: str, tokens: list[int]) -> None:
        self.world.begin(salt, tokens)

    @has_requests
    @rule(index=indices, tokens=few_tokens.filter(len))
    def append(self, index: int, tokens: list[int]) -> None:
        self.world.extend([self.request(index)], [tokens])

    @has_requests
    @rule(order=st.permutations(range(4)), tokens=st.lists(few_tokens, min_size=1, max_size=4))
    def append_to_several(self, order: list[int], tokens: list[list[int]]) -> None:
        group = [self.world.requests[i] for i in order if i < len(self.world.requests)]
        group = group[: len(tokens)]
        self.world.extend(group, tokens[: len(group)])

    @has_requests
    @rule(index=indices)
    def commit(self, index: int) -> None:
        self.world.commit(self.request(index))

    @has_requests
    @has_room
    @rule(index=indices)
    def fork(self, index: int) -> None:
        self.world.fork(self.request(index))

    @has_requests
    @rule(index=indices, num_dropped=st.integers(0, 6))
    def truncate(self, index: int, num_dropped: int) -> None:
        request = self.request(index)
        self.world.truncate(request, max(0, len(request.tokens) - num_dropped))

    @has_requests
    @rule(index=indices)
    def end(self, index: int) -> None:
        self.world.end(self.request(index))

    @has_sealed
    @rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages: int) -> None:
        self.world.evict(num_pages)

    @precondition(lambda machine: machine.world.requests and machine.world.total < 8)
    @rule(num_pages=st.integers(0, 2))
    def grow(self, num_pages: int) -> None:
        self.world.grow(num_pages)

    @precondition(lambda machine: machine.world.requests and not machine.world.pool.will_fail)
    @rule()
    def fail_the_next_allocation(self) -> None:
        self.world.pool.fail_next()

    @invariant()
    def holds(self) -> None:
        self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.idle()


class TestBlocks(BlocksMachine.TestCase):
    settings = settings(max_examples=times(200), stateful_step_count=50)
