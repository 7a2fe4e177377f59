"""Moves of tokens between the blocks of one rank and a store: the part of the connector in a worker."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

import torch

from kvloom.core.text import Text
from kvloom.integrations.vllm.blocks import Blocks
from kvloom.integrations.vllm.storing.planner import Transfer, TransferPlan
from kvloom.integrations.vllm.storing.recurrent import States
from kvloom.store import Fingerprint, KVStore
from kvloom.store.below import longest_run, runs_of

_LOG: Final = logging.getLogger("kvloom.store")
_READERS: Final = 2
_PATIENCE: Final = 0.02
"""Seconds that a step without anything to compute waits for reads."""


class Mover:
    """Mover that reads while other requests are computed, and writes the tokens that a step computed.

    Args:
        store: The store.
        fingerprint: Fingerprint of the model, for all heads of all ranks.
        blocks: Blocks of this rank.
        heads: Numbers of its heads; ``None`` for all.
        ranks: vLLM's group of ranks that hold the other heads; ``None`` if this one has all.
        is_changed: Function that tells whether the model has changed; its argument asks for an exact check.
        states: Recurrent states of the model, if it has some; there is one rank then.

    Attributes:
        is_aside: Whether the model has changed; then nothing is read or written.
    """

    def __init__(
        self,
        store: KVStore,
        fingerprint: Fingerprint,
        blocks: Blocks,
        heads: range | None,
        ranks: Any = None,
        is_changed: Callable[[bool], bool] = lambda exactly: False,
        states: States | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.is_aside = False
        self._is_changed = is_changed
        self._store, self._fingerprint, self._blocks = store, fingerprint, blocks
        self._heads, self._ranks, self._states = heads, ranks, states
        self._readers = ThreadPoolExecutor(_READERS, "kvloom-read")
        self._loading: dict[str, Future[bool]] = {}

    def start(self, plan: TransferPlan) -> None:
        """Start the reads of a plan. Called in every step, so that no change of the model is missed."""
        self._look(plan.is_doubted)
        if plan.is_stale:
            self._refresh()
        for load in plan.loads:
            self._loading[load.request] = self._readers.submit(self._read, load)

    def finished(self, is_idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose reads ended since the last call, and those that were not read completely."""
        if is_idle and self._loading:
            wait(self._loading.values(), _PATIENCE, FIRST_COMPLETED)
        done = {name for name, future in self._loading.items() if future.done()}
        failed = {name for name in done if not self._loading.pop(name).result() or self.is_aside}
        return done, failed

    def save(self, plan: TransferPlan) -> None:
        """Copy tokens that stores do not have, to be written in the background; same plan on all ranks."""
        if plan.saves and self._ranks is not None:  # each rank has checked its part of the model
            aside = torch.tensor(self.is_aside, dtype=torch.uint8)
            torch.distributed.all_reduce(aside, torch.distributed.ReduceOp.MAX, group=self._ranks.cpu_group)
            self.is_aside = bool(aside)
        for save in () if self.is_aside else plan.saves:
            text = Text(save.tokens)
            for run in reversed(self._wanted(save, text)):  # as StoreBelow.keep does
                packed = self._gathered(self._blocks.pack(save.blocks, run))
                if packed is not None:
                    size = self._blocks.page_size
                    own = text[: run.stop * size], run.start * size, size, packed
                    self._store.save(self._fingerprint, save.salt, *own)
                    self.counts["tokens_saved"] += len(run) * size
        for save in () if self.is_aside else plan.states:
            self._save_states(save)

    def close(self) -> None:
        """Wait for all reads, and start no more."""
        self._readers.shutdown()

    def _look(self, exactly: bool) -> None:
        """Set ``is_aside`` if the model has changed."""
        if not self.is_aside and self._is_changed(exactly):
            self.is_aside = True
            _LOG.warning(
                "The weights of the model changed. The store has keys and values of those that were loaded, "
                "and is neither read nor written until the engine starts again."
            )

    def _read(self, load: Transfer) -> bool:
        """Read the tokens of a request; returns whether all were read."""
        at, end, text = load.start, len(load.tokens), Text(load.tokens)
        try:
            for attempt in range(0 if self.is_aside else 2):
                if attempt:  # another process wrote it a moment ago
                    self._refresh()
                pieces = self._store.load(self._fingerprint, load.salt, text, at, heads=self._heads)
                for piece in pieces:
                    self._blocks.unpack(piece, load.blocks, end)
                    at = piece.segment.end
                if at >= end and self._has_states(load):
                    self.counts["tokens_loaded"] += end - load.start
                    return True
        except Exception:  # without a result the request would wait forever
            _LOG.exception("a prefix was not read")
        self.counts["tokens_failed"] += end - load.start
        return False

    def _has_states(self, load: Transfer) -> bool:
        """Read the states after all tokens of a request; returns false if they are needed and missing."""
        if self._states is None:
            return True
        whose, end = self._states.fingerprint, len(load.tokens)
        for piece in self._store.load(whose, load.salt, load.tokens, end - 1):
            self._states.unpack(piece, load.states)
            return True
        return False

    def _save_states(self, save: Transfer) -> None:
        """Copy the states after the tokens of a request, if the stores do not have them."""
        if self._states is None:
            return
        whose, end, text = self._states.fingerprint, len(save.tokens), Text(save.tokens)
        prefixes = self._store.prefixes(whose, save.salt, text)
        is_missing = self._store.missing(whose, prefixes, range(end, end + 1))
        if is_missing and self._store.has_room(self._states.nbytes):
            self._store.save(whose, save.salt, text, end - 1, 1, self._states.pack(save.states))

    def _refresh(self) -> None:
        self._store.refresh(self._fingerprint)
        if self._states is not None:
            self._store.refresh(self._states.fingerprint)

    def _wanted(self, save: Transfer, text: Text) -> list[range]:
        """Contiguous ranges of pages to write, decided by the first rank."""
        if self._ranks is None:
            return self._missing(save, text)
        mine = self._missing(save, text) if self._ranks.rank_in_group == 0 else None
        runs: list[range] = self._ranks.broadcast_object(mine, src=0)
        return runs

    def _missing(self, save: Transfer, text: Text) -> list[range]:
        size, end = self._blocks.page_size, len(save.tokens)
        prefixes = self._store.prefixes(self._fingerprint, save.salt, text)
        ends = range(save.start + size, end + 1, size)
        pages = [x // size - 1 for x in self._store.missing(self._fingerprint, prefixes, ends)]
        nbytes = self._blocks.page_bytes * (1 if self._ranks is None else self._ranks.world_size)
        runs = runs_of(
            [x for x in pages if self._blocks.has(save.blocks, x)], longest_run(self._store, nbytes)
        )
        room = [run for run in runs if self._store.has_room(nbytes * len(run))]
        self.counts["tokens_dropped"] += size * (sum(map(len, runs)) - sum(map(len, room)))
        return room

    def _gathered(self, packed: bytearray) -> bytearray | None:
        """Packed pages of all heads on the first rank, ``None`` on the others."""
        ranks = self._ranks
        if ranks is None:
            return packed
        data, whole, parts = torch.frombuffer(packed, dtype=torch.uint8), bytearray(), None
        if ranks.rank_in_group == 0:
            whole = bytearray(len(packed) * ranks.world_size)
            parts = list(torch.frombuffer(whole, dtype=torch.uint8).chunk(ranks.world_size))
        torch.distributed.gather(data, parts, dst=ranks.ranks[0], group=ranks.cpu_group)
        if parts is None:
            return None
        shared = ranks.world_size // self._fingerprint.num_heads  # ranks that have the same head
        return whole if shared < 2 else bytearray(b"".join(bytes(part.numpy()) for part in parts[::shared]))
