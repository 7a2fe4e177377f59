"""Finding and committing prefixes in a pool: pages of each group of layers, and recurrent states."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from kvloom.caches.prefixes.found import Found
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.search import Prefixes
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.core.text import Text
from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.pool.origin import Origin, PoolCache
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.paging import Miss, uninterrupted, whole


class PoolPrefixes(Prefixes):
    """Prefixes in groups of layers and, of a model with recurrent states, in the group of these.

    Args:
        groups: Groups of layers.
        states: Pages of recurrent states; ``None`` without any.

    Attributes:
        states: As above.
    """

    def __init__(self, groups: Sequence[PrefixGroup], states: PoolStates | None) -> None:
        super().__init__(groups if states is None else [*groups, states.group])
        self.states = states

    def num_shared(self, found: Found) -> int:
        """Number of pages that a text shares with a known text, for ``prefer``.

        With states, it counts to the last grid position before the text differs from a known text that goes
        on, since a third text may find both pages and states there. It is 0 if the text merely extends known
        texts.
        """
        if self.states is None:
            return super().num_shared(found)
        step, path = self.states.interval // self.page_size, found.paths[0]
        return len(path.pages) // step * step if path.goes_on else 0

    def begin_cache(
        self,
        cache: PoolCache,
        rows: Sequence[Sequence[int]],
        begins: Sequence[int],
        blank: Tensor,
        is_hidden: Callable[[int, int], bool],
    ) -> int:
        """Give an empty cache the longest prefix that is known of every row.

        Args:
            cache: The cache, with its origin.
            rows: Tokens of each row, the last of which is always computed.
            begins: Column of the first token of each row.
            blank: Empty tensor with the dtype and device of keys.
            is_hidden: Argument ``is_within`` of ``begin``.

        Returns:
            Number of columns of the prefix, padding included.
        """
        origin = cache.began
        texts = [*zip((row[:-1] for row in rows), origin.scopes(), origin.stored_scopes(), strict=True)]
        with uninterrupted():
            end, every, tables = self.begin(texts, begins, is_hidden)
            origin.num_shared = [self.num_shared(found) for found in every]
            cache.sequences[0].requests = [own[0].request for own in tables]
            kept = [own.pop() for own in tables if self.states is not None]
            cache.begin_behind(tables, begins, end, blank)
            if self.states is not None:
                self.states.begin(cache, kept, end, origin.num_shared)
        return end

    def begin_with_none(self, cache: PoolCache, begins: Sequence[int], blank: Tensor) -> int:
        """Begin a cache without any prefix; arguments and result are those of ``begin_cache``."""
        groups, end = self.groups[: len(cache.sequences)], min(begins)
        cache.begin_behind(
            [[group.new_table().table for group in groups] for _ in begins], begins, end, blank
        )
        return end

    def with_hidden(
        self, misses: Sequence[Miss], tokens: Sequence[int], scope: str, is_hidden: Callable[[int], bool]
    ) -> list[Miss]:
        """Causes of misses, with those of pages that are known, but not with all that the next token reads.

        ``is_hidden`` says of a number of tokens whether it is unknown what the model remembers after them.
        """
        first, end = self.num_known(tokens, scope), self.main.tree.num_known(tokens, scope)
        cause = "window passed" if self.states is None else "no states"
        found = [Miss(cause, first, end - first)] if first < end else []
        end = first
        while first and is_hidden(first * self.page_size):
            first -= 1
        return [*([Miss("no states", first, end - first)] if first < end else []), *found, *misses]

    @whole
    def commit(self, cache: PoolCache, rows: Sequence[Sequence[int]]) -> None:
        """Let others find the full pages of a cache, or of its copies after pieces of its text.

        Copies are dropped then, since their states are kept.

        Args:
            cache: The cache, with its origin.
            rows: Tokens of each row.

        Raises:
            ArgumentError, StateError: as ``Sequences.commit``.
        """
        grid, texts = cache.grid, [Text(row) for row in rows]
        if grid is None or self.states is None:
            self._commit(cache, cache.began, texts)
            return
        for end in sorted(grid.copies):
            self._commit(
                grid.copies[end], cache.began, [text[:end] for text in texts], self.states, grid.found
            )
            grid.found = end
            del grid.copies[end]

    def _commit(
        self,
        cache: PoolCache,
        origin: Origin,
        texts: Sequence[Text],
        states: PoolStates | None = None,
        found: int = 0,
    ) -> None:
        """Let others find full pages, and ``states`` that continued from those of ``found`` tokens."""
        groups = [*zip(cache.sequences, self.groups, strict=False)]
        for sequences, group in groups:
            sequences.commit(group.tree, texts, origin.scopes())
        scopes = zip(origin.scopes(), origin.stored_scopes(), origin.num_shared, strict=True)
        for row, (scope, stored_scope, shared) in enumerate(scopes):
            held = [replace(x.rows[row], kept=None) for x, _ in groups]
            kept = None if states is None else states.write(cache, row, texts[row], scope, found)
            if states is not None:
                states.note(cache.sequences[0].pages.pool.events, "kept", held[0].table.request)
            held += [] if kept is None else [kept]
            self.prefer(held, shared)
            self.keep(held, texts[row], stored_scope)
            if kept is not None:
                kept.table.release()
        for sequences, _ in groups:
            sequences.give_up_passed()


def rows_of(cache: PoolCache, input_ids: Tensor | None) -> list[list[int]]:
    """Tokens of each row of a cache, without padding; ``input_ids`` are those of ``commit``.

    Of rows that were chosen among others they are those that were computed.

    Raises:
        ArgumentError: as ``KVPool.commit``.
    """
    origin, num_tokens = cache.began, cache.sequences[0].num_positions
    begins = cache.begins or [0] * origin.fed.num_rows  # before its first forward it has no rows
    has_content = any(origin.contents) and not origin.is_of_encoder
    if input_ids is None:
        if not origin.fed.is_known or (has_content and not origin.fed.are_as_asked(begins)):
            raise ArgumentError(
                "input_ids must be given, as not all inputs of the model were tokens, got None"
            )
        return origin.fed.rows(begins)
    if origin.fed.is_chosen and (not has_content or origin.fed.are_as_asked(begins)):
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES)
        return origin.fed.rows(begins)
    sizes = expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=len(begins))
    if not num_tokens <= sizes["T"] <= num_tokens + 1:
        raise ArgumentError(
            f"input_ids must be the {num_tokens} tokens of the cache, or one more, got {sizes['T']}"
        )
    if origin.fed.is_known:  # with content, tokens may be known by other numbers than the model's
        num_same = origin.num_found if has_content and not origin.fed.is_chosen else num_tokens
        origin.fed.expect(input_ids, begins, num_same)
    return [row[begin:num_tokens] for row, begin in zip(input_ids.tolist(), begins, strict=True)]
