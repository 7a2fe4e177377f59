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
from kvloom.integrations.transformers.pool.fed_tokens import FedTokens
from kvloom.integrations.transformers.pool.origin import Origin, PoolCache
from kvloom.integrations.transformers.pool.states import PoolStates
from kvloom.paging import Miss, uninterrupted, whole


def prefixes_of(empty: PoolCache, states: PoolStates | None) -> Prefixes:
    """The prefixes of a pool: groups of the pages of an empty cache, then the group of states."""
    groups = [PrefixGroup(x.pages, x.reach) for x in empty.sequences]
    return Prefixes(groups if states is None else [*groups, states.group])


def num_shared(prefixes: Prefixes, states: PoolStates | None, found: Found) -> int:
    """Number of pages that a text shares with a known text, for ``Prefixes.prefer``.

    With states, it counts to the last grid position before the text differs from a known text that goes on,
    since a third text may find both pages and states there. It is 0 if the text merely extends known texts.
    """
    if states is None:
        return prefixes.num_shared(found)
    step, path = states.interval // prefixes.page_size, found.paths[0]
    return len(path.pages) // step * step if path.goes_on else 0


def begin(
    cache: PoolCache,
    input_ids: Tensor,
    rows: Sequence[Sequence[int]],
    begins: Sequence[int],
    origin: Origin,
    prefixes: Prefixes,
    states: PoolStates | None,
    blank: Tensor,
    is_hidden: Callable[[int, int], bool],
) -> int:
    """Give an empty cache the longest prefix that is known of every row.

    Args:
        cache: The cache.
        input_ids: As of ``KVPool.begin``.
        rows: Tokens of each row, the last of which is always computed.
        begins: Column of the first token of each row.
        origin: Origin of the tokens.
        prefixes: Prefixes of the pool.
        states: Pages of recurrent states.
        blank: Empty tensor with the dtype and device of keys.
        is_hidden: Argument ``is_within`` of ``Prefixes.begin``.

    Returns:
        Number of columns of the prefix, padding included.
    """
    texts = [*zip((row[:-1] for row in rows), origin.scopes(), origin.stored_scopes(), strict=True)]
    with uninterrupted():
        end, every, tables = prefixes.begin(texts, begins, is_hidden)
        origin.num_shared = [num_shared(prefixes, states, found) for found in every]
        cache.sequences[0].requests = [own[0].request for own in tables]
        kept = [own.pop() for own in tables if states is not None]
        cache.begin_behind(tables, begins, end, blank)
        if states is not None:
            states.begin(cache, kept, end, origin.num_shared)
        origin.fed = FedTokens(input_ids, end)
    return end


def begin_with_none(
    cache: PoolCache,
    input_ids: Tensor,
    rows: Sequence[Sequence[int]],
    begins: Sequence[int],
    origin: Origin,
    prefixes: Prefixes,
    blank: Tensor,
) -> None:
    """Begin a cache without any prefix; arguments are those of ``begin``."""
    groups, end = prefixes.groups[: len(cache.sequences)], min(begins)
    cache.begin_behind([[group.new_table().table for group in groups] for _ in rows], begins, end, blank)
    origin.fed = FedTokens(input_ids, end)


def with_hidden(
    misses: Sequence[Miss],
    prefixes: Prefixes,
    states: PoolStates | None,
    tokens: Sequence[int],
    scope: str,
    is_hidden: Callable[[int], bool],
) -> list[Miss]:
    """Causes of misses, with those of pages that are known, but not with all that the next token reads.

    ``is_hidden`` says of a number of tokens whether it is unknown what the model remembers after them.
    """
    first, end = prefixes.num_known(tokens, scope), prefixes.main.tree.num_known(tokens, scope)
    cause = "window passed" if states is None else "no states"
    found = [Miss(cause, first, end - first)] if first < end else []
    end = first
    while first and is_hidden(first * prefixes.page_size):
        first -= 1
    return [*([Miss("no states", first, end - first)] if first < end else []), *found, *misses]


def rows_of(cache: PoolCache, origin: Origin, input_ids: Tensor) -> list[list[int]]:
    """Tokens of each row of a cache, without padding; ``input_ids`` are those of ``commit``.

    Of rows that were chosen among others they are those that were computed.

    Raises:
        ArgumentError: as ``KVPool.commit``.
    """
    num_tokens, has_content = cache.sequences[0].num_positions, any(origin.contents)
    if origin.fed.is_chosen and (not has_content or origin.fed.are_as_asked(cache.begins)):
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES)
        return origin.fed.rows(cache.begins)
    sizes = expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES, B=cache.sequences[0].size)
    if not num_tokens <= sizes["T"] <= num_tokens + 1:
        raise ArgumentError(
            f"input_ids must be the {num_tokens} tokens of the cache, or one more, got {sizes['T']}"
        )
    if origin.fed.is_known:  # with content, tokens may be known by other numbers than the model's
        num_same = origin.num_found if has_content and not origin.fed.is_chosen else num_tokens
        origin.fed.expect(input_ids, cache.begins, num_same)
    return [row[begin:num_tokens] for row, begin in zip(input_ids.tolist(), cache.begins, strict=True)]


def commit_rows(
    cache: PoolCache,
    rows: Sequence[Sequence[int]],
    origin: Origin,
    prefixes: Prefixes,
    states: PoolStates | None = None,
    found: int = 0,
) -> None:
    """Let others find the full pages of a cache, and its states if they are kept.

    Args:
        cache: The cache.
        rows: Tokens of each row.
        origin: Origin of the tokens.
        prefixes: Prefixes of the pool.
        states: Pages of recurrent states; if given, ``rows`` end on the grid.
        found: Number of tokens whose states the text continued from; 0 for none.

    Raises:
        ArgumentError, StateError: as ``Sequences.commit``.
    """
    texts = [Text.of(row) for row in rows]
    groups = [*zip(cache.sequences, prefixes.groups, strict=False)]
    for sequences, group in groups:
        sequences.commit(group.tree, rows, origin.scopes())
    scopes = zip(origin.scopes(), origin.stored_scopes(), origin.num_shared, strict=True)
    for row, (scope, stored_scope, shared) in enumerate(scopes):
        held = [replace(x.rows[row], kept=None) for x, _ in groups]
        kept = None if states is None else states.write(cache, row, rows[row], scope, found)
        if states is not None:
            states.note(cache.sequences[0].pages.pool.events, "kept", held[0].table.request)
        held += [] if kept is None else [kept]
        prefixes.prefer(held, shared)
        prefixes.keep(held, texts[row], stored_scope)
        if kept is not None:
            kept.table.release()
    for sequences, _ in groups:
        sequences.give_up_passed()


@whole
def commit(
    cache: PoolCache,
    rows: Sequence[Sequence[int]],
    origin: Origin,
    prefixes: Prefixes,
    states: PoolStates | None,
) -> None:
    """``commit_rows`` for a cache, or for its copies after pieces of its text, which are then dropped."""
    grid = cache.grid
    if grid is None or states is None:
        commit_rows(cache, rows, origin, prefixes)
        return
    texts = [Text(row) for row in rows]
    for end in sorted(grid.copies):
        commit_rows(grid.copies[end], [text[:end] for text in texts], origin, prefixes, states, grid.found)
        grid.found = end
        del grid.copies[end]
