"""Both halves of an encoder-decoder's cache: the encoder's keys are stored once, and rows share them."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from integrations.cache.test_encoder_decoders import NAMES, SIZES, family
from integrations.models.test_families import padded_prompts
from oracles.pairs import in_turn, pairwise
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache

from kvloom import ops
from kvloom.errors import ArgumentError, ShapeError, StateError, UnsupportedError
from kvloom.integrations.transformers import EncoderDecoderKVCache, KVCache, enable
from kvloom.integrations.transformers.attention.crossed import CrossStates, attend_crossed
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.versions import IS_4

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"num_return_sequences": 2, "do_sample": True, "top_k": 5},
}


def theirs() -> Any:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def generated(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(1)
    tokens: Tensor = model.generate(**padded_prompts(), **OPTIONS | options)
    return tokens


def step(model: Any, cache: Any, ids: list[list[int]]) -> Tensor:
    """Logits of new tokens of a decoder; the encoder's input is the same each time."""
    inputs = padded_prompts() | {"decoder_input_ids": torch.tensor(ids)}
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    return logits


def filled(kv: str = "auto", rows: int = 2, num_tokens: int = 20, repeats: int = 1) -> Any:
    """A cache whose encoder's half has random keys and values, and these: one pair for each layer."""
    cache: Any = KVCache.for_model(family("Bart"), kv)
    torch.manual_seed(0)
    pairs = [
        tuple(torch.randn(rows, 4, num_tokens, 8).repeat_interleave(repeats, 0) for _ in range(2))
        for _ in cache.layers
    ]
    for i, pair in enumerate(pairs):
        cache.cross_attention_cache.update(*pair, i)
    return cache, pairs


@pytest.mark.parametrize(("name", "attention", "way"), pairwise(NAMES, ["kvloom", None], [*WAYS]))
def test_a_cache_of_both_halves_generates_the_same_text(name: str, attention: str | None, way: str) -> None:
    model = family(name)
    # T5Gemma of transformers 4 gives other samples and beams to a cache that is given than to its own.
    expected = generated(model, **WAYS[way], **{CACHE_ARGUMENT: theirs()})
    if attention is not None:
        model.set_attn_implementation(attention)
    cache = KVCache.for_model(model, page_size=4)
    assert isinstance(cache, EncoderDecoderCache)
    assert torch.equal(generated(model, **WAYS[way], **{CACHE_ARGUMENT: cache}), expected)
    encoder = cache.cross_attention_cache
    assert encoder.get_seq_length() == padded_prompts()["input_ids"].shape[1]
    assert encoder.num_rows == cache.num_rows == 2 * max(WAYS[way].get("num_beams", 1), len(expected) // 2)
    assert {*cache.is_updated.values()} == {True}


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
def test_beams_keep_the_keys_of_an_encoder_once(kv: str) -> None:
    """And in pages that no beam moves: those of five are what two documents take."""
    sizes = set()
    for way in ({}, {"num_beams": 5}, {"num_return_sequences": 3, "do_sample": True}):
        model = family("Bart")
        enable(model, kv, page_size=4)
        made = model.generate(**padded_prompts(), **OPTIONS | way, return_dict_in_generate=True)
        encoder = made.past_key_values.cross_attention_cache
        sizes.add((encoder.nbytes, encoder.num_pages_held))
        assert encoder.get_seq_length() == padded_prompts()["input_ids"].shape[1]
    assert len(sizes) == 1


@pytest.mark.parametrize(("name", "way"), in_turn(NAMES, [*WAYS]))
def test_a_report_says_what_both_halves_hold(name: str, way: str) -> None:
    """And what they save against transformers' cache with the same rows."""
    model = family(name)
    expected: Any = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    generated(model, **WAYS[way], **{CACHE_ARGUMENT: expected})
    cache = KVCache.for_model(model, "int8:g4", page_size=4)
    assert (cache.report()["nbytes"], cache.report()["text"]["kv"]) == (0, None)
    generated(model, **WAYS[way], **{CACHE_ARGUMENT: cache})
    found, num_read = cache.report(), padded_prompts()["input_ids"].shape[1]
    assert found["nbytes"] == cache.nbytes == sum(found[half]["nbytes"] for half in ("text", "encoder"))
    assert (found["encoder"]["stored_rows"], found["encoder"]["tokens"]) == (2, num_read)
    assert found["text"]["rows"] == found["encoder"]["rows"] == cache.num_rows
    assert found["text"]["tokens"] == cache.get_seq_length()
    assert found["text"]["kv"] == "int8:g4" and found["encoder"]["kv"] == "int8:g4,smooth=none"
    for half in ("self_attention", "cross_attention"):
        layers = getattr(expected, f"{half}_cache").layers
        held = sum(x.keys.nbytes + x.values.nbytes for x in layers)
        assert found["encoder" if half == "cross_attention" else "text"]["nbytes_dynamic"] == held
    rows = f"{cache.num_rows} rows x {cache.get_seq_length()} tokens"
    read = f"beside 2 for {cache.num_rows} rows x {num_read} of the encoder"
    said = f"EncoderDecoderKVCache(kv='int8:g4', {rows}, {read}, {cache.nbytes:,} bytes)"
    assert repr(cache) == said
    cache.reset()
    assert (cache.report()["encoder"]["stored_rows"], cache.report()["nbytes_dynamic"]) == (0, 0)


def test_late_keys_of_an_encoder_have_eight_bits_where_others_have_four() -> None:
    """With five beams of the usual head dim, in at most 0.035 of the bytes of five copies in float32."""
    sizes = SIZES | {"d_model": 128, "decoder_layers": 4, "decoder_attention_heads": 2}
    cache: Any = KVCache.for_model(family("Bart", sizes), "int4")
    cache._own_layers[0]._config._attn_implementation = "eager"
    encoder = cache.cross_attention_cache
    torch.manual_seed(0)
    num_bytes, errors = 0, []
    for i in range(4):
        pair = [torch.randn(1, 2, 1500, 64).expand(5, -1, -1, -1) for _ in range(2)]
        pair[1] = pair[1] * (1 + 9 * (torch.arange(64) == 5))  # an outlier, which a rotation spreads
        encoder.update(*pair, i)
        num_bytes += sum(5 * x[0].nbytes for x in pair)
        stored = encoder.layers[i].keys, encoder.layers[i].values
        errors.append([float((a - b).square().mean().sqrt()) for a, b in zip(stored, pair, strict=True)])
    assert encoder.nbytes <= 0.035 * num_bytes
    # The largest of 64 numbers of size 1 is 2.4 on average. Codes of 4 bits have steps of an eighth of it,
    # of 8 bits of a 127th; the error is a step / sqrt(12). Rotated values are of size sqrt(163 / 64).
    for i, (of_keys, of_values) in enumerate(errors):
        assert of_keys == pytest.approx((0.0055, 0.09)[i < 2], rel=0.2)
        assert of_values == pytest.approx(0.09 * (163 / 64) ** 0.5, rel=0.2)


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("attention", ["kvloom", "eager"])
def test_changes_of_rows_are_those_of_transformers(kv: str, attention: str) -> None:
    cache, pairs = filled(kv, rows=2, repeats=2)
    cache._own_layers[0]._config._attn_implementation = attention
    expected: Any = theirs()
    own = cache.cross_attention_cache
    for i in range(len(pairs)):
        expected.cross_attention_cache.update(own.layers[i].keys + 0, own.layers[i].values + 0, i)
        for half in (cache, expected):
            half.self_attention_cache.update(torch.randn(4, 4, 3, 8), torch.randn(4, 4, 3, 8), i)
    changes: list[tuple[str, Any]] = [
        ("reorder_cache", torch.tensor([1, 0, 2, 2])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([7, 0, 2, 3])),
        ("batch_select_indices", torch.tensor([0, 2])),
    ]
    for name, argument in changes:
        for half in (cache, expected):
            getattr(half, name)(argument)
        for layer, other in zip(own.layers, expected.cross_attention_cache.layers, strict=True):
            assert torch.equal(layer.keys + 0, other.keys)
            assert torch.equal(layer.values + 0, other.values)
            assert layer.keys.shape == other.keys.shape


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1], [3, 0, 1, 2], [0, 0, 2, 2]])
def test_assigned_keys_are_those_of_the_rows(order: list[int]) -> None:
    """Of stored rows in any order; rows that share one cannot differ."""
    cache, _ = filled(rows=2, repeats=2)
    cache._own_layers[0]._config._attn_implementation = "eager"
    encoder = cache.cross_attention_cache
    encoder.batch_select_indices(torch.tensor(order))
    layer, rows = encoder.layers[0], torch.tensor(order) // 2
    torch.manual_seed(1)
    new = torch.randn(2, 4, 20, 8)[rows]
    layer.keys = new
    assert torch.equal(layer.keys + 0, new)
    with pytest.raises(UnsupportedError, match="cannot be changed in place"):
        layer.values[1] = 0
    with pytest.raises(UnsupportedError, match=r"^keys must be equal in rows that share"):
        layer.keys = torch.randn(4, 4, 20, 8)
    with pytest.raises(ShapeError, match=r"^values must be \[B, H, N, D\] with B=4, got \[2, 4, 20, 8\]$"):
        layer.values = new[:2]
    assert torch.equal(layer.keys + 0, new)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_write_to_what_attention_reads_is_to_one_row(rows: int) -> None:
    """Of rows that share one; the cache is unchanged."""
    cache, pairs = filled(rows=rows, repeats=2)
    cache._own_layers[0]._config._attn_implementation = "kvloom"
    layer = cache.cross_attention_cache.layers[0]
    keys, values = layer.keys, layer.values
    expected = pairs[0][0].clone()
    keys[1], expected[1] = 0, 0
    assert torch.equal(keys + 0, expected)
    assert torch.equal(values + 0, pairs[0][1])
    assert not keys.is_pair_of(values)
    assert torch.equal(layer.keys + 0, pairs[0][0])


def test_values_of_rows_in_another_order_are_written_in_place() -> None:
    cache, pairs = filled(rows=3)
    cache._own_layers[0]._config._attn_implementation = "eager"
    cache.cross_attention_cache.batch_select_indices(torch.tensor([2, 0, 1]))
    layer, expected = cache.cross_attention_cache.layers[0], pairs[0][1][[2, 0, 1]]
    layer.values[1, :, 3] = expected[1, :, 3] = 7
    assert torch.equal(layer.values + 0, expected)


def test_pages_of_an_encoder_that_no_row_needs_are_free() -> None:
    cache, _ = filled(rows=3, repeats=2)
    held = cache.num_pages_held
    cache.batch_select_indices(torch.tensor([0, 4, 5]))
    assert cache.num_pages_held == held * 2 // 3
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.num_pages_held == held // 3
    cache.reset()
    assert (cache.num_pages_held, cache.nbytes) == (0, 0)


@pytest.mark.parametrize("attention", ["kvloom", "eager"])
def test_rows_that_are_equal_in_one_layer_alone_are_not_shared(attention: str) -> None:
    cache: Any = KVCache.for_model(family("Bart"))
    cache._own_layers[0]._config._attn_implementation = attention
    encoder = cache.cross_attention_cache
    torch.manual_seed(0)
    same, others = torch.randn(1, 4, 9, 8).expand(3, -1, -1, -1), torch.randn(3, 4, 9, 8)
    for value in (same, others):
        encoder.reset()
        encoder.update(same, same, 0)
        assert encoder.num_pages_held == 1
        encoder.update(same, value, 1)
        assert encoder.num_pages_held == (1 if value is same else 3)
        for layer, expected in zip(encoder.layers, (same, value), strict=True):
            assert torch.equal(layer.keys + 0, same)
            assert torch.equal(layer.values + 0, expected)


def masks(rows: int, num_new: int, num_tokens: int) -> dict[str, Tensor | None]:
    """Masks ``[B or 1, Hq or 1, Q or 1, N]`` of many kinds."""
    torch.manual_seed(2)
    column = torch.arange(num_tokens)
    ends = torch.randint(1, num_tokens + 1, (rows, 1, 1, 1))
    right, left = column < ends, column >= ends - 1
    holes = torch.rand(rows, 1, num_new, num_tokens) < 0.7
    holes[..., 0] = True
    added = torch.zeros(right.shape).masked_fill(~right, torch.finfo(torch.float32).min)
    return {
        "none": None, "right": right, "left": left, "holes": holes, "added right": added,
        "one row": right[:1], "scores": torch.randn(rows, 1, num_new, num_tokens),
        "of heads": torch.randn(1, 8, num_new, num_tokens), "equal ends": right[:1].expand(rows, 1, 1, -1),
    }  # fmt: skip


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 0, 1, 1, 2, 2], [0, 1, 1, 2], [2, 0, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_cross_attention_is_that_of_torch(num_new: int, rows: list[int], has_bias: bool) -> None:
    """Of any stored rows and any mask, compared with ``scaled_dot_product_attention`` of float64."""
    model = family("Bart")
    model.set_attn_implementation("kvloom")
    encoder = KVCache.for_model(model, page_size=4).cross_attention_cache
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, 4, 21, 8).unbind(0)
    encoder.update(key, value, 0)
    encoder.batch_select_indices(torch.tensor(rows))
    query = torch.randn(len(rows), 8, num_new, 8)
    bias = torch.randn(1, 8, num_new, 21) if has_bias else None
    for name, mask in masks(len(rows), num_new, 21).items():
        states = encoder.layers[0].keys
        assert isinstance(states, CrossStates)
        out = attend_crossed(states, query, ops.Scores(0.3, is_causal=False), mask, bias)
        added = torch.zeros(1, 1, num_new, 21, dtype=torch.float64)
        if mask is not None:
            added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
        if bias is not None:
            added = added + bias
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double(),
            *(x[rows].double().repeat_interleave(2, 1) for x in (key, value)),
            added,
            scale=0.3,
        ).transpose(1, 2)
        assert out.shape == expected.shape, name
        # Each result is a mean of 21 values of size 3, of products of 8 elements.
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5, msg=name)


def test_a_mask_that_is_written_in_place_counts() -> None:
    model = family("Bart")
    model.set_attn_implementation("kvloom")
    encoder = KVCache.for_model(model).cross_attention_cache
    torch.manual_seed(0)
    states = encoder.update(*torch.randn(2, 1, 4, 9, 8).unbind(0), 0)[0]
    query, scores = torch.randn(1, 4, 1, 8), ops.Scores(0.3, is_causal=False)
    mask, bias = torch.ones(1, 1, 1, 9, dtype=torch.bool), torch.zeros(1, 4, 1, 9)
    whole = attend_crossed(states, query, scores, mask, None)
    assert torch.equal(attend_crossed(states, query, scores, None, bias), whole)
    mask[..., 4:] = False
    bias.copy_(torch.zeros(1).where(mask, -torch.inf))
    fewer = attend_crossed(states, query, scores, mask.clone(), None)
    assert not torch.equal(fewer, whole)
    assert torch.equal(attend_crossed(states, query, scores, mask, None), fewer)
    torch.testing.assert_close(attend_crossed(states, query, scores, None, bias), fewer)


@pytest.mark.parametrize("kv", ["float32", "int8", "int4", "bfloat16"])
def test_results_are_the_same_bits_for_any_pages_and_batch(kv: str) -> None:
    model = family("Bart")
    model.set_attn_implementation("kvloom")
    torch.manual_seed(0)
    key, value, query = torch.randn(2, 4, 700, 8), torch.randn(2, 4, 700, 8), torch.randn(6, 4, 1, 8)

    def attended(rows: list[int], page_size: int) -> Tensor:
        encoder = KVCache.for_model(model, kv, page_size).cross_attention_cache
        of_items = torch.tensor(rows) // 3
        states = encoder.update(key[of_items], value[of_items], 0)[0]
        return attend_crossed(states, query[rows], ops.Scores(0.3, is_causal=False), None, None)

    expected = attended([*range(6)], 16)
    for page_size in (1, 64, 1024):
        assert torch.equal(attended([*range(6)], page_size), expected)
    for b in range(6):
        assert torch.equal(attended([b], 16)[0], expected[b])


@pytest.mark.parametrize("attention", ["kvloom", "eager"])
def test_copies_continue_as_the_cache_does(attention: str) -> None:
    model = family("Bart")
    model.set_attn_implementation(attention)
    cache = KVCache.for_model(model, "int8")
    step(model, cache, [[1, 5, 6], [1, 7, 8]])
    file = io.BytesIO()
    pickle.dump(cache, file)
    file.seek(0)
    copies = [cache.fork(), copy.deepcopy(cache), cache.snapshot().fork(), pickle.load(file)]  # noqa: S301
    copies[3]._own_layers[0]._config._attn_implementation = attention  # of a configuration of its own
    snapshot = cache.snapshot()
    expected = step(model, cache, [[9], [10]])
    for other in copies:
        assert isinstance(other, EncoderDecoderKVCache)
        assert torch.equal(step(model, other, [[9], [10]]), expected)
    cache.restore(snapshot)
    assert torch.equal(step(model, cache, [[9], [10]]), expected)
    cache.crop(-1)
    num_read = padded_prompts()["input_ids"].shape[1]
    assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (3, num_read)
    assert torch.equal(step(model, cache, [[9], [10]]), expected)


def test_a_snapshot_keeps_its_encoder() -> None:
    cache, _ = filled()
    snapshot = cache.snapshot()
    with pytest.raises(StateError, match="frozen"):
        snapshot.cross_attention_cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
    with pytest.raises(StateError, match="frozen"):
        snapshot.reset()
    cache.reset()
    assert snapshot.cross_attention_cache.get_seq_length() == 20


def test_another_encoder_needs_an_empty_cache() -> None:
    cache, _ = filled()
    more = torch.zeros(2, 4, 5, 8)
    with pytest.raises(StateError, match=r"^layer 1 must be empty before .* got 20 tokens: reset the cache"):
        cache.cross_attention_cache.update(more, more, 1)
    cache.is_updated[0] = True
    cache.reset()
    assert cache.is_updated == {0: False}
    cache.cross_attention_cache.update(more[:1], more[:1], 1)
    assert (cache.cross_attention_cache.num_rows, cache.cross_attention_cache.get_seq_length(1)) == (1, 5)


@pytest.mark.parametrize("name", ["input_ids", "encoder_outputs"])
def test_another_input_of_the_encoder_is_refused(name: str) -> None:
    """transformers answers about the first one: a filled cache is not asked what its keys are of."""
    model, ids = family("Bart"), torch.randint(5, 90, (2, 30))
    other = ids.clone()
    other[1, 17] += 1

    def read(tokens: Tensor) -> dict[str, Any]:
        return {name: tokens if name == "input_ids" else model.get_encoder()(input_ids=tokens)}

    def logits(cache: Any, given: dict[str, Any]) -> Tensor:
        rows = len(given[name]) if name == "input_ids" else len(given[name][0])
        found: Tensor = model(
            **given, decoder_input_ids=torch.full((rows, 1), 7), use_cache=True, **{CACHE_ARGUMENT: cache}
        ).logits
        return found

    with torch.no_grad():
        cache = KVCache.for_model(model)
        logits(cache, read(ids.clone()))
        for copied in (cache, cache.fork()):
            with pytest.raises(
                StateError, match=rf"^{name} must be what the cache has the encoder's keys of"
            ):
                logits(copied, read(other))
        with pytest.raises(StateError, match=rf"^{name} must be"):
            logits(cache, read(ids[:1]))
        assert cache.get_seq_length() == 1
        logits(cache, read(ids))  # computed again, in another tensor
        given = read(ids.clone())
        logits(cache, given)
        written = given[name] if name == "input_ids" else given[name][0]
        written.copy_(read(other)[name] if name == "input_ids" else read(other)[name][0])
        with pytest.raises(StateError, match=rf"^{name} must be"):
            logits(cache, given)  # the same tensor, with something else in it
        cache.batch_select_indices(torch.tensor([1, 1, 0]))
        logits(cache, read(ids[[1, 1, 0]]))
        with pytest.raises(StateError, match=rf"^{name} must be"):
            logits(cache, read(ids[[1, 0, 0]]))
        cache.reset()
        expected = logits(KVCache.for_model(model), read(other))
        torch.testing.assert_close(logits(cache, read(other)), expected)


def test_a_refused_update_leaves_no_rows() -> None:
    encoder = KVCache.for_model(family("Bart")).cross_attention_cache
    with pytest.raises(ShapeError):
        encoder.update(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 6, 8), 0)
    assert encoder.num_rows == 0
    encoder.update(torch.zeros(3, 4, 5, 8), torch.zeros(3, 4, 5, 8), 0)
    assert encoder.num_rows == 3


def test_halves_of_different_batches_are_not_changed() -> None:
    cache, _ = filled(rows=2)
    cache.update(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8), 0)
    with pytest.raises(StateError, match=r"must have the 2 rows of the encoder, got 3$"):
        cache.reorder_cache(torch.tensor([0, 0, 0]))


def test_the_legacy_format_has_both_halves() -> None:
    cache, pairs = filled(repeats=2)
    assert cache.to_legacy_cache() == ()
    own = [tuple(torch.randn(2, 4, 4, 3, 8).unbind(0)) for _ in pairs]
    for i, pair in enumerate(own):
        cache.update(*pair, i)
    legacy, given = cache.to_legacy_cache(), [(*a, *b) for a, b in zip(own, pairs, strict=True)]
    for found, expected in zip(legacy, given, strict=True):
        assert all(map(torch.equal, found, expected))
    copied: Any = KVCache.from_legacy_cache(legacy, family("Bart"))
    assert isinstance(copied, EncoderDecoderKVCache)
    assert (copied.get_seq_length(), copied.cross_attention_cache.get_seq_length()) == (3, 20)
    assert copied.is_updated == {0: True, 1: True}
    assert copied.nbytes == cache.nbytes  # rows share the encoder's
    if hasattr(EncoderDecoderCache, "from_legacy_cache"):
        assert EncoderDecoderCache.from_legacy_cache(legacy).to_legacy_cache()[1][3].shape == (4, 4, 20, 8)


def test_what_is_no_legacy_format_of_both_halves_is_refused() -> None:
    pair, model = (torch.zeros(2, 4, 3, 8),) * 2, family("Bart")
    with pytest.raises(ArgumentError, match=r"^model must be given, and attend to an encoder, .* got none$"):
        KVCache.from_legacy_cache([pair * 2])
    with pytest.raises(ArgumentError, match=r"in every layer or in none, got 1 of 2$"):
        KVCache.from_legacy_cache([pair * 2, pair], model)
    with pytest.raises(ArgumentError, match=r"one number of rows, got \[2, 1\]$"):
        KVCache.from_legacy_cache([(*pair, pair[0][:1], pair[0][:1])], model)


def test_the_encoder_of_a_cache_is_not_replaced() -> None:
    cache, _ = filled()
    encoder = cache.cross_attention_cache
    cache.cross_attention_cache = type(encoder)(config=None)  # as T5Gemma's generate does
    assert cache.cross_attention_cache is encoder
    with pytest.raises(ArgumentError, match=r"^cross_attention_cache must stay .* DynamicCache"):
        cache.cross_attention_cache = DynamicCache()


def test_what_a_cache_has_is_what_transformers_asks_of_it() -> None:
    """Nothing is asked of transformers' class, which asks its first half: that is the cache itself."""
    cache, pairs = filled()
    cache.update(torch.ones(2, 4, 3, 8), torch.ones(2, 4, 3, 8), 0)
    assert cache.self_attention_cache is cache
    for name in vars(EncoderDecoderCache).keys() & vars(Cache).keys():
        found = next(x for x in type(cache).__mro__ if name in vars(x))
        assert found is not EncoderDecoderCache, name
    assert (len(cache), cache.is_sliding) == (2, [False, False])
    first = next(iter(cache))
    assert len(first) == (4 if IS_4 else 6)
    assert torch.equal(first[len(first) // 2] + 0, pairs[0][0])
    assert cache.nbytes == cache._cache.nbytes + cache.cross_attention_cache.nbytes


@pytest.mark.compile
@pytest.mark.skipif(IS_4, reason="positions that the forward of transformers 4 makes are in no graph")
@pytest.mark.parametrize(("attention", "backend"), [("kvloom", "aot_eager"), ("eager", "eager")])
def test_a_static_cache_compiles_in_one_graph(attention: str, backend: str) -> None:
    model = family("Bart", SIZES | {"decoder_layers": 1}).requires_grad_(False)
    model.set_attn_implementation(attention)
    static, other = KVCache.for_model(model, static=True, max_tokens=16), KVCache.for_model(model)
    for cache in (static, other):
        step(model, cache, [[1, 5, 6], [1, 7, 8]])
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    inputs = padded_prompts() | {
        "encoder_outputs": model.get_encoder()(**padded_prompts()),
        "use_cache": True,
    }
    del inputs["input_ids"]
    for token in (9, 10, 11):
        inputs["decoder_input_ids"] = torch.tensor([[token], [token + 5]])
        with torch.no_grad():
            logits = compiled(**inputs, **{CACHE_ARGUMENT: static}).logits
            expected = model(**inputs, **{CACHE_ARGUMENT: other}).logits
        torch.testing.assert_close(logits, expected)
