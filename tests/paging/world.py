"""A paged cache of numbers on the real page bookkeeping, in which every slot identifies its token.

The keys and values of a token depend on the salt and on all tokens up to it. So the number that stands for
them is given once for each (salt, tokens up to here), by a dict that knows nothing of pages.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvloom.errors import OutOfPages
from kvloom.paging import Copy, Growth, PagePool, PageRef, PageTable, PrefixTree, check


def append_all(tables: Sequence[PageTable], num_tokens: Sequence[int]) -> list[Copy]:
    """Room in all tables or in none; returns the copies."""
    with Growth(tables, num_tokens).made() as copies:
        return copies


def append(table: PageTable, num_tokens: int) -> list[Copy]:
    return append_all([table], [num_tokens])


class FailingPool(PagePool):
    """Counts the requests for pages, and can refuse the n-th from now."""

    def __init__(self, num_pages: int, policy: str = "lru") -> None:
        super().__init__(num_pages, policy)
        self.num_takes = 0
        self.fail_at: int | None = None

    def take(self, num_pages: int, wanted: Sequence[int] = ()) -> list[PageRef]:
        if num_pages:
            self.num_takes += 1
            if self.num_takes == self.fail_at:
                raise OutOfPages("refused by the test")
        return super().take(num_pages, wanted)

    @property
    def will_fail(self) -> bool:
        return self.fail_at == self.num_takes + 1

    def fail_next(self) -> None:
        self.fail_at = self.num_takes + 1


@dataclass(eq=False)
class Request:
    """One sequence, and what its slots must hold."""

    salt: str
    table: PageTable
    tokens: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)


class World:
    """Pool, tree, tables and the memory they speak of."""

    def __init__(self, num_pages: int, page_size: int, policy: str = "lru") -> None:
        self.page_size = page_size
        self.pool = FailingPool(num_pages, policy)
        self.tree = PrefixTree(self.pool, page_size)
        self.requests: list[Request] = []
        self.memory: defaultdict[int, list[int | None]] = defaultdict(lambda: [None] * page_size)
        self.issued: dict[int, int] = {}  # newest generation of each page that was handed out
        self._numbers: dict[tuple[str | int, int], int] = {}

    def contents(self, before: str | int, tokens: Sequence[int]) -> list[int]:
        """The numbers of tokens that come behind a salt, or behind the token with the number ``before``."""
        numbers: list[int] = []
        for token in tokens:
            before = self._numbers.setdefault((before, token), len(self._numbers))
            numbers.append(before)
        return numbers

    def begin(self, salt: str, tokens: Sequence[int]) -> Request | None:
        """Start from the pages that are there already; ``None`` if the rest finds no room."""
        request = Request(salt, PageTable(self.pool, self.page_size))
        self.requests.append(request)
        refs = self.match(salt, tokens)
        request.table.adopt(refs)
        request.tokens = list(tokens[: request.table.num_tokens])
        request.contents = self.contents(salt, request.tokens)
        self.read(request)
        if self.extend([request], [tokens[len(request.tokens) :]]) is not None:
            return request
        self.end(request)
        return None

    def match(self, salt: str, tokens: Sequence[int]) -> list[PageRef]:
        return self.tree.match(tokens, salt, max_tokens=len(tokens) - 1)

    def extend(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> list[Copy] | None:
        """Append and write; ``None`` if there is no room."""
        tables = [request.table for request in requests]
        before = [set(table.pages) for table in tables]
        try:
            copies = append_all(tables, [len(new) for new in tokens])
        except OutOfPages:
            return None
        for table, old in zip(tables, before, strict=True):
            for ref in table.pages:
                if ref not in old:
                    assert ref.generation > self.issued.get(ref.id, -1), f"{ref} was handed out before"
                    self.issued[ref.id] = ref.generation
        self._run(copies)
        for request, new in zip(requests, tokens, strict=True):
            start = len(request.tokens)
            request.tokens += new
            request.contents += self.contents(request.contents[-1] if start else request.salt, new)
            pages = request.table.pages
            for position in range(start, len(request.tokens)):
                page, offset = divmod(position, self.page_size)
                self.memory[pages[page].id][offset] = request.contents[position]
        return copies

    def commit(self, request: Request) -> list[PageRef]:
        """Let others find the full pages."""
        self.tree.seal(request.table, request.tokens, request.salt)
        refs = [*request.table.pages]
        assert self.tree.insert(request.tokens, refs, request.salt) == refs
        return refs

    def fork(self, request: Request) -> Request:
        twin = Request(request.salt, request.table.fork(), request.tokens.copy(), request.contents.copy())
        self.requests.append(twin)
        return twin

    def truncate(self, request: Request, num_tokens: int) -> None:
        request.table.truncate(num_tokens)
        del request.tokens[num_tokens:], request.contents[num_tokens:]

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        request.table.release()

    def evict(self, num_pages: int) -> int:
        return self.tree.evict(num_pages)

    def grow(self, num_pages: int) -> None:
        self.pool.grow(num_pages)

    def read(self, request: Request) -> None:
        """Every slot of a sequence holds its own number."""
        assert request.table.num_tokens == len(request.tokens)
        found: list[int | None] = []
        for ref in request.table.pages:
            found += self.memory[ref.id]
        assert found[: len(request.contents)] == request.contents

    def verify(self) -> None:
        """Every invariant from scratch, and every slot of every sequence."""
        check(self.pool, self.tree, [request.table for request in self.requests])
        for request in self.requests:
            self.read(request)

    def idle(self) -> None:
        """End everything: each page is free or evictable then, and free when evicted."""
        for request in list(self.requests):
            self.end(request)
        self.verify()
        assert self.pool.num_active == 0
        self.evict(self.pool.num_pages)
        self.verify()
        assert (self.pool.num_free, self.tree.num_pages) == (self.pool.num_pages, 0)

    def _run(self, copies: Sequence[Copy]) -> None:
        sources = [copy.source for copy in copies]
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets) and set(targets).isdisjoint(sources)
        for target, page in zip(targets, [self.memory[source].copy() for source in sources], strict=True):
            self.memory[target] = page


class Walk:
    """Random steps through a world, from one seed. Load comes and goes, up to ``num_requests``."""

    def __init__(self, world: World, seed: int, *, num_requests: int, num_salts: int = 2) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.num_requests = self.limit = num_requests
        self.salts = [f"salt {i}" for i in range(num_salts)]
        self.max_tokens = 8 * world.page_size
        self.prompts = [self._tokens(self.max_tokens) for _ in range(6)]

    def step(self) -> None:
        world, rng = self.world, self.rng
        if rng.random() < 0.01:
            self.limit = rng.randint(1, self.num_requests)
        if not world.requests or rng.random() < 0.2:
            self._begin()
            return
        request = rng.choice(world.requests)
        kind = rng.random()
        if kind < 0.4:
            self._append(request)
        elif kind < 0.6:
            world.commit(request)
        elif kind < 0.7:
            if len(world.requests) < self.limit:
                world.fork(request)
        elif kind < 0.8:
            world.truncate(request, rng.randint(0, len(request.tokens)))
        elif kind < 0.97:
            world.end(request)
        else:
            world.evict(rng.randint(0, 4))

    def run(self, num_steps: int, after_step: Callable[[], object] | None = None, every: int = 1) -> None:
        """Walk, and call ``after_step`` after every ``every`` steps."""
        for i in range(1, num_steps + 1):
            self.step()
            if after_step is not None and i % every == 0:
                after_step()

    def _begin(self) -> None:
        rng = self.rng
        while len(self.world.requests) >= self.limit:
            self.world.end(rng.choice(self.world.requests))
        shared = rng.choice(self.prompts)[: rng.randint(0, self.max_tokens)]
        tokens = shared + self._tokens(rng.randint(0 if shared else 1, self.world.page_size))
        self.world.begin(rng.choice(self.salts), tokens)

    def _append(self, request: Request) -> None:
        group = [request]
        if self.rng.random() < 0.3:
            group += [
                other for other in self.world.requests if other is not request and self.rng.random() < 0.5
            ]
        self.rng.shuffle(group)
        self.world.extend(group, [self._tokens(self.rng.randint(0, self.world.page_size + 1)) for _ in group])

    def _tokens(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(3), k=num_tokens)
