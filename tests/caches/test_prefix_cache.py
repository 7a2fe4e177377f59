"""Sequences that share pages read back their own keys and values, whoever wrote them."""

from __future__ import annotations

import pickle
import random
import zlib
from functools import partial

import pytest
import torch
from oracles.asked import Asked
from oracles.interrupts import interrupted
from torch import Tensor

from kvloom import QuantSpec, Scores, ops
from kvloom.caches import CacheFormat, PrefixCache, PrefixSequence, prefix
from kvloom.caches.prefixes.step import Step
from kvloom.errors import ArgumentError, OutOfMemory, OutOfPages, ShapeError, StateError
from kvloom.ops.impl import cpu
from kvloom.quant.affine import dequantize, quantize

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4
INT8 = QuantSpec(8, group=8, scale_dtype=torch.float32)
QUANTS = pytest.mark.parametrize("quant", [None, INT8], ids=["plain", "int8"])


def make(num_pages: int = 32, quant: QuantSpec | None = None, policy: str = "lru") -> PrefixCache:
    form = CacheFormat(quant=quant, page_size=PAGE, max_tokens=num_pages * PAGE)
    return PrefixCache(form, num_layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.float32, policy=policy)


def content(sequence: PrefixSequence, layer: int, start: int, end: int) -> Tensor:
    """Keys that are a function of the salt, the layer and all tokens up to each position, ``[T, H, D]``."""
    rows = []
    for position in range(start, end):
        seed = zlib.crc32(repr((sequence.salt, layer, sequence.tokens[: position + 1])).encode())
        rows.append(torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(rows) if rows else torch.empty(0, HEADS, DIM)


def write(cache: PrefixCache, sequence: PrefixSequence, *, commit: bool = True) -> None:
    """Give every layer what is pending."""
    for layer in range(LAYERS):
        key = content(sequence, layer, sequence.stored[layer], len(sequence.tokens))
        cache.append(sequence, layer, key, -key)
    if commit:
        cache.commit(sequence)


def assert_own(cache: PrefixCache, sequence: PrefixSequence, quant: QuantSpec | None = None) -> None:
    """Every layer gives back what this sequence's tokens say."""
    for layer in range(LAYERS):
        pages = torch.tensor([ref.id for ref in sequence.table.pages], dtype=torch.int64)
        position = torch.arange(sequence.stored[layer])
        slots = pages[position // PAGE] * PAGE + position % PAGE
        key, value = ops.load(slots, cache.layers[layer].view, dtype=torch.float32)
        expected = content(sequence, layer, 0, sequence.stored[layer])
        if quant is not None:
            codes, scale = quantize(expected, quant.bits, quant.group, quant.scale_dtype)
            expected = dequantize(codes, scale, quant.bits, torch.float32)
        assert torch.equal(key, expected)
        assert torch.equal(value, -expected)


def started(cache: PrefixCache, tokens: list[int], salt: str = "") -> PrefixSequence:
    sequence = cache.begin(tokens, salt)
    write(cache, sequence)
    return sequence


@QUANTS
def test_a_prefix_in_whole_pages_is_found_again(quant: QuantSpec | None) -> None:
    cache = make(quant=quant)
    started(cache, list(range(11)))
    second = cache.begin([*range(11), 50, 51])
    assert second.num_cached == 8
    assert second.num_pending == 5
    write(cache, second)
    assert_own(cache, second, quant)
    assert cache.report()["active"] == 3 + 2


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    cache = make()
    started(cache, list(range(8)))
    assert cache.begin(list(range(8))).num_cached == 4


def test_pages_of_an_ended_sequence_are_found_until_they_are_needed() -> None:
    cache = make(num_pages=4)
    cache.end(started(cache, list(range(8))))
    assert cache.report() == {"sequences": 0, "num_pages": 4, "free": 2, "active": 0, "evictable": 2}
    again = cache.begin(list(range(9)))
    assert again.num_cached == 8
    cache.end(again)
    cache.end(started(cache, list(range(100, 116))))
    assert cache.begin(list(range(9))).num_cached == 0


def test_another_salt_finds_nothing() -> None:
    cache = make()
    started(cache, list(range(9)), "one")
    assert cache.begin(list(range(9)), "two").num_cached == 0
    assert cache.begin(list(range(9)), "one").num_cached == 8


@QUANTS
def test_forks_go_their_own_ways(quant: QuantSpec | None) -> None:
    cache = make(quant=quant)
    first = started(cache, list(range(6)))
    second = cache.fork(first)
    for sequence, tokens in ((first, [7, 8, 9]), (second, [70, 80])):
        cache.extend(sequence, tokens)
        write(cache, sequence)
    for sequence in (first, second):
        assert_own(cache, sequence, quant)
    cache.check()


@QUANTS
def test_truncating_into_a_shared_page_copies_it(quant: QuantSpec | None) -> None:
    cache = make(quant=quant)
    first = started(cache, list(range(8)))
    second = cache.fork(first)
    cache.truncate(second, 6)
    cache.extend(second, [60, 61])
    write(cache, second)
    assert_own(cache, first, quant)
    assert_own(cache, second, quant)


def test_attention_over_shared_pages_equals_dense_attention() -> None:
    cache = make()
    sequences = [started(cache, list(range(9))), started(cache, [*range(8), 90, 91, 92])]
    query = torch.randn(4, 2 * HEADS, DIM)
    out = cache.attend(query, sequences, 1, Scores(window=7))
    for i, sequence in enumerate(sequences):
        n = len(sequence.tokens)
        key = content(sequence, 1, 0, n).repeat_interleave(2, dim=1).transpose(0, 1)
        ago = torch.arange(n) - torch.arange(n - 2, n).unsqueeze(1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[2 * i : 2 * i + 2].transpose(0, 1), key, -key, attn_mask=(ago <= 0) & (ago > -7)
        )
        torch.testing.assert_close(out[2 * i : 2 * i + 2], expected.transpose(0, 1))


def test_a_step_is_made_by_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers use it again, until the tables have other pages."""
    cache, made = make(), list[list[tuple[int, int]]]()
    monkeypatch.setattr(prefix, "Step", lambda lengths, *of: made.append(lengths) or Step(lengths, *of))
    sequence = started(cache, [1, 2, 3, 4, 5, 6])
    for layer in range(LAYERS):
        cache.attend(content(sequence, layer, 4, 6), [sequence], layer)
    assert made == [[(0, 6)], [(4, 2)]]
    fork = cache.fork(sequence)
    cache.truncate(sequence, 4)
    cache.extend(sequence, [7, 8])
    write(cache, sequence, commit=False)
    assert made[2:] == [[(4, 2)]]
    for own in (sequence, fork):
        assert_own(cache, own)


def test_a_step_that_failed_in_one_layer_is_not_shared() -> None:
    cache = make()
    first = started(cache, list(range(6)))
    cache.extend(first, [7])
    with pytest.raises(ShapeError, match="key must be"):
        cache.append(first, 0, torch.zeros(1, HEADS, DIM + 1), torch.zeros(1, HEADS, DIM))
    second = cache.fork(first)
    for sequence in (first, second):
        write(cache, sequence)
        assert_own(cache, sequence)
    cache.check()


def test_layers_that_differ_cannot_be_committed_or_forked() -> None:
    cache = make()
    sequence = cache.begin([1, 2, 3])
    cache.append(sequence, 0, content(sequence, 0, 0, 3), content(sequence, 0, 0, 3))
    for verb in (cache.commit, cache.fork):
        with pytest.raises(StateError, match="every layer must have the same tokens"):
            verb(sequence)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    cache = make(num_pages=3)
    first = started(cache, list(range(7)))
    second = cache.begin(list(range(50, 58)))
    with pytest.raises(OutOfPages):
        write(cache, second)
    assert second.stored == [0, 0]
    assert_own(cache, first)
    cache.check()


def test_leaving_the_context_ends_every_sequence() -> None:
    with make() as cache:
        sequence = started(cache, list(range(9)))
    assert cache.report()["sequences"] == cache.report()["active"] == 0
    with pytest.raises(StateError, match="has ended"):
        cache.extend(sequence, [1])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c, s: c.begin([]), "tokens"),
        (lambda c, s: c.append(s, 2, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)), "layer"),
        (lambda c, s: c.append(s, 0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)), "key"),
        (lambda c, s: c.truncate(s, 6), "num_tokens"),
        (lambda c, s: c.attend(torch.zeros(3, 2, 8), [s, s], 0), "queries"),
        (lambda c, s: c.attend(torch.zeros(6, 2, 8), [s], 0), "queries"),
        (lambda c, s: c.attend(torch.zeros(1, 2, 8), [s], -1), "layer"),
    ],
)
def test_bad_arguments_are_named(call: object, name: str) -> None:
    cache = make()
    sequence = started(cache, [1, 2, 3, 4, 5])
    with pytest.raises(ArgumentError, match=rf"^{name} must"):
        call(cache, sequence)  # type: ignore[operator]
    assert_own(cache, sequence)


@pytest.mark.parametrize(
    ("seed", "quant", "policy"),
    [(0, None, "lru"), (1, INT8, "lru"), (2, None, "ours"), (3, INT8, "ours")],
    ids=str,
)
def test_random_programs_keep_every_sequence_its_own(seed: int, quant: QuantSpec | None, policy: str) -> None:
    rng, cache, live = random.Random(seed), make(20, quant, policy), []
    hits = 0
    for _ in range(150):
        verb = rng.choice(["begin", "begin", "extend", "extend", "fork", "truncate", "end", "end"])
        chosen = rng.choice(live) if live else None
        try:
            if verb == "begin" or chosen is None:
                # Few tokens and salts, so that prefixes meet.
                tokens = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 14))]
                chosen = cache.begin(tokens, rng.choice("ab"))
                hits += chosen.num_cached > 0
                live.append(chosen)
                write(cache, chosen, commit=rng.random() < 0.8)
            elif verb == "extend":
                cache.extend(chosen, [rng.randrange(2) for _ in range(rng.randrange(1, 6))])
                write(cache, chosen, commit=rng.random() < 0.8)
            elif verb == "fork":
                live.append(cache.fork(chosen))
            elif verb == "truncate":
                cache.truncate(chosen, rng.randrange(len(chosen.tokens) + 1))
            else:
                live.remove(chosen)
                cache.end(chosen)
        except OutOfPages:
            cache.truncate(chosen, min(chosen.stored))
        for sequence in live:
            assert_own(cache, sequence, quant)
        cache.check()
    assert hits > 10


WINDOWED = [3, None, 6]


def windowed(recent: int = 0, num_pages: int = 64) -> PrefixCache:
    quant = QuantSpec(4, group=8) if recent else None
    form = CacheFormat(quant=quant, page_size=PAGE, max_tokens=num_pages * PAGE, recent=recent)
    return PrefixCache(form, num_layers=3, heads=HEADS, head_dim=DIM, dtype=torch.float32, windows=WINDOWED)


def attended(cache: PrefixCache, sequence: PrefixSequence, cuts: list[int]) -> list[Tensor]:
    """What each layer gives to the last tokens of each cut, of what the sequence lacks."""
    outs = []
    for count in cuts:
        start = sequence.stored[0]
        for layer in range(3):
            key = content(sequence, layer, start, start + count)
            cache.append(sequence, layer, key, -key)
            query = content(sequence, layer + 3, start, start + count)
            outs.append(cache.attend(query, [sequence], layer))
        cache.commit(sequence)
    return [torch.cat(outs[layer::3]) for layer in range(3)]


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
@pytest.mark.parametrize("recent", [0, 5])
def test_windows_and_residual_windows_have_the_bits_that_they_have_alone(recent: int) -> None:
    rng = random.Random(recent)
    cache, num_found, texts = windowed(recent), 0, [rng.choices(range(9), k=60)]
    for _ in range(12):
        text = rng.choice(texts)[: rng.randrange(1, 60)] + rng.choices(range(9), k=rng.randrange(1, 30))
        texts.append(text)
        alone = windowed(recent)
        whole = attended(alone, alone.begin(text), [len(text)])
        sequence = cache.begin(text)
        found, left = sequence.num_cached, sequence.num_pending
        cuts = [left] if rng.random() < 0.5 else [1] * left
        for one, other in zip(attended(cache, sequence, cuts), whole, strict=True):
            assert torch.equal(one, other[found:])
        cache.check()
        if rng.random() < 0.5:
            cache.end(sequence)
        num_found += found
    assert num_found > 100


def test_what_a_window_has_passed_is_refused() -> None:
    cache = windowed()
    sequence = cache.begin(list(range(40)))
    attended(cache, sequence, [40])
    with pytest.raises(StateError, match=r"a token at position 10 must have the \d tokens of its window"):
        cache.truncate(sequence, 10)
    assert sequence.num_pending == 0
    cache.truncate(sequence, 39)
    with pytest.raises(ArgumentError, match="windows must be of 2 layers, got 3"):
        PrefixCache(CacheFormat(max_tokens=64), num_layers=2, heads=1, head_dim=8, windows=WINDOWED)


def test_sequences_give_up_what_their_windows_passed_for_others() -> None:
    cache = windowed(num_pages=24)
    sequences = [cache.begin([seed, *range(39)]) for seed in range(2)]
    for sequence in sequences:
        for layer in range(3):
            key = content(sequence, layer, 0, 40)
            cache.append(sequence, layer, key, -key)
    group = cache.prefixes.groups[1]  # of the window of 3, which needs a page of each
    third = cache.begin([7] * 16)
    attended(cache, third, [16])
    assert group.pages.pool.num_active <= 24
    cache.check()


@pytest.mark.skipif(cpu.ISA is None, reason="a matrix product of torch has bits of its own for each size")
def test_a_saved_cache_with_windows_goes_on() -> None:
    cache = windowed(5)
    first = cache.begin(list(range(30)))
    attended(cache, first, [30])
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301 (our own)
    found = again.begin([*range(28), 90, 91])
    assert found.num_cached == 28
    alone = windowed(5)
    whole = attended(alone, alone.begin(found.tokens), [30])
    for one, other in zip(attended(again, found, [2]), whole, strict=True):
        assert torch.equal(one, other[28:])
    again.check()


@pytest.mark.parametrize("max_tokens", [10**15, 10**30])
def test_more_pages_than_their_lists_have_memory_for_are_refused_at_once(max_tokens: int) -> None:
    format = CacheFormat(page_size=4, max_tokens=max_tokens)
    with pytest.raises(OutOfMemory, match=r"max_tokens of \d+ pages must fit memory"):
        PrefixCache(format, num_layers=1, heads=2, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize("window", [None, 6])
def test_a_step_of_one_sequence_costs_the_same_beside_any_number_of_others(window: int | None) -> None:
    lines = []
    for num_others in (2, 200):
        form = CacheFormat(page_size=PAGE, max_tokens=(num_others + 3) * PAGE)
        cache = PrefixCache(
            form, num_layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.float32, windows=[window] * LAYERS
        )
        others = [started(cache, [i] * PAGE) for i in range(num_others)]
        own = started(cache, [-1] * (PAGE - 1))
        cache.end(others[0])  # its page is evicted by the step
        lines.append(interrupted(0, partial(step_and_end, cache, own)))
        assert cache.report()["evictable"] == 3
    assert lines[1] - lines[0] < 40  # pages may share an entry of the tree's table


def step_and_end(cache: PrefixCache, sequence: PrefixSequence) -> None:
    cache.extend(sequence, [1] * 3 * PAGE)
    write(cache, sequence)
    cache.attend(torch.zeros(1, HEADS, DIM), [sequence], 0)
    cache.end(sequence)


@pytest.mark.parametrize("windows", [[None, None], [6, None], [6, 9]])
def test_each_page_of_a_text_is_asked_once_in_each_group(
    windows: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = CacheFormat(page_size=PAGE, max_tokens=64)
    cache = PrefixCache(form, num_layers=2, heads=HEADS, head_dim=DIM, dtype=torch.float32, windows=windows)
    write(cache, cache.begin(range(5 * PAGE)))
    asked = Asked(monkeypatch)
    assert cache.begin(range(5 * PAGE + 1)).num_cached == 5 * PAGE
    assert asked.walks == [5] * len(set(windows))
