"""Ragged sequences in one pool of pages, sharing every full page that begins with the same tokens.

Shapes: T new tokens, H key/value heads, Hq query heads, Dk and Dv head dims.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches.format import CacheFormat
from kvloom.caches.prefixes.group import Below, PrefixGroup
from kvloom.caches.prefixes.search import Prefixes
from kvloom.caches.prefixes.step import GroupStep, Step
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.row import Row
from kvloom.caches.rows.saving import SavedStorage
from kvloom.caches.tensors.storage import Storage
from kvloom.core.checks import expect_range
from kvloom.errors import ArgumentError, ConfigError, StateError
from kvloom.paging import PageTable, PrefixTree, check, expect_salt, whole


class PrefixSequence:
    """One sequence of a ``PrefixCache``: made by ``begin`` or ``fork``, valid until ``end``.

    Attributes:
        tokens: Token ids, pending ones included.
        salt: Salt of the prefix look-up: only sequences with the same salt share pages.
        groups: Page table in each group of layers.
        num_cached: Number of tokens whose keys and values were found at ``begin``.
        stored: Number of tokens that each layer has.
    """

    __slots__ = ("groups", "num_cached", "num_shared", "salt", "stored", "tokens")

    def __init__(
        self, tokens: list[int], salt: str, groups: list[Row], num_layers: int, num_shared: int
    ) -> None:
        self.tokens = tokens
        self.salt = salt
        self.groups = groups
        self.num_cached = groups[0].num_tokens
        self.num_shared = num_shared  # pages that another sequence had, too
        self.stored = [self.num_cached] * num_layers

    @property
    def table(self) -> PageTable:
        """Its pages in the first group."""
        return self.groups[0].table

    @property
    def num_pending(self) -> int:
        """Number of tokens whose keys and values some layer does not have yet."""
        return len(self.tokens) - min(self.stored)


class PrefixCache:
    """Keys and values of many sequences; full pages are found again by their tokens.

    The protocol of a step: ``begin`` (or ``extend``), ``append`` in every layer, ``commit``; then ``attend``
    at any time. Pages are shared by comparing tokens, never by a hash alone, and only within a salt. They are
    copy-on-write. When the pool is full, pages that no sequence holds are evicted, by default the least
    recently used first.

    Layers with the same window form a group with its own pool of ``max_tokens``; so do residual windows. Such
    a group holds only what later tokens of a sequence see, which is enough to find a prefix.

    Args:
        format: Format of the tokens, with ``max_tokens`` of each layer.
        num_layers: Attention layers.
        heads: Key/value heads.
        head_dim: Elements of a head vector of the keys and, without ``value_dim``, of the values.
        value_dim: Elements of a head vector of the values.
        dtype: Dtype that the model computes in, and of unquantized tokens unless ``format`` has another.
        device: Device of the tensors.
        policy: Eviction policy, as of ``PagePool``, in layers without a window.
        windows: For each layer, the number of tokens that a token sees, itself included; ``None`` for all.

    Attributes:
        prefixes: The groups of layers: those without a window, then those of each window, then residual
            windows in the same order. ``pages`` and ``tree`` belong to the first.

    Raises:
        ConfigError: ``format`` has no ``max_tokens``.
        ArgumentError: there is no such policy, or not one window for each layer.
    """

    def __init__(
        self,
        format: CacheFormat,
        *,
        num_layers: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        policy: str = "lru",
        windows: Sequence[int | None] | None = None,
    ) -> None:
        if format.max_tokens is None:
            raise ConfigError("format must have max_tokens, got None")
        expect_range("num_layers", num_layers, 1)
        windows = [None] * num_layers if windows is None else list(windows)
        if len(windows) != num_layers:
            raise ArgumentError(f"windows must be of {num_layers} layers, got {len(windows)}")
        for window in windows:
            if window is not None:
                expect_range("windows", window, 1)
        self.windows, self.num_recent = windows, format.recent
        dims, device = (head_dim, head_dim if value_dim is None else value_dim), torch.device(device)
        groups, residuals = list[PrefixGroup](), list[PrefixGroup]()
        self._codes: list[int] = [0] * num_layers  # group of each layer
        for window in sorted(set(windows), key=lambda x: x or 0):
            layers = [i for i, own in enumerate(windows) if own == window]
            pages = Pages(format, is_kept=True, policy=policy if window is None else "lru")
            pages.add_layers(layers, heads, dims, dtype, device)
            for i in layers:
                self._codes[i] = len(groups)
            groups.append(PrefixGroup(pages, window))
            residual = pages.of_residual()
            if residual is not None:
                residual.add_layers(layers, heads, dims, dtype, device)
                residuals.append(PrefixGroup(residual, format.residual_window(window)))
        self._residuals = [len(groups) + i for i in self._codes] if residuals else []
        self.prefixes = Prefixes(groups + residuals)
        self._sequences: dict[PrefixSequence, None] = {}  # those that have not ended
        self._steps: dict[Any, tuple[Step, GroupStep]] = {}  # until tables get other pages
        self._grown: dict[PrefixSequence, None] = {}  # with tokens since ``commit``, which windows may pass

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the pages that are not free, without the store below."""
        saved = []
        for group in self.prefixes.groups:
            pool, pages = group.pages.pool, group.pages
            held = [page for page in range(pool.num_pages) if not pool.is_free(page)]
            layers = {i: SavedStorage.of(x, pages.slots(held, x)) for i, x in group.storages.items()}
            saved.append((pool, held, layers, group.tree))
        every = [group.pages for group in self.prefixes.groups]
        return vars(self) | {"prefixes": every, "_saved": saved, "_steps": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        every, saved = (state.pop(name) for name in ("prefixes", "_saved"))
        groups = []
        for pages, (pool, held, layers, tree) in zip(every, saved, strict=True):
            pages.pool, pages.is_kept = pool, True
            for i, layer in layers.items():
                pages.storages[i] = storage = layer.storage()
                pages.fit(storage)
                layer.write(storage, pages.slots(held, storage))
            groups.append(PrefixGroup(pages, tree=tree))
        live = dict.fromkeys(state["_sequences"])
        vars(self).update(state, prefixes=Prefixes(groups), _sequences=live, _grown=dict(live), _steps={})

    @property
    def pages(self) -> Pages:
        """Pages of the first group."""
        return self.prefixes.main.pages

    @property
    def tree(self) -> PrefixTree:
        """Prefix tree of the first group."""
        return self.prefixes.main.tree

    @property
    def below(self) -> Below | None:
        """Store that takes sealed pages and gives missing ones; ``kvloom.store.put_below`` sets it."""
        return self.prefixes.main.below

    @property
    def layers(self) -> list[Storage]:
        """The tensors of each layer, without residual windows."""
        return [self.prefixes.groups[n].storages[i] for i, n in enumerate(self._codes)]

    def __enter__(self) -> "PrefixCache":  # noqa: PYI034 (Self is not in Python 3.10)
        return self

    @whole
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sequence in [*self._sequences]:
            self.end(sequence)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all layers, scales and residual windows included."""
        return sum(group.pages.nbytes for group in self.prefixes.groups)

    @whole
    def begin(self, tokens: Iterable[int], salt: str = "") -> PrefixSequence:
        """Begin a sequence of ``tokens`` with the longest prefix that is cached, in whole pages.

        The last token is never taken from the cache, since its output must be computed.

        Raises:
            ArgumentError: ``tokens`` is empty, or ``salt`` no string.
        """
        expect_salt(salt)
        ids = list(tokens)
        if not ids:
            raise ArgumentError("tokens must hold at least one token, got none")
        prefixes, text = self.prefixes, ids[:-1]
        found, held = prefixes.look_up(prefixes.find(text, salt), salt)
        events, num_pages = self.pages.pool.events, prefixes.num_whole(found)
        num_tokens, request = num_pages * prefixes.page_size, 0 if events is None else events.request
        tables = prefixes.hold(found, num_tokens, held, request)
        groups = [Row(table, num_pages - table.num_pages) for table in tables]
        sequence = PrefixSequence(ids, salt, groups, len(self.windows), prefixes.num_shared(found))
        self._sequences[sequence] = None
        return sequence

    def extend(self, sequence: PrefixSequence, tokens: Iterable[int]) -> None:
        """Add pending tokens."""
        self._expect_live(sequence)
        sequence.tokens += tokens

    @whole
    def append(self, sequence: PrefixSequence, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the next T pending tokens of a layer.

        Args:
            sequence: A live sequence with at least T pending tokens in this layer.
            layer: Index of the layer.
            key: ``[T, H, Dk]``.
            value: ``[T, H, Dv]``.

        Raises:
            ArgumentError: more tokens than pending, or no such layer; nothing was written.
            OutOfPages: every page is held; nothing was written.
            ShapeError: as ``ops.store``.
        """
        self._expect_live(sequence)
        expect_range("layer", layer, 0, len(self.windows))
        start = sequence.stored[layer]
        end = start + key.shape[0]
        if end > len(sequence.tokens):
            raise ArgumentError(
                f"key must have at most the {len(sequence.tokens) - start} tokens that are pending in layer "
                f"{layer}, got {key.shape[0]}"
            )
        for number in self._groups_of(layer):
            self._reserve(sequence, number, end)
        for number in self._groups_of(layer):
            step, of_group = self._step(number, [(sequence, start, end)])
            storage = self.prefixes.groups[number].storages[layer]
            storage.store(key, value, of_group.slots, step.positions)
        sequence.stored[layer] = end
        self._grown[sequence] = None

    @whole
    def commit(self, sequence: PrefixSequence) -> None:
        """Seal the full pages of a sequence, so that others find them.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        self._steps.clear()
        self.prefixes.seal(sequence.groups, sequence.tokens, sequence.salt, sequence.num_shared)
        self.prefixes.keep(sequence.groups, sequence.tokens, sequence.salt)
        for group, own in zip(self.prefixes.groups, sequence.groups, strict=True):
            group.release_passed(own, sequence.stored[0])
        self._grown.pop(sequence, None)

    def attend(
        self,
        queries: Tensor,
        sequences: Sequence[PrefixSequence],
        layer: int,
        scores: ops.Scores | None = None,
    ) -> Tensor:
        """Attention of each sequence's last tokens over all it has in ``layer``.

        Args:
            queries: ``[sum of new tokens, Hq, Dk]``, the same number for each sequence.
            sequences: Live sequences with at least one token in this layer.
            layer: Index of the layer.
            scores: Masks and biases, without the window, which is the layer's; causal if ``None``.

        Returns:
            ``[sum of new tokens, Hq, Dv]``.

        Raises:
            ArgumentError: the queries are not the same number for each sequence, or more than it has tokens.
            StateError: they would see tokens that a window has passed.
        """
        expect_range("layer", layer, 0, len(self.windows))
        for sequence in sequences:
            self._expect_live(sequence)
        if not sequences or queries.shape[0] % len(sequences):
            raise ArgumentError(
                f"queries must be shared out to {len(sequences)} sequences, got {queries.shape[0]}"
            )
        num_new = queries.shape[0] // len(sequences)
        lengths = [sequence.stored[layer] for sequence in sequences]
        if min(lengths) < max(num_new, 1):
            raise ArgumentError(f"queries must be at most {min(lengths)} for each sequence, got {num_new}")
        scores = ops.Scores() if scores is None else scores
        if self.windows[layer] is not None:
            scores = replace(scores, window=self.windows[layer])
        numbers, groups = self._groups_of(layer), self.prefixes.groups
        for number in numbers:
            for sequence, length in zip(sequences, lengths, strict=True):
                groups[number].expect_seen(sequence.groups[number], length - num_new)
        rows = [(x, length - num_new, length) for x, length in zip(sequences, lengths, strict=True)]
        storages = [groups[number].storages[layer] for number in numbers]
        (_, batch, first), *beside = (self._step(number, rows)[1] for number in numbers)
        exact = (storages[1], beside[0].batch, self.num_recent) if beside else None
        return storages[0].attend(queries, batch, scores, first, beside=exact)

    @whole
    def fork(self, sequence: PrefixSequence) -> PrefixSequence:
        """New sequence with the same tokens on the same pages.

        Raises:
            StateError: layers differ in the tokens they have.
        """
        self._settle(sequence)
        groups = [own.fork() for own in sequence.groups]
        tokens, num_shared = sequence.tokens.copy(), sequence.num_shared
        other = PrefixSequence(tokens, sequence.salt, groups, len(self.windows), num_shared)
        other.stored = sequence.stored.copy()
        if sequence in self._grown:
            self._grown[other] = None
        self._sequences[other] = None
        return other

    @whole
    def truncate(self, sequence: PrefixSequence, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, pending ones included.

        Raises:
            ArgumentError: there are fewer.
            StateError: a window has passed what the next token would see; nothing was changed.
        """
        self._expect_live(sequence)
        expect_range("num_tokens", num_tokens, 0, len(sequence.tokens) + 1)
        for group, own in zip(self.prefixes.groups, sequence.groups, strict=True):
            group.expect_seen(own, min(num_tokens, *sequence.stored))
        del sequence.tokens[num_tokens:]
        sequence.stored = [min(n, num_tokens) for n in sequence.stored]
        for own in sequence.groups:
            own.truncate(num_tokens)

    @whole
    def end(self, sequence: PrefixSequence) -> None:
        """Release a sequence; its sealed pages can be found until they are evicted."""
        self._expect_live(sequence)
        del self._sequences[sequence]
        self._steps.clear()
        self._grown.pop(sequence, None)
        for own in sequence.groups:
            own.table.release()

    def check(self) -> None:
        """Recompute every invariant of the pages; raises ``StateError`` on the first that does not hold."""
        for i, group in enumerate(self.prefixes.groups):
            check(group.pages.pool, group.tree, [x.groups[i].table for x in self._sequences])

    def report(self) -> dict[str, int]:
        """Numbers of sequences, and of free, held and evictable pages, which sum to ``num_pages``."""
        return {"sequences": len(self._sequences), **self.pages.pool.report()}

    def _expect_live(self, sequence: PrefixSequence) -> None:
        if sequence not in self._sequences:
            raise StateError("this sequence has ended, or belongs to another cache")

    def _settle(self, sequence: PrefixSequence) -> None:
        """Check that all layers have stored the same tokens, and release reserved room without tokens."""
        self._expect_live(sequence)
        if len(set(sequence.stored)) != 1:
            raise StateError(f"every layer must have the same tokens, got {sequence.stored}")
        for own in sequence.groups:
            own.truncate(sequence.stored[0])

    def _groups_of(self, layer: int) -> list[int]:
        """Numbers of the groups that keep the tokens of a layer."""
        return [self._codes[layer], *self._residuals[layer : layer + 1]]

    def _reserve(self, sequence: PrefixSequence, number: int, end: int) -> None:
        """Make room for the tokens before ``end`` in a group; may release pages that windows have passed."""
        group, own = self.prefixes.groups[number], sequence.groups[number]
        new = end - own.num_tokens
        if new <= 0:
            return
        self._steps.clear()
        if own.fill(new):
            return
        if group.window is not None and group.num_missing(own, end) > group.pages.num_spare:
            for other in self._grown:
                group.release_passed(other.groups[number], min(other.stored))
        group.append(own, new)

    def _step(self, number: int, rows: Sequence[tuple[PrefixSequence, int, int]]) -> tuple[Step, GroupStep]:
        """Step of a group with the tokens from one number to another of each sequence, for all its layers."""
        key = number, *rows
        if key not in self._steps:
            lengths = [(start, end - start) for _, start, end in rows]
            held = [sequence.groups[number] for sequence, *_ in rows]
            step = Step(lengths, [self.prefixes.groups[number]], [held])
            self._steps[key] = step, step.groups[0]
        return self._steps[key]
