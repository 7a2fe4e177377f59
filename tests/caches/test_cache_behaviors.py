"""Caches by worked example: tokens are numbers, so that each test shows what a layer holds and returns.

The scenarios are those by which users of Hugging Face caches know them: growth, windows, mixtures of layers,
forks, beams and left padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from oracles.bits import generator
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention

from kvloom.caches import Cache, DynamicLayer, Layer, QuantizedLayer, SlidingWindowLayer, StaticLayer
from kvloom.errors import ArgumentError, StateError

KINDS: dict[str, Callable[[], Layer]] = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(32),
    "sliding": lambda: SlidingWindowLayer(4, rollback=8),
    "quantized": lambda: QuantizedLayer("int8:g1", recent=2, scale_dtype=torch.float32),
}
UNIT = 127  # codes of 8 bits keep its multiples as they are
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def column(rows: list[list[float]]) -> Tensor:
    """Numbers as tokens ``[B, 1, Q, 1]``."""
    return UNIT * torch.tensor(rows, dtype=torch.float32)[:, None, :, None]


def numbers(tokens: Tensor) -> list[list[float]]:
    """Tokens as numbers."""
    return (tokens / UNIT)[:, 0, :, 0].tolist()


def put(cache: Cache, *new: float, layer: int = 0, at: int | None = None) -> list[float]:
    """Store the numbers as keys and their negatives as values; returns the keys that attention reads."""
    key = column([list(new)])
    kwargs = None if at is None else {"cache_position": torch.arange(at, at + len(new))}
    keys, values = cache.update(key, -key, layer, kwargs)
    assert torch.equal(values, -keys)
    return numbers(keys)[0]


def held(cache: Cache, layer: int = 0) -> list[float]:
    """The numbers that a layer holds."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    assert torch.equal(values, -keys)
    return numbers(keys)[0]


# --- growth -------------------------------------------------------------------------------------------------


def test_dynamic_layers_grow_independently() -> None:
    cache = Cache.dynamic()
    assert put(cache, 1, 2) == [1, 2]
    assert put(cache, 10, 20, 30, layer=1) == [10, 20, 30]
    assert put(cache, 3, at=2) == [1, 2, 3]
    assert put(cache, 40, layer=1, at=3) == [10, 20, 30, 40]
    assert put(cache, 4, at=3) == [1, 2, 3, 4]
    assert (held(cache), held(cache, 1)) == ([1, 2, 3, 4], [10, 20, 30, 40])


def test_static_layer_fills_from_the_front() -> None:
    cache = Cache.static(4)
    assert put(cache, 1, 2, at=0) == [1, 2, 0, 0]
    assert put(cache, 3, at=2) == [1, 2, 3, 0]
    assert put(cache, 4, at=3) == [1, 2, 3, 4] == held(cache)


@pytest.mark.parametrize(("taken", "at"), [(0, 4), (2, 1), (2, 3), (4, 4), (4, 3), (4, 0)])
def test_static_layer_writes_nothing_out_of_place(taken: int, at: int) -> None:
    cache = Cache.static(4)
    put(cache, *range(1, taken + 1))
    before = held(cache)
    with pytest.raises((ArgumentError, StateError), match=r"^(cache_position must be|max_length must hold)"):
        put(cache, 9, at=at)
    assert held(cache) == before
    assert int(cache.get_seq_length()) == taken


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        pytest.param(4, [([1, 2], [1, 2]), ([3], [1, 2, 3])], id="below"),
        pytest.param(4, [([1, 2, 3, 4], [1, 2, 3, 4]), ([5], [2, 3, 4, 5]), ([6], [3, 4, 5, 6])], id="at"),
        pytest.param(4, [([1, 2, 3], [1, 2, 3]), ([4], [1, 2, 3, 4]), ([5], [2, 3, 4, 5])], id="one below"),
        pytest.param(4, [([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]), ([7], [4, 5, 6, 7])], id="long prompt"),
        pytest.param(3, [([1, 2], [1, 2]), ([3, 4], [1, 2, 3, 4]), ([5], [3, 4, 5])], id="across"),
        pytest.param(2, [([1, 2, 3], [1, 2, 3]), ([4], [3, 4]), ([5, 6], [4, 5, 6])], id="several when full"),
        pytest.param(2, [([1], [1]), ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]), ([7], [6, 7])], id="chunks"),
    ],
)
def test_sliding_layer_returns_what_new_tokens_see(
    window: int, steps: list[tuple[list[float], list[float]]]
) -> None:
    cache, seen = Cache([SlidingWindowLayer(window)]), 0
    for new, expected in steps:
        assert put(cache, *new, at=seen) == expected
        seen += len(new)
        assert cache.get_seq_length() == seen
        assert held(cache) == expected[max(len(expected) - window + 1, 0) :]


def test_layers_of_two_kinds_keep_their_own_tokens() -> None:
    cache = Cache([StaticLayer(6), SlidingWindowLayer(2), DynamicLayer()])
    for layer, expected in enumerate([[1, 2, 3, 0, 0, 0], [1, 2, 3], [1, 2, 3]]):
        assert put(cache, 1, 2, 3, layer=layer, at=0) == expected
    for layer, expected in enumerate([[1, 2, 3, 4, 0, 0], [3, 4], [1, 2, 3, 4]]):
        assert put(cache, 4, layer=layer, at=3) == expected
    for layer, expected in enumerate([[1, 2, 3, 4, 5, 6], [4, 5, 6], [1, 2, 3, 4, 5, 6]]):
        assert put(cache, 5, 6, layer=layer, at=4) == expected


@every_kind
def test_mask_sizes_name_the_positions_that_update_returns(make: Callable[[], Layer]) -> None:
    cache, seen = Cache([make()]), 0
    for count in (3, 1, 1, 4, 1, 6, 2):
        columns, offset = cache.get_mask_sizes(count)
        keys = put(cache, *range(seen + 1, seen + count + 1))  # token p is the number p + 1
        seen += count
        assert keys == [p + 1 if p < seen else 0 for p in range(offset, offset + columns)]


@pytest.mark.parametrize("kv_heads", [32, 4, 1], ids=["MHA", "GQA", "MQA"])
def test_heads_are_those_of_keys_not_of_queries(kv_heads: int) -> None:
    cache = Cache([StaticLayer(10), DynamicLayer(), SlidingWindowLayer(3), QuantizedLayer("int4:g64")])
    for step, columns in enumerate([(10, 1, 1, 1), (10, 2, 2, 2), (10, 3, 3, 3), (10, 4, 3, 4)]):
        for layer, count in enumerate(columns):
            keys, values = cache.update(
                torch.rand(2, kv_heads, 1, 128), torch.rand(2, kv_heads, 1, 64), layer
            )
            assert keys.shape == (2, kv_heads, count, 128), (step, layer)
            assert values.shape == (2, kv_heads, count, 64), (step, layer)


# --- life of a cache ----------------------------------------------------------------------------------------


@every_kind
def test_a_cache_is_empty_before_the_first_update_and_after_reset(make: Callable[[], Layer]) -> None:
    cache = Cache([make(), make()])
    expected = cache.get_mask_sizes(3), cache.get_max_length()
    for _ in range(2):
        assert (len(cache), int(cache.get_seq_length()), int(cache.get_seq_length(1))) == (2, 0, 0)
        assert (cache.get_mask_sizes(3), cache.get_max_length()) == expected
        assert cache.cache_position(2).tolist() == [0, 1]
        assert put(cache, 7, 8, 9)[:3] == [7, 8, 9]
        assert [int(cache.get_seq_length(i)) for i in range(2)] == [3, 0]
        cache.reset()


def test_only_windows_say_that_they_slide() -> None:
    assert {name: make().is_sliding for name, make in KINDS.items()} == {
        "dynamic": False,
        "static": False,
        "sliding": True,
        "quantized": False,
    }


@every_kind
def test_a_rejected_draft_leaves_no_trace(make: Callable[[], Layer]) -> None:
    drafted, plain = Cache([make()]), Cache([make()])
    for cache in (drafted, plain):
        put(cache, 1, 2, 3, 4, 5)
    put(drafted, 60, 70, 80, at=5)
    drafted.crop(-2)
    put(drafted, 71, at=6)
    drafted.crop(5)
    for number, at in ((6, 5), (7, 6)):
        assert put(drafted, number, at=at) == put(plain, number, at=at)


@every_kind
def test_beams_carry_their_past_along(make: Callable[[], Layer]) -> None:
    cache = Cache([make()])
    first = column([[1, 2], [10, 20], [100, 200]])
    cache.update(first, -first, 0)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    new = column([[300], [3], [4]])
    keys, values = cache.update(new, -new, 0)
    assert numbers(keys[:, :, :3]) == [[100, 200, 300], [1, 2, 3], [1, 2, 4]]
    assert torch.equal(values, -keys)
    cache.reorder_cache(torch.tensor([1, 1, 2]))
    assert numbers(cache.layers[0].keys[:, :, :3]) == [[1, 2, 3], [1, 2, 3], [1, 2, 4]]


@every_kind
def test_a_prompt_is_forked_by_repeating_and_settled_by_selecting(make: Callable[[], Layer]) -> None:
    cache = Cache([make()])
    prompt = column([[1, 2], [10, 20]])
    cache.update(prompt, -prompt, 0)
    cache.batch_repeat_interleave(2)
    new = column([[3], [4], [30], [40]])
    cache.update(new, -new, 0)
    cache.batch_select_indices(torch.tensor([1, 2]))
    last = column([[5], [50]])
    keys, values = cache.update(last, -last, 0)
    assert numbers(keys[:, :, :4]) == [[1, 2, 4, 5], [10, 20, 30, 50]]
    assert torch.equal(values, -keys)


CHANGES: dict[str, Callable[[Cache], object]] = {
    "update": lambda cache: put(cache, 9),
    "crop, then update": lambda cache: (cache.crop(-1), put(cache, 9)),
    "reset, then update": lambda cache: (cache.reset(), put(cache, 9)),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
}


@every_kind
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("changed", [0, 1], ids=["original", "copy"])
def test_copies_do_not_see_each_other(
    make: Callable[[], Layer], change: Callable[[Cache], object], changed: int
) -> None:
    cache = Cache([make()])
    put(cache, 1, 2, 3)
    both = cache, copy.deepcopy(cache)
    change(both[changed])
    assert put(both[1 - changed], 4, at=3)[:4] == [1, 2, 3, 4]


# --- in a model ---------------------------------------------------------------------------------------------

VOCAB, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 60, 32, 4, 2, 8, 2
WINDOW = 6

CACHES: dict[str, tuple[Callable[[], Cache], int]] = {
    "dynamic": (Cache.dynamic, 99),
    "static": (lambda: Cache.static(40), 99),
    "sliding": (lambda: Cache(SlidingWindowLayer(WINDOW) for _ in range(LAYERS)), WINDOW),
    "hybrid": (lambda: Cache([StaticLayer(40), DynamicLayer()]), 99),
}
every_cache = pytest.mark.parametrize(("make", "window"), CACHES.values(), ids=CACHES)


class Decoder(torch.nn.Module):
    """Layers of grouped-query attention; padding is hidden and takes no position."""

    def __init__(self, window: int = 99) -> None:
        super().__init__()
        rng = generator(3)
        self.window = window
        self.embed = torch.randn(VOCAB, WIDTH, generator=rng)
        self.places = torch.randn(64, WIDTH, generator=rng)
        self.inner = torch.randn(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * DIM, generator=rng) / WIDTH**0.5
        self.outer = torch.randn(LAYERS, HEADS * DIM, WIDTH, generator=rng) / WIDTH**0.5

    def forward(self, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Logits ``[B, VOCAB]`` behind the last token; ``mask`` covers past and new tokens."""
        place = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        query_pos = cache.cache_position(ids.shape[1])
        x = self.embed[ids] + self.places[place]
        for i, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            heads = (x @ inner).unflatten(-1, (-1, DIM)).transpose(1, 2)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            columns, offset = cache.get_mask_sizes(ids.shape[1], i)
            k, v = cache.update(k, v, i, {"cache_position": query_pos})
            key_pos = torch.arange(offset, offset + columns)
            seen = (key_pos <= query_pos[:, None]) & (key_pos > query_pos[:, None] - self.window)
            shown = mask.new_zeros(len(mask), columns)  # columns behind the last token stay hidden
            shown[:, : mask.shape[1] - offset] = mask[:, offset:]
            out = scaled_dot_product_attention(
                q, k, v, seen & shown[:, None, None].bool(), enable_gqa=True
            ).nan_to_num()  # a padding token sees nothing
            x = x + out.transpose(1, 2).flatten(2) @ outer
        return x[:, -1] @ self.embed.T


def prompts(*lengths: int, extra: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask, with ``extra`` more columns of padding."""
    width = max(lengths) + extra
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(1, VOCAB, (length,), generator=generator(length))
        mask[row, width - length :] = 1
    return ids, mask


def greedy(model: Decoder, ids: Tensor, mask: Tensor, cache: Cache, steps: int = 10) -> tuple[Tensor, Tensor]:
    """New tokens ``[B, steps]`` and the logits that chose them; the cache may hold the first tokens."""
    tokens, logits, new = [], [], ids[:, int(cache.get_seq_length()) :]
    for _ in range(steps):
        logits.append(model(new, cache.attention_mask(mask, new.shape[1]), cache))
        new = logits[-1].argmax(-1, keepdim=True)
        tokens.append(new)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


@every_cache
def test_a_batch_continues_as_each_of_its_rows(make: Callable[[], Cache], window: int) -> None:
    model, lengths = Decoder(window), (9, 4, 13)
    tokens, logits = greedy(model, *prompts(*lengths), make())
    for row, length in enumerate(lengths):
        alone = greedy(model, *prompts(length), make())
        assert torch.equal(tokens[row], alone[0][0])
        torch.testing.assert_close(logits[row], alone[1][0], rtol=1e-4, atol=1e-4)


@every_cache
def test_extra_left_padding_changes_no_logits(make: Callable[[], Cache], window: int) -> None:
    model = Decoder(window)
    results = [greedy(model, *prompts(8, 5, extra=extra), make()) for extra in (0, 11)]
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)


@every_cache
def test_a_copied_prompt_serves_several_questions(make: Callable[[], Cache], window: int) -> None:
    model, (ids, mask) = Decoder(window), prompts(9)
    prompt_cache = make()
    model(ids, mask, prompt_cache)
    for length in (3, 5):
        question = torch.cat([ids, prompts(length)[0]], 1)
        copied = greedy(model, question, torch.ones_like(question), copy.deepcopy(prompt_cache))
        fresh = greedy(model, question, torch.ones_like(question), make())
        assert torch.equal(copied[0], fresh[0])
        torch.testing.assert_close(copied[1], fresh[1], rtol=1e-4, atol=1e-4)
    assert int(prompt_cache.get_seq_length()) == 9


def beam_search(
    model: Decoder, prompt: Tensor, make: Callable[[], Cache], reuse: bool
) -> tuple[Tensor, bool]:
    """Beams ``[4, T]``, best first, and whether one moved; without ``reuse``, all is computed anew."""
    cache, beams, moved = make(), prompt, False
    scores = torch.zeros(1, 1)
    for step in range(10):
        new = beams[:, int(cache.get_seq_length()) :]
        rows = model(new, torch.ones_like(beams), cache)
        scores, flat = (scores + log_softmax(rows, -1)).flatten().topk(4)
        source, scores = flat // VOCAB, scores[:, None]
        beams = torch.cat([beams[source], (flat % VOCAB)[:, None]], 1)
        moved = moved or (step > 0 and source.tolist() != [0, 1, 2, 3])
        if not reuse:
            cache = make()
        elif step == 0:
            cache.batch_repeat_interleave(4)
        else:
            cache.reorder_cache(source)
    return beams, moved


@every_cache
def test_beams_are_those_of_computing_everything_anew(make: Callable[[], Cache], window: int) -> None:
    model, (prompt, _) = Decoder(window), prompts(8)
    beams, moved = beam_search(model, prompt, make, reuse=True)
    assert moved
    assert torch.equal(beams, beam_search(model, prompt, make, reuse=False)[0])
