"""Unquantized tokens at the ends of texts, found with the pages of codes that end there.

With ``CacheFormat.recent`` a query reads its newest tokens unquantized and all others as codes, which are all
that pages hold. What follows a prefix that is found is what follows a computed one, if the tokens in front of
its end are found unquantized, too.

Shapes: H key/value heads, N tokens, D head dim.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from torch import Tensor

from kvloom.errors import StateError
from kvloom.paging import PageRef

if TYPE_CHECKING:
    from kvloom.caches.pages import Pages
    from kvloom.caches.sequences import Sequences

SHARE: Final = 8
"""Bytes of pages for a byte of residual tokens."""


class ResidualTokens(NamedTuple):
    """The tokens in front of an end of one sequence, in every layer that keeps codes.

    Attributes:
        first: Position of the first of them.
        layers: By layer keys ``[1, H, N, Dk]`` and values ``[1, H, N, Dv]``.
    """

    first: int
    layers: Mapping[int, tuple[Tensor, Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for pair in self.layers.values() for x in pair)


class Residuals:
    """Residual tokens by the last page in front of their end.

    A page in a prefix tree stands for one text under one salt as long as its generation lives, so they are
    found by those alone who find the page. They take an eighth of what all pages can take at most; those that
    were used least recently go first.

    Args:
        pages: The pages.

    Attributes:
        nbytes: Bytes that are kept.
    """

    def __init__(self, pages: "Pages") -> None:
        self._pages = pages
        self._kept: OrderedDict[PageRef, ResidualTokens] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, page: PageRef) -> ResidualTokens | None:
        """Those in front of the end of a page; ``None`` if there are none."""
        found = self._kept.get(page)
        if found is not None:
            self._kept.move_to_end(page)
        return found

    def keep(self, page: PageRef, tokens: ResidualTokens) -> None:
        """Keep those in front of the end of a sealed page, and forget others if there is no room."""
        self._forget(page)
        self._kept[page] = tokens
        self.nbytes += tokens.nbytes
        max_bytes = self._max_bytes
        if self.nbytes > max_bytes:
            for other in [*self._kept]:
                if not self._is_sealed(other):  # its pages were evicted
                    self._forget(other)
        while self.nbytes > max_bytes:
            self._forget(next(iter(self._kept)))

    def keep_ends(self, sequences: "Sequences") -> None:
        """Keep those in front of the ends of the last full pages of sequences, which are sealed.

        Without memory for them nothing is kept.
        """
        size = self._pages.format.page_size
        num_pages = sequences.num_positions // size
        if sequences.recent is None or not num_pages:
            return
        for row, table in enumerate(sequences.tables):
            try:
                tokens = sequences.recent.residual(row, num_pages * size)
            except (MemoryError, RuntimeError):
                return
            if tokens is not None and tokens.layers:
                self.keep(table.pages[num_pages - 1], tokens)

    @property
    def _max_bytes(self) -> int:
        size = sum(storage.nbytes_per_token for storage in self._pages.storages.values())
        return int((self._pages.format.max_tokens or 0) * size) // SHARE

    def _forget(self, page: PageRef) -> None:
        forgotten = self._kept.pop(page, None)
        self.nbytes -= 0 if forgotten is None else forgotten.nbytes

    def _is_sealed(self, page: PageRef) -> bool:
        try:
            return self._pages.pool.is_sealed(page)
        except StateError:
            return False
