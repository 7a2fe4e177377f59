"""Keys that are smoothed come back where they are gathered, assigned and copied, at their own positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from caches.mixed import DIM, HEADS, as_codes, smoothing, tokens
from torch import Tensor

from kvloom.caches import CacheFormat, FixedLayer, Layer, PagedLayer, PrefixCache, Sequences
from kvloom.core.specs import QuantSpec
from kvloom.errors import ShapeError
from kvloom.ops import KeySmoothing

INT8 = QuantSpec(8, 32)
SMOOTHING = smoothing()
FORMAT = CacheFormat(quant=INT8, smoothing=SMOOTHING)
FIXED = CacheFormat(quant=INT8, smoothing=SMOOTHING, page_size=1, max_tokens=96)
KINDS: dict[str, Callable[[], Layer]] = {
    "paged": lambda: PagedLayer(FORMAT),
    "window": lambda: PagedLayer(FORMAT, Sequences(FORMAT, 12)),
    "fixed": lambda: FixedLayer(FIXED),
    "fixed window": lambda: FixedLayer(CacheFormat(quant=INT8, smoothing=SMOOTHING, page_size=1), 12),
}


def kept(key: Tensor, first: int = 0) -> Tensor:
    """Keys ``[B, H, N, D]`` from a position on, through codes of what is smoothed."""
    positions = torch.arange(first, first + key.shape[2]).expand(len(key), -1)
    return SMOOTHING.restored(as_codes(SMOOTHING.smoothed(key, positions), INT8), positions)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_gathered_keys_are_those_that_were_stored(make: Callable[[], Layer]) -> None:
    layer, every = make(), tokens(2, 90, 3)
    for start, end in ((0, 40), (40, 41), (41, 90)):
        new = every[:, :, start:end]
        first = 0 if layer.window is None else max(start - layer.window + 1, 0)
        want = kept(every[:, :, first:end], first)
        found = layer.update(new, new)[0][:, :, : want.shape[2]]
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [KINDS["paged"], KINDS["fixed"]], ids=["paged", "fixed"])
def test_assigned_keys_are_smoothed_where_they_stand(make: Callable[[], Layer]) -> None:
    layer, every, other = make(), tokens(2, 40, 4), tokens(2, 40, 5)
    layer.append(every, every)
    new = torch.cat((other, torch.zeros(2, HEADS, layer.num_columns - 40, DIM)), 2)
    layer.keys = new
    torch.testing.assert_close(layer.keys[:, :, :40], kept(other), rtol=1e-5, atol=1e-5)
    fewer = other[:, :, ::2]
    if isinstance(layer, PagedLayer):
        layer.replace({0: fewer, 1: fewer})
        torch.testing.assert_close(layer.keys, kept(fewer), rtol=1e-5, atol=1e-5)


def test_rows_cut_apart_keep_the_positions_of_their_tokens() -> None:
    layer, every = PagedLayer(FORMAT), tokens(2, 60, 6)
    layer.append(every, every)
    layer.sequences.remove([20, 3])
    layer.num_tokens = layer.sequences.num_positions
    found = layer.gather(torch.float32)[0]
    torch.testing.assert_close(found[0, :, 17:], kept(every)[0, :, :40], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], kept(every)[1, :, :57], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("recent", [0, 8])
def test_a_prefix_cache_attends_to_the_keys(window: int | None, recent: int) -> None:
    form = CacheFormat(quant=INT8, page_size=4, max_tokens=256, recent=recent, smoothing=SMOOTHING)
    cache = PrefixCache(form, num_layers=1, heads=HEADS, head_dim=DIM, dtype=torch.float32, windows=[window])
    every, query = tokens(1, 50, 7)[0], tokens(1, 1, 8)[0]
    for _ in range(2):  # the second one finds a prefix
        sequence = cache.begin(range(50))
        new = every[:, sequence.num_cached :].transpose(0, 1)
        cache.append(sequence, 0, new, new)
        found = cache.attend(query.transpose(0, 1), [sequence], 0)[0]
        shown = slice(0 if window is None else 50 - window, 50)
        key, value = kept(every[None])[0], as_codes(every[None], INT8)[0]
        if recent:
            key[:, -recent:], value[:, -recent:] = every[:, -recent:], every[:, -recent:]
        key, value = key[:, shown], value[:, shown]
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(0, 1)[0]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        cache.commit(sequence)


def test_keys_of_other_heads_are_refused_before_anything_is_written() -> None:
    layer = PagedLayer(CacheFormat(quant=INT8, smoothing=KeySmoothing(torch.ones(3, DIM))))
    with pytest.raises(ShapeError, match=r"key must be \[T, 3, 32\]"):
        layer.append(tokens(1, 4, 9), tokens(1, 4, 9))
    assert layer.num_tokens == 0


@pytest.mark.parametrize("make", [KINDS["window"], KINDS["fixed window"]], ids=["paged", "fixed"])
def test_attention_behind_a_long_text_knows_the_positions_in_a_window(make: Callable[[], Layer]) -> None:
    """An index that leaves out what a window has passed begins at a later position."""
    layer, every = make(), tokens(2, 1300, 10)
    for start, end in ((0, 500), (500, 530), (530, 1290), (1290, 1299), (1299, 1300)):
        new, query = every[:, :, start:end], tokens(2, 1, end)
        stored = layer.append(new, new)
        found = stored.attend(query.expand(-1, -1, end - start, -1))[:, -1]
        first = max(end - 12, 0)
        key, value = kept(every[:, :, first:end], first), as_codes(every[:, :, first:end], INT8)
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value)[:, :, 0]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
