"""The newest tokens as they were computed beside codes of all: against attention over mixed tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches.mixed import DIM, HEADS, INT4, RECENT, as_codes, mixed, tokens
from hypothesis import given
from hypothesis import strategies as st
from oracles.bits import assert_same_bits, generator
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, PagedLayer, Sequences
from kvloom.caches.format import RESIDUAL_ROLLBACK, num_exact
from kvloom.caches.tensors.tokens import Tokens
from kvloom.core.specs import QuantSpec
from kvloom.errors import ConfigError, StateError
from kvloom.ops.impl import cpu


def layer_of(recent: int, window: int | None = None, quant: QuantSpec = INT4) -> PagedLayer:
    return PagedLayer(
        CacheFormat(quant=quant, recent=recent), Sequences(CacheFormat(quant=quant, recent=recent), window)
    )


def read(layer: PagedLayer, cuts: list[int], key: Tensor, value: Tensor, query: Tensor) -> Tensor:
    """Attention in place of a text that is stored in pieces."""
    found, start = [], layer.num_tokens
    for count in cuts:
        piece = slice(start, start + count)
        stored = layer.append(key[:, :, piece], value[:, :, piece])
        found.append(stored.attend(query[:, :, piece]))
        start += count
    return torch.cat(found, 1)


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_bits_do_not_depend_on_how_a_text_is_cut(dtype: torch.dtype, cuts: list[int]) -> None:
    count = 480 + sum(cuts)  # over the end of a split of attention
    key, value = (tokens(1, count, seed).to(dtype) for seed in (1, 2))
    query = tokens(1, count, 3, 4).to(dtype)
    whole = read(layer_of(RECENT), [count], key, value, query)
    assert_same_bits(read(layer_of(RECENT), [480, *cuts], key, value, query), whole, "out")


def test_gathered_tokens_are_exact_from_the_newest_of_the_first_new_one() -> None:
    key, value, layer = tokens(1, 100, 1), tokens(1, 100, 2), layer_of(RECENT)
    for start, end in ((0, 60), (60, 61), (61, 70), (70, 100)):
        got = layer.update(key[:, :, start:end], value[:, :, start:end])
        first = max(start - RECENT + 1, 0)
        for x, exact in zip(got, (key, value), strict=True):
            assert torch.equal(x[:, :, first:], exact[:, :, first:end])
            assert torch.equal(x[:, :, :first], as_codes(exact[:, :, :first]))
        held = layer.keys  # what the next token sees
        assert torch.equal(held[:, :, end - RECENT + 1 :], key[:, :, end - RECENT + 1 : end])


def test_masks_biases_and_sinks_are_those_of_one_attention() -> None:
    count, new = 90, 3
    key, value, query = tokens(2, count, 1), tokens(2, count, 2), tokens(2, new, 3, 4)
    layer = layer_of(RECENT)
    layer.append(key[:, :, :-new], value[:, :, :-new])
    stored = layer.append(key[:, :, -new:], value[:, :, -new:])
    mask = torch.randn(2, 4, new, count, generator=generator(4))
    mask[:, :, :, 80:85] = -torch.inf
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scores = ops.Scores(is_causal=False, sinks=sinks, softcap=3.0)
    out = stored.attend(query, scores, mask=mask)
    for b in range(2):
        position, token = torch.arange(count - new, count).unsqueeze(1), torch.arange(count)
        is_exact = token > position - RECENT
        key2, value2, key4, value4 = (
            x.repeat_interleave(2, 0) for x in (key[b], value[b], as_codes(key)[b], as_codes(value)[b])
        )
        logits = torch.where(is_exact, query[b] @ key2.mT, query[b] @ key4.mT) / DIM**0.5
        logits = 3.0 * torch.tanh(logits / 3.0) + mask[b]
        everything = torch.cat((logits, sinks.view(4, 1, 1).expand(4, new, 1)), -1)
        weights = everything.softmax(-1)[..., :-1]
        want = ((weights * is_exact) @ value2 + (weights * ~is_exact) @ value4).transpose(0, 1)
        torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recent", [1, 5, 9, 20])
@pytest.mark.parametrize("placement", ["paged", "fixed", "fixed, of any length"])
def test_a_mask_may_show_more_than_the_window(placement: str, recent: int) -> None:
    """As where all of a prefix sees each other: what is unquantized follows from positions alone."""
    window, form = 9, CacheFormat(quant=INT4, recent=recent)
    if placement == "paged":
        layer: PagedLayer | FixedLayer = layer_of(recent, window)
    else:
        layer = FixedLayer(replace(form, max_tokens=90 if placement == "fixed" else None), window)
    key, value, query = tokens(2, 50, 1), tokens(2, 50, 2), tokens(2, 50, 3, 4)
    for start, end in ((0, 40), (40, 41), (41, 44), (44, 50)):
        piece = slice(start, end)
        num_columns, first = (int(x) for x in layer.get_mask_sizes(end - start))
        column = torch.arange(num_columns) + first
        seen = ((column >= max(start - window + 1, 0)) & (column < end)).expand(end - start, -1)
        stored = layer.append(key[:, :, piece], value[:, :, piece])
        out = stored.attend(query[:, :, piece], ops.Scores(is_causal=False), mask=seen[None, None])
        shown = torch.zeros(end - start, end, dtype=torch.bool)
        shown[:, max(start - window + 1, 0) :] = True
        for b in range(2):
            own = key[b, :, :end], value[b, :, :end]
            want = mixed(query[b, :, piece], *own, recent, shown=shown)
            torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)


def layer_in(placement: str, recent: int) -> PagedLayer | FixedLayer:
    if placement == "paged":
        return layer_of(recent)
    return FixedLayer(CacheFormat(quant=INT4, recent=recent, max_tokens=200))


@pytest.mark.parametrize("placement", ["paged", "fixed"])
def test_padding_in_front_shows_no_overwritten_tokens(placement: str) -> None:
    layer, first = layer_in(placement, RECENT), torch.tensor([0, 45])
    key, query = tokens(2, 100, 1), tokens(2, 1, 2, 4)
    layer.append(key, -key)
    layer.truncate(70)
    known = 100 - num_exact(RECENT)
    new = tokens(2, 1, 3)
    out = layer.append(new, -new).attend(query, first=first)
    for b in range(2):
        own = torch.cat((key[b, :, :70], new[b]), 1)
        shown = (torch.arange(71) >= first[b]).unsqueeze(0)
        want = mixed(query[b], own, -own, RECENT, known, shown=shown)
        torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["paged", "fixed"])
def test_a_failed_step_overwrites_nothing_that_is_read(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_in(placement, RECENT)
    key, failed, query = tokens(1, 60, 1), tokens(1, 40, 2), tokens(1, 1, 3, 4)
    layer.append(key, -key)

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Tokens, "gather", refuse)
        layer.update(failed, -failed)
    new = tokens(1, 1, 4)
    out = layer.append(new, -new).attend(query)
    own = torch.cat((key[0], new[0]), 1)
    want = mixed(query[0], own, -own, RECENT, 0)
    torch.testing.assert_close(out[0], want, rtol=1e-4, atol=1e-5)


def test_bytes_are_those_of_a_few_pages() -> None:
    layer = layer_of(RECENT)
    layer.append(tokens(2, 300, 1), tokens(2, 300, 2))
    for i in range(100):
        layer.append(tokens(2, 1, i), tokens(2, 1, i + 1))
    most = 2 * (RECENT + RESIDUAL_ROLLBACK + 2 * 16) * 1.5  # of two sequences, and what storage grows by
    assert 0 < layer.nbytes_recent <= 2 * most * HEADS * DIM * 4
    layer.reset()
    assert layer.nbytes == 0
    layer.append(tokens(3, 4, 1), tokens(3, 4, 2))


@pytest.mark.parametrize("placement", ["paged", "fixed"])
def test_assigned_keys_are_read_as_codes(placement: str) -> None:
    key, layer = tokens(1, 60, 1), layer_in(placement, RECENT)
    layer.append(key, key)
    new = tokens(1, layer.keys.shape[2], 5)
    layer.keys = new
    assert torch.equal(layer.keys, as_codes(new))
    assert torch.equal(layer.values[:, :, :60], as_codes(key))
    query, last = tokens(1, 1, 6, 4), tokens(1, 1, 7)
    out = layer.append(last, last).attend(query)
    keys, values = (torch.cat((x[0, :, :60], last[0]), 1) for x in (new, key))
    torch.testing.assert_close(out[0], mixed(query[0], keys, values, RECENT, 60), rtol=1e-4, atol=1e-5)


def test_a_crop_of_some_rows_leaves_the_others_what_was_stored_after_an_assignment() -> None:
    layer, key, more = layer_of(RECENT), tokens(2, 60, 1), tokens(2, 30, 2)
    layer.append(key, -key)
    layer.keys = key
    layer.append(more, -more)
    for sequences in layer.all_sequences:
        sequences.remove([0, 20])
    query, new = tokens(2, 1, 3, 4), tokens(2, 1, 4)
    out = layer.append(new, -new).attend(query)
    for b, kept in enumerate((30, 10)):
        own = torch.cat((key[b], more[b, :, :kept], new[b]), 1)
        want = mixed(query[b], own, -own, RECENT, known=60)
        torch.testing.assert_close(out[b], want, rtol=1e-4, atol=1e-5)


def test_rows_of_a_residual_window_are_not_left_behind() -> None:
    layer, key = layer_of(RECENT), tokens(2, 60, 1)
    layer.append(key, key)
    layer.sequences.remove([5, 5])
    layer.num_tokens = 55
    with pytest.raises(StateError, match="after 57 tokens, got 60"):
        layer.append(key[:, :, :2], key[:, :, :2])
    assert layer.num_tokens == layer.sequences.num_positions == 55


@pytest.mark.parametrize("recent", [-1, True, 1.5])
def test_recent_must_be_a_number(recent: object) -> None:
    with pytest.raises(ConfigError, match="recent must be an int of at least 0"):
        CacheFormat(quant=INT4, recent=recent)


def test_what_keeps_no_codes_has_no_residual_window() -> None:
    with pytest.raises(ConfigError, match="recent must be 0 where keys and values are no codes"):
        CacheFormat(recent=4)
