"""Long chunks over codes beside a residual window, by torch as on a GPU: as defined, and as in place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from caches.mixed import DIM, smoothing
from oracles.attention import assert_as_good_as_plain
from oracles.bits import assert_same_bits, generator
from oracles.gathering import gathering
from oracles.pairs import pairwise
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, PagedLayer, Sequences
from kvloom.core.specs import QuantSpec

RECENT = 64
KINDS = {
    "rotated keys": "int4,rotate=keys",
    "rotated": "int4:g16,rotate=both",
    "int8": "int8:g16",
    "smoothed": "int4:g16,rotate=both",
}


@dataclass
class Text:
    """Queries ``[B, Hq, N, D]``, keys and values ``[B, H, N, D]``, and what is done with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    format: CacheFormat
    window: int | None = None

    def layer(self, recent: int) -> PagedLayer:
        format = CacheFormat(quant=self.format.quant, recent=recent, smoothing=self.format.smoothing)
        return PagedLayer(format, Sequences(format, self.window))

    def attend(self, stored: int, scores: ops.Scores, first: list[int] | None = None) -> Tensor:
        """Of the tokens behind ``stored`` ones."""
        layer, hidden = self.layer(self.format.recent), None if first is None else torch.tensor(first)
        if stored:
            layer.append(self.key[:, :, :stored], self.value[:, :, :stored])
        tokens = layer.append(self.key[:, :, stored:], self.value[:, :, stored:])
        if hidden is not None:
            hidden = hidden - (self.key.shape[2] - tokens.index.num_columns)
        firsts = None if hidden is None else hidden.tolist()
        return tokens.attend(self.query[:, :, stored:], scores, first=hidden, firsts=firsts)

    def defined(self, stored: int, scores: ops.Scores, first: list[int] | None, dtype: torch.dtype) -> Tensor:
        """The same, each token read in one of two places, in steps of a dtype."""
        whole = PagedLayer(self.layer(0).format)
        codes = whole.append(self.key, self.value).gather(self.query.dtype)
        count, ratio = self.key.shape[2], self.query.shape[1] // self.key.shape[1]
        key, value, key_codes, value_codes = (
            x.to(dtype).repeat_interleave(ratio, 1) for x in (self.key, self.value, *codes)
        )
        query = self.query[:, :, stored:].to(dtype)
        behind = torch.arange(stored, count).unsqueeze(1) - torch.arange(count)
        is_exact = behind < self.format.recent
        hidden = behind < 0 if self.window is None else (behind < 0) | (behind >= self.window)
        hidden = hidden.expand(len(query), 1, -1, -1)
        if first is not None:
            hidden = hidden | (torch.arange(count) < torch.tensor(first).view(-1, 1, 1, 1))
        logits = torch.where(is_exact, query @ key.mT, query @ key_codes.mT) / query.shape[3] ** 0.5
        logits = logits.masked_fill(hidden, float("-inf"))
        if scores.sinks is not None:
            sinks = scores.sinks.to(dtype).view(-1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat((logits, sinks), -1)
        weights = logits.softmax(-1).nan_to_num(0.0)[..., :count]
        return ((weights * is_exact) @ value + (weights * ~is_exact) @ value_codes).transpose(1, 2)


def make_text(
    rows: int, count: int, kind: str = "rotated keys", dtype: torch.dtype = torch.float32, heads: int = 1,
    ratio: int = 4, dim: int = DIM, window: int | None = None, recent: int = RECENT,
) -> Text:  # fmt: skip
    draw = generator(count)
    query, key, value = (
        torch.randn(rows, n, count, dim, generator=draw).to(dtype) for n in (heads * ratio, heads, heads)
    )
    smooth = smoothing(heads=heads) if kind == "smoothed" else None
    return Text(query, key, value, CacheFormat(
        quant=QuantSpec.parse(KINDS[kind]), recent=recent, smoothing=smooth), window)  # fmt: skip


def compare(
    text: Text, stored: int, scores: ops.Scores | None = None, first: list[int] | None = None
) -> None:
    """With what is defined in float64; what is in place errs no more, either."""
    scores = ops.Scores() if scores is None else scores
    in_place = text.attend(stored, scores, first)
    with gathering() as calls:
        gathered = text.attend(stored, scores, first)
    assert len(calls) == 1
    exact, plain = (text.defined(stored, scores, first, x) for x in (torch.float64, text.query.dtype))
    for found in (gathered, in_place):
        assert_as_good_as_plain(found, exact, plain)


@pytest.mark.parametrize(
    ("kind", "dtype", "dim", "ratio"),
    pairwise([*KINDS][:3], [torch.float32, torch.bfloat16], [32, 64, 80, 128, 256], [1, 4, 8]),
    ids=str,
)
def test_sizes(kind: str, dtype: torch.dtype, dim: int, ratio: int) -> None:
    compare(make_text(2, 150, kind, dtype, heads=2, ratio=ratio, dim=dim), 70)


@pytest.mark.parametrize("kind", ["rotated keys", "smoothed"])
@pytest.mark.parametrize("stored", [0, 1, RECENT - 1, RECENT, RECENT + 1, 1000])
def test_long_chunks(stored: int, kind: str) -> None:
    compare(make_text(1, stored + 200, kind, torch.bfloat16, ratio=2), stored)


@pytest.mark.parametrize(
    ("stored", "new"), [(0, 20), (30, 34), (30, 35), (200, 2), (200, RECENT), (200, RECENT + 1)]
)
def test_fewer_new_tokens_than_the_residual_window(stored: int, new: int) -> None:
    compare(make_text(2, stored + new), stored)


@pytest.mark.parametrize(
    ("window", "stored", "kind", "has_sinks"),
    pairwise([10, RECENT, RECENT + 1, 100, 300], [0, RECENT, 150], [*KINDS], [False, True]),
    ids=str,
)
def test_windows_and_sinks(window: int, stored: int, kind: str, has_sinks: bool) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    compare(make_text(2, stored + 90, kind, window=window), stored, ops.Scores(sinks=sinks))


@pytest.mark.parametrize("kind", ["rotated keys", "smoothed"])
@pytest.mark.parametrize("first", [[0, 1], [70, 3], [150, 100], [225, 0]], ids=str)
def test_padding_in_front(first: list[int], kind: str) -> None:
    compare(make_text(2, 230, kind), 150, first=first)


def test_tokens_that_a_removal_made_codes_stay_codes() -> None:
    """The part that reads them knows on the device alone which these are, and stays in place."""
    text, found = make_text(1, 300), []
    for least_rows in (1 << 40, 1):
        layer = text.layer(RECENT)
        layer.append(text.key[:, :, :200], text.value[:, :, :200])
        layer.truncate(150)
        stored = layer.append(text.key[:, :, 150:], text.value[:, :, 150:])
        with gathering(least_rows) as calls:
            found.append(stored.attend(text.query[:, :, 150:]))
        assert not calls
    assert_same_bits(found[0], found[1], "out")
