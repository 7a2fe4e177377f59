"""The newest tokens of each request unquantized, beside the codes of all tokens.

The positions of a request lie in pages of 16 slots, the same in every layer, that it takes as it grows and
gives back when no query reads them any more.

Shapes: T new tokens of all requests, B requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat
from kvloom.caches.residual import ResidualTokens
from kvloom.caches.storage import Storage
from kvloom.caches.tokens import BLOCK, PARTIAL
from kvloom.core.indexing import CacheIndex
from kvloom.errors import OutOfPages, StateError
from kvloom.integrations.transformers.batching.sizes import page_bytes, specs_of

_FIRST: Final = 32
"""Pages to begin with."""
_FORMAT: Final = CacheFormat(page_size=BLOCK, layout="HND")


@dataclass(slots=True, eq=False)
class Span:
    """Where the newest tokens of one request are.

    Attributes:
        known: Position from which on tokens were kept; those before are codes alone.
        first: The first page is that of position ``16 * first``.
        pages: In order.
        is_exact: Whether no query of the request read a newest token as a code.
    """

    known: int = 0
    first: int = 0
    pages: list[int] = field(default_factory=list)
    is_exact: bool = True


class NewestStep(NamedTuple):
    """What the layers of a step share.

    Attributes:
        slots: ``[T]``, where the new tokens go.
        batch: The tokens that queries read unquantized, among others that the window hides.
        known: ``[B]``, position from which on tokens of a request were kept.
    """

    slots: Tensor
    batch: ops.Batch
    known: Tensor


class Newest:
    """Pages of all requests, in every layer that keeps codes.

    Args:
        format: How tokens are kept, ``recent`` of each unquantized, too.
        config: Of the model.
        dtype: That it computes in.
        device: Where.
    """

    def __init__(self, format: CacheFormat, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.num_tokens, self._page_size = format.recent, format.page_size
        self.storages = {
            layer: Storage(*specs_of(config, _FORMAT, dtype), BLOCK, device, _FORMAT.layout)
            for layer in _layers(format, config)
        }
        self._free: list[int] = []
        self._num_pages = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(storage.nbytes for storage in self.storages.values())

    def reserve(self, span: Span, start: int, end: int) -> None:
        """Have pages for what queries from position ``start`` to ``end`` read, and give back those before.

        Those that the end of the last full page of codes reads stay, too.

        Raises:
            OutOfPages: there is no memory for them; nothing was taken.
        """
        oldest = max(start - self.num_tokens + 1 - self._page_size, 0)
        first = max(oldest // BLOCK, span.known // BLOCK, span.first)
        gone = min(first - span.first, len(span.pages))
        self._free += span.pages[:gone]
        del span.pages[:gone]
        span.first = first
        span.pages += self._take(-(-end // BLOCK) - first - len(span.pages))

    def release(self, span: Span) -> None:
        """Give back all pages."""
        self._free += span.pages
        span.pages = []

    def copied(self, span: Span) -> Span:
        """The same tokens in other pages.

        Raises:
            OutOfPages: there is no memory for them; nothing was taken.
        """
        other = Span(span.known, span.first, self._take(len(span.pages)), span.is_exact)
        within = torch.arange(BLOCK)
        source, target = (
            (torch.tensor(x.pages, dtype=torch.int64).unsqueeze(1) * BLOCK + within).flatten()
            for x in (span, other)
        )
        for storage in self.storages.values():
            device = storage.device
            ops.copy(storage.view, source.to(device), storage.view, target.to(device))
        return other

    def residual(self, span: Span, end: int) -> ResidualTokens | None:
        """What a query at ``end`` of a request reads unquantized, if it is all here and not nothing.

        ``None`` also where the request itself read codes in the place of such tokens.
        """
        first = max(end - self.num_tokens + 1, 0)
        if max(span.known, span.first * BLOCK) > first or first == end or not span.is_exact:
            return None
        slots, layers = self._slots(span, first, end), {}
        for layer, storage in self.storages.items():
            layers[layer] = ops.load(slots.to(storage.device)[None], storage.view)
        return ResidualTokens(first, layers)

    def restored(self, tokens: ResidualTokens, end: int) -> Span:
        """These tokens in front of position ``end`` in pages of a new request.

        Raises:
            OutOfPages: there is no memory for them; nothing was taken.
        """
        first = tokens.first // BLOCK
        span = Span(tokens.first, first, self._take(-(-end // BLOCK) - first))
        slots = self._slots(span, tokens.first, end)
        for layer, storage in self.storages.items():
            storage.store(*tokens.layers[layer], slots.to(storage.device)[None])
        return span

    def step(
        self,
        spans: Sequence[Span],
        lengths: Sequence[tuple[int, int]],
        sequence: Tensor,
        position: Tensor,
        seqstarts: Tensor,
    ) -> NewestStep:
        """The step of some requests whose pages are reserved.

        Args:
            spans: Of each.
            lengths: Stored and new tokens of each.
            sequence: ``[T]``, which of them each new token is of.
            position: ``[T]``, of each new token.
            seqstarts: ``[B + 1]``, as of ``ops.Batch``.
        """
        rows, numbers = list[list[int]](), list[tuple[int, int, int, int]]()
        for span, (past, new) in zip(spans, lengths, strict=True):
            first = max(past - self.num_tokens + 1, 0)
            base = first // PARTIAL * PARTIAL
            span.is_exact = span.is_exact and span.known <= first
            slots = [page * BLOCK for page in span.pages]
            before = span.first - base // BLOCK
            rows.append([slots[0]] * before + slots[max(-before, 0) :])  # in front, any page: it is hidden
            numbers.append((past + new - base, max(first, span.known) - base, span.known, base))
        width = max(map(len, rows))
        device = seqstarts.device
        table = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
        stored, visible, known, base_of = torch.tensor(numbers, device=device).unbind(1)
        index = CacheIndex.pages(table, BLOCK)
        kvstarts = torch.nn.functional.pad(stored.cumsum(0), (1, 0))
        batch = ops.Batch(index, seqstarts, kvstarts, first_visible=visible.contiguous())
        return NewestStep(index.slots(sequence, position - base_of[sequence]), batch, known.contiguous())

    def check(self, spans: Iterable[Span]) -> None:
        """Raise StateError unless each page is free or of one request."""
        pages = sorted([*self._free, *(page for span in spans for page in span.pages)])
        if pages != [*range(self._num_pages)]:
            raise StateError(f"pages of newest tokens must be {self._num_pages}, each once, got {pages}")

    def _slots(self, span: Span, start: int, end: int) -> Tensor:
        """``[end - start]``, of some positions of a request."""
        position = torch.arange(start, end)
        return torch.tensor(span.pages)[position // BLOCK - span.first] * BLOCK + position % BLOCK

    def _take(self, num_pages: int) -> list[int]:
        missing = num_pages - len(self._free)
        if missing > 0:
            more = max(missing, self._num_pages // 2, _FIRST)
            try:
                for storage in self.storages.values():
                    storage.reserve(1, self._num_pages + more)
            except (MemoryError, RuntimeError) as error:
                raise OutOfPages(f"no memory for {more} pages of newest tokens: {error}") from error
            self._free += range(self._num_pages + more - 1, self._num_pages - 1, -1)
            self._num_pages += more
        return [self._free.pop() for _ in range(num_pages)]


def newest_bytes(
    format: CacheFormat, config: Any, dtype: torch.dtype, num_requests: int, max_batch_tokens: int
) -> int:
    """Bytes for the newest tokens of so many requests, and those of a step."""
    each = -(-(format.recent + format.page_size) // BLOCK) + 2
    num_pages = num_requests * each + -(-max_batch_tokens // BLOCK)
    per_layer = page_bytes(config, _FORMAT, dtype) // config.num_hidden_layers
    return int(num_pages * per_layer * len(_layers(format, config)))


def _layers(format: CacheFormat, config: Any) -> list[int]:
    """Those that keep newest tokens unquantized."""
    return [layer for layer in range(config.num_hidden_layers) if format.of_layer(layer).recent]
