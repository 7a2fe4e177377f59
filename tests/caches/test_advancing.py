"""A step of one token that follows from the last step is the step that is made from the page tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from caches.mixed import DIM, HEADS, INT4, RECENT, smoothing, tokens
from oracles.bits import assert_same_bits

from kvloom.caches import Cache, CacheFormat, PagedLayer, Sequences, paged
from kvloom.caches.tensors.token_index import AlignedStep
from kvloom.core.specs import QuantSpec
from kvloom.errors import OutOfPages, ShapeError
from kvloom.paging import PageTable

CODES = CacheFormat(page_size=4, quant=QuantSpec(8, 4))
RESIDUAL = CacheFormat(page_size=16, quant=INT4, recent=RECENT)

# Format, window and tokens kept beyond it.
CASES = {
    "plain": (CacheFormat(page_size=4), None, 32),
    "int8": (CODES, None, 32),
    "large pages": (CacheFormat(page_size=64), None, 32),
    "window": (replace(CODES, page_size=16), 11, 8),
    "window of a token": (CODES, 1, 4),
    "residual window": (RESIDUAL, None, 32),
    "residual window in a window": (RESIDUAL, 30, 8),
    "window shorter than the residual one": (RESIDUAL, 7, 8),
}

SMOOTHED = CacheFormat(quant=QuantSpec(8, 32), smoothing=smoothing())


def begun_afresh(layer: PagedLayer) -> None:
    """Forget the last step, so that the next one is made from the page tables."""
    layer.sequences.step = None


def assert_same_step(first: AlignedStep | None, second: AlignedStep | None) -> None:
    assert first is not None
    assert second is not None
    assert torch.equal(first.slots, second.slots)
    assert first.visible.num_columns == second.visible.num_columns
    for field in ("lengths", "kvstarts", "origins", "first_position"):
        one, other = getattr(first.visible, field), getattr(second.visible, field)
        assert (one is None) == (other is None), field
        assert one is None or torch.equal(one, other), field


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_steps_that_follow_have_the_slots_and_bits_of_others(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    rows, (format, window, rollback) = draw.choice([1, 3]), CASES[name]
    layers = [PagedLayer(format, Sequences(format, window, rollback)) for _ in range(2)]
    for layer in layers:
        layer.append(tokens(rows, 5, seed), tokens(rows, 5, seed + 1))
    advanced: list[bool] = []
    advance = paged.advance
    monkeypatch.setattr(paged, "advance", lambda groups: advanced.append(advance(groups)) or advanced[-1])
    for i in range(60):
        new, query = tokens(rows, 1, 10 * i), tokens(rows, 1, 10 * i + 1)
        begun_afresh(layers[1])
        stored = [layer.append(new, -new) for layer in layers]
        assert_same_step(layers[0].sequences.step, layers[1].sequences.step)
        residuals = [layer.residual for layer in layers]
        if residuals[0] is not None and residuals[1] is not None:
            assert_same_step(residuals[0].step, residuals[1].step)
        assert_same_bits(stored[0].attend(query), stored[1].attend(query), "attention")
        assert_same_bits(
            stored[0].gather(new.dtype)[0].contiguous(), stored[1].gather(new.dtype)[0].contiguous(), "keys"
        )
        change = draw.random()
        counts = [draw.randrange(3) for _ in range(rows)]
        for layer in layers:
            if change < 0.1:
                for sequences in layer.all_sequences:
                    sequences.remove(counts)
                layer.num_tokens = layer.sequences.num_positions
            elif change < 0.2:
                layer.select(torch.arange(1, rows + 1) % rows)
            elif change < 0.3:
                layer.append(tokens(rows, 3, i), tokens(rows, 3, i))
    assert sum(advanced) > 5


def test_tokens_that_a_residual_window_lacks_are_read_as_codes_until_it_has_passed_them() -> None:
    layers = [PagedLayer(RESIDUAL) for _ in range(2)]
    for layer in layers:
        layer.append(tokens(2, 25, 1), tokens(2, 25, 2))
        layer.values = tokens(2, 25, 3)
    for i in range(40):
        new, query = tokens(2, 1, 10 * i), tokens(2, 1, 10 * i + 1)
        begun_afresh(layers[1])
        first, second = (layer.append(new, -new) for layer in layers)
        assert_same_bits(first.attend(query), second.attend(query), f"attention at {i}")
        assert (first.exact is None or first.exact.known is None) == (i >= RECENT - 1)


def test_rows_behind_padding_begin_one_after_the_other() -> None:
    layers = [PagedLayer(CacheFormat(page_size=4)) for _ in range(2)]
    begins, num_tokens = [0, 6, 3], 2
    for layer in layers:
        pages = layer.sequences.pages
        tables = [PageTable(pages.pool, 4) for _ in begins]
        pages.append(tables, [num_tokens, 0, 0])
        layer.sequences.adopt(tables, begins, num_tokens)
        layer.num_tokens = num_tokens
    for i in range(12):
        new, query = tokens(3, 1, i), tokens(3, 1, 100 + i)
        begun_afresh(layers[1])
        first, second = (layer.append(new, -new) for layer in layers)
        slots = [layer.sequences.step.slots for layer in layers if layer.sequences.step is not None]
        assert torch.equal(slots[0], slots[1])
        assert_same_bits(first.attend(query), second.attend(query), f"attention at {i}")


def test_keys_are_smoothed_at_the_positions_of_steps() -> None:
    layer, whole = PagedLayer(SMOOTHED), PagedLayer(SMOOTHED)
    every = tokens(2, 40, 3)
    whole.append(every, every)
    for i in range(40):
        layer.append(every[:, :, i : i + 1], every[:, :, i : i + 1])
    found, expected = (x.gather(torch.float32)[0].contiguous() for x in (layer, whole))
    assert_same_bits(found, expected, "keys")


def test_a_token_that_is_refused_takes_no_room() -> None:
    layer, other = PagedLayer(CacheFormat(page_size=8)), PagedLayer(CacheFormat(page_size=8))
    for x in (layer, other):
        for i in range(3):
            x.append(tokens(2, 1, i), tokens(2, 1, i))
    for bad in (tokens(3, 1, 9), tokens(2, 1, 9, HEADS + 1), torch.zeros(2, HEADS, 1, DIM // 2)):
        with pytest.raises(ShapeError):
            layer.append(bad, bad)
        assert (layer.num_tokens, layer.sequences.num_positions) == (3, 3)
        assert [table.num_tokens for table in layer.sequences.tables] == [3, 3]
    new = tokens(2, 1, 4)
    assert_same_bits(layer.append(new, new).attend(new), other.append(new, new).attend(new), "attention")


def test_a_page_that_a_fork_holds_is_copied_first() -> None:
    layer = PagedLayer(CacheFormat(page_size=8))
    for i in range(3):
        layer.append(tokens(1, 1, i), tokens(1, 1, i))
    fork = layer.fork()
    kept = fork.gather(torch.float32)[0].clone()
    layer.append(tokens(1, 1, 7), tokens(1, 1, 7))
    fork.append(tokens(1, 1, 8), tokens(1, 1, 8))
    assert_same_bits(fork.gather(torch.float32)[0][:, :, :3].contiguous(), kept, "keys of the fork")
    assert_same_bits(layer.gather(torch.float32)[0][:, :, 3:].contiguous(), tokens(1, 1, 7), "the last key")


def test_layers_follow_the_step_of_the_first() -> None:
    sequences = Sequences(CacheFormat(page_size=16, max_tokens=16))
    layers = [PagedLayer(sequences.format, sequences, i) for i in range(3)]
    for i in range(16):
        for layer in layers:
            layer.append(tokens(1, 1, i), tokens(1, 1, i))
    with pytest.raises(OutOfPages):
        layers[0].append(tokens(1, 1, 20), tokens(1, 1, 20))
    expected = torch.cat([tokens(1, 1, i) for i in range(16)], dim=2)
    for layer in layers:
        assert layer.num_tokens == sequences.num_positions == 16
        assert_same_bits(layer.gather(torch.float32)[0].contiguous(), expected, "keys")


def test_groups_of_layers_begin_their_steps_together() -> None:
    cases = [CASES[name][:2] for name in ("int8", "window", "residual window")]
    caches = [Cache(PagedLayer(format, Sequences(format, window)) for format, window in cases) for _ in "ab"]
    num_begun = 0
    for i in range(40):
        new, query = tokens(2, 1, i), tokens(2, 1, 100 + i)
        for layer in caches[1].layers:
            begun_afresh(layer)
        found = []
        for cache in caches:
            with cache.reserving(cache.layers[0], 2, i + 1):
                steps = [layer.sequences.step for layer in cache.layers]
                found.append([layer.append(new, -new) for layer in cache.layers])
            if cache is caches[0]:
                num_begun += all(step is not None and step.end == i + 1 for step in steps)
        for first, second in zip(*found, strict=True):
            assert_same_bits(first.attend(query), second.attend(query), f"attention at {i}")
    assert num_begun > 20
