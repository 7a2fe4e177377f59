"""``TextLookup``: guesses the next tokens of a text from its earlier ones.

Shapes: N tokens of the text.
"""

from array import array
from collections.abc import Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

_Ids = TypeVar("_Ids", int, Tensor)

SHORTEST: Final = 3
"""Least number of last tokens that must have come before."""
LONGEST: Final = 64
"""Largest number of last tokens that are compared."""
CANDIDATES: Final = 16
"""Largest number of earlier places that are compared, the newest first."""
NEAR: Final = 8
"""Number of tokens before and behind the last place among which the text may go on after an edit."""

_FACTORS: Final = 0x2545F491, 0x1B873593, 0x19D699A5
"""Factors of the newest token and of those before it; sums of products with ids of 31 bits fit into int64."""


class TextLookup:
    """Index of a text that finds where its last tokens came before, in constant time and memory for a token.

    As in LZ77, each place has the number of the place before it in its bucket, and buckets are those of the
    last ``SHORTEST`` tokens.

    Args:
        tokens: First tokens of the text, ids from 0 to 2^31 - 1.

    Attributes:
        is_resumed: Whether the newest draft goes on behind an edit, whose tokens did not come before.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._text, self._before = array("i"), array("i")
        self._newest = array("i", [-1]) * 64  # last place of each bucket; a power of two
        self.is_resumed = False
        self._distance = self._num_resumed = 0  # of the place of the newest draft; resumed drafts in a row
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._text)

    @property
    def nbytes(self) -> int:
        """Bytes of the text and its index."""
        return sum(x.buffer_info()[1] * x.itemsize for x in (self._text, self._before, self._newest))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        first = len(self._text)
        self._text.extend(tokens)
        if len(self._text) > len(self._newest):
            self._make()
            return
        for end in range(first, len(self._text)):
            if end < SHORTEST - 1:
                self._before.append(-1)
                continue
            bucket = self._bucket(end)
            self._before.append(self._newest[bucket])
            self._newest[bucket] = end

    def truncate(self, size: int) -> None:
        """Remove the tokens after the first ``size``."""
        while len(self._text) > size:
            end, before = len(self._text) - 1, self._before.pop()
            if end >= SHORTEST - 1:
                self._newest[self._bucket(end)] = before
            self._text.pop()

    def draft(self, most: int) -> list[int]:
        """Tokens that followed where the last tokens came before; empty if they never did.

        Of the newest 16 places in the bucket of the last 3 tokens, that with the longest match is taken, of
        two alike the newer. A match that reaches the end of the text repeats itself. Where a text leaves what
        it copied, the next 3 drafts go on behind the edit.

        Args:
            most: Number of tokens of a draft.
        """
        text, size = self._text, len(self._text)
        if size <= SHORTEST or most <= 0:
            return []
        found = self._match()
        self.is_resumed = found < 0
        self._num_resumed = self._num_resumed + 1 if self.is_resumed else 0
        if self.is_resumed:
            found = self._resume()
        self._distance = period = size - 1 - found if found >= 0 else 0
        if not period:
            return []
        drafted = text[found + 1 : found + 1 + most].tolist()
        while len(drafted) < most:
            drafted.append(drafted[-period])
        return drafted

    def _match(self) -> int:
        """Place of the last of the tokens that came before, as ``draft`` takes it; -1 if there is none."""
        text, size = self._text, len(self._text)
        at, length, found = self._before[-1], SHORTEST - 1, -1
        for _ in range(CANDIDATES):
            if at < 0:
                break
            # A place is of use only if it has one more token in common than the best one.
            if at >= length and text[at - length : at + 1] == text[size - 1 - length :]:
                longest = min(LONGEST, at + 1)
                found, length = at, length + 1
                while length < longest and text[at - length] == text[size - 1 - length]:
                    length += 1
                if length == LONGEST:
                    break
            at = self._before[at]
        return found

    def _resume(self) -> int:
        """Place of the last token if tokens were replaced, or else inserted or left out; -1 if it is lost."""
        text, size = self._text, len(self._text)
        if not 0 < self._distance < size or self._num_resumed > SHORTEST:
            return -1
        aligned = size - 1 - self._distance  # as many tokens as before were replaced
        near = range(max(aligned - NEAR, 0), min(aligned + NEAR, size - 2) + 1)
        alike = (x for x in near if self._num_resumed > 1 and text[x] == text[-1])
        return min(alike, key=lambda x: abs(x - aligned), default=aligned)

    def _bucket(self, end: int) -> int:
        text = self._text
        return _hashed(text[end], text[end - 1], text[end - 2]) & len(self._newest) - 1

    def _make(self) -> None:
        """Make the index for twice the tokens of the text."""
        size = len(self._text)
        self._newest = array("i", [-1]) * (1 << size.bit_length())
        self._before = array("i", [-1]) * size
        before, newest = (torch.frombuffer(x, dtype=torch.int32) for x in (self._before, self._newest))
        text = torch.frombuffer(self._text, dtype=torch.int32).long()
        hashed = _hashed(text[2:], text[1:-1], text[:-2])
        buckets, order = (hashed & len(newest) - 1).sort(stable=True)
        places = (order + SHORTEST - 1).int()
        is_same = buckets[1:] == buckets[:-1]
        before[places[1:][is_same].long()] = places[:-1][is_same]
        is_last = torch.cat([~is_same, is_same.new_ones(1)])
        newest[buckets[is_last]] = places[is_last]


def _hashed(newest: _Ids, before: _Ids, first: _Ids) -> _Ids:
    """Hash of three tokens that follow one another, or of as many as tensors have."""
    a, b, c = _FACTORS
    key = newest * a + before * b + first * c
    return key ^ key >> 17
