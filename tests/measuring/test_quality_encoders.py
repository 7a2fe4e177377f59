"""What a kind of cache costs in quality where a decoder reads an encoder, too: both halves are in it.

Expected figures come from forwards with caches of transformers, a softmax in loops and hooks.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.models.test_encoder_decoder_families import family, inputs
from oracles.language_models import FakeQuantCache, FakeQuantCache4
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import kvloom
from kvloom import KVCache
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.measuring.quality import Peer

CHUNK = 4
INT4, INT8 = "int4:g4,rotate=none,recent=0,smooth=none", "int8:g4,smooth=none"
BART, T5, WHISPER = (f"{x}ForConditionalGeneration" for x in ("Bart", "T5", "Whisper"))


class Rounded(FakeQuantCache4):
    """Groups of 4, which divide the small head dims of these models."""

    group = 4


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def texts_of(num_tokens: int = 12, num_texts: int = 2) -> Tensor:
    return torch.randint(5, 90, (num_texts, num_tokens), generator=torch.Generator().manual_seed(3))


def theirs(model: Any, own: Any = None, beside: Any = None) -> Any:
    own = DynamicCache(config=model.config) if own is None else own
    return EncoderDecoderCache(own, DynamicCache() if beside is None else beside)


def probabilities(model: Any, given: dict[str, Any], texts: Tensor, cache: Any) -> Tensor:
    """``[N, W - 1, V]``, fed in chunks with the whole input each time; the softmax is written out."""
    logits = torch.cat(
        [
            model(**given, decoder_input_ids=x, use_cache=True, **as_argument(model, cache)).logits
            for x in texts[:, :-1].split(CHUNK, dim=1)
        ],
        dim=1,
    )
    weights = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["int8:g8", "int4:g8,recent=0"])
@pytest.mark.parametrize("name", [BART, T5, WHISPER, "MoonshineForConditionalGeneration"])
def test_figures_are_those_of_forwards_with_both_halves(name: str, kind: str) -> None:
    model, given, texts = family(name), inputs(name), texts_of()
    stock, row = kvloom.quality(model, texts, [kind], encoder_inputs=given, chunk=CHUNK)
    cache = KVCache.for_model(model, kind)
    p, q = (probabilities(model, given, texts, x) for x in (theirs(model), cache))
    count, targets = p[..., 0].numel(), texts[:, 1:].unsqueeze(-1)
    for found, each in ((stock, p), (row, q)):
        loss = -sum(math.log(x) for x in each.gather(-1, targets).flatten().tolist()) / count
        assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert found.num_tokens == count
    kl = float((p * (p / q).log()).sum(-1).mean())
    assert row.mean_kl == pytest.approx(kl, rel=1e-2)
    assert row.agreed == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert row.nbytes_per_token == cache.nbytes_per_token
    assert row.nbytes_per_encoder_token == cache.cross_attention_cache.nbytes_per_token
    assert stock.nbytes_per_token == stock.nbytes_per_encoder_token == 2 * 2 * 4 * 8 * 4


def test_a_loss_of_the_encoders_half_alone_is_seen() -> None:
    """A peer of one half is beside transformers' other half."""
    model, given, texts = family(WHISPER), inputs(WHISPER), texts_of()
    peers = [
        Peer("own", lambda model: Rounded(config=model.config)),
        Peer("beside", lambda model: theirs(model, beside=Rounded())),
        Peer("both", lambda model: theirs(model, Rounded(config=model.config), Rounded())),
    ]
    _, own, beside, both = kvloom.quality(model, texts, peers, encoder_inputs=given, chunk=CHUNK)
    p = probabilities(model, given, texts, theirs(model))
    for row, cache in zip((own, beside, both), (x.make(model) for x in peers), strict=True):
        cache = cache if isinstance(cache, EncoderDecoderCache) else theirs(model, cache)
        q = probabilities(model, given, texts, cache)
        assert row.mean_kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-2) != 0
    assert {*sum(own.encoder_head_errors.values(), ())} == {*sum(beside.head_errors.values(), ())} == {0.0}
    for layer in (0, 1):
        assert both.head_errors[layer] == pytest.approx(own.head_errors[layer])
        assert both.encoder_head_errors[layer] == pytest.approx(beside.encoder_head_errors[layer])


def outputs_of(model: Any, given: dict[str, Any], texts: Tensor, cache: Any, layer: int, part: str) -> Tensor:
    """Attention's output ``[N, W - 1, Hq, D]`` in a layer, as its projection gets it."""
    seen: list[Tensor] = []
    projection = getattr(model.model.decoder.layers[layer], part).out_proj
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    probabilities(model, given, texts, cache)
    handle.remove()
    return torch.cat(seen, dim=1).unflatten(-1, (4, -1)).double()


class OneLayerRounded(FakeQuantCache):
    """Rounds one layer to 8 bits, as both halves are, and keeps the others as they are."""

    rounded, group = 0, 4

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        update = FakeQuantCache.update if layer_idx == self.rounded else DynamicCache.update
        return update(self, key, value, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvloom"])
@pytest.mark.parametrize("name", [BART, WHISPER])
def test_errors_of_heads_are_of_one_half_of_one_layer(name: str, attention: str) -> None:
    model, given, texts = family(name), inputs(name), texts_of()
    model.set_attn_implementation(attention)
    stock, row = kvloom.quality(model, texts, [INT8], encoder_inputs=given, chunk=CHUNK)
    assert (stock.head_errors, stock.encoder_head_errors, stock.worst_encoder_head) == ({}, {}, None)
    assert model.config._attn_implementation == attention
    for part, found in (("self_attn", row.head_errors), ("encoder_attn", row.encoder_head_errors)):
        assert found.keys() == {0, 1}
        for layer, heads in found.items():
            rounded = OneLayerRounded()
            rounded.rounded = layer
            cache = theirs(model, rounded) if part == "self_attn" else theirs(model, beside=rounded)
            exact = outputs_of(model, given, texts, theirs(model), layer, part)
            error = (outputs_of(model, given, texts, cache, layer, part) - exact).square().sum((0, 1, 3))
            expected = (error / exact.square().sum((0, 1, 3))).sqrt()
            torch.testing.assert_close(torch.tensor(heads).double(), expected, rtol=1e-3, atol=0.0)
    worst = row.worst_encoder_head
    assert worst is not None
    assert row.encoder_head_errors[worst[0]][worst[1]] == worst[2]


def test_attention_to_both_halves_at_once_has_one_error() -> None:
    name = "T5Gemma2ForConditionalGeneration"
    rows = kvloom.quality(family(name), texts_of(), ["auto", INT4], encoder_inputs=inputs(name), chunk=CHUNK)
    for row in rows[1:]:
        assert (row.head_errors.keys(), row.encoder_head_errors) == ({0, 1}, {})
    assert (
        max(max(x) for x in rows[1].head_errors.values())
        < 1e-6
        < min(min(x) for x in rows[2].head_errors.values())
    )


@pytest.mark.parametrize("options", [{"chunk": CHUNK}, {"after": 3, "decode": True}, {"after": 3}])
def test_what_is_behind_the_end_of_a_text_does_not_count(options: dict[str, Any]) -> None:
    model, given, texts = family(T5), inputs(T5), texts_of()
    ends = [12, 7]
    alone = [
        kvloom.quality(
            model, texts[i : i + 1, :end], [INT4],
            encoder_inputs={name: x[i : i + 1] for name, x in given.items()}, **options,
        )
        for i, end in enumerate(ends)
    ]  # fmt: skip
    texts[1, 7:] = -100
    together = kvloom.quality(model, texts, [INT4], encoder_inputs=given, **options)
    for row, first, second in zip(together, *alone, strict=True):
        counts = (first.num_tokens, second.num_tokens)
        assert row.num_tokens == sum(counts)
        for name in ("mean_kl", "agreed"):
            expected = sum(getattr(x, name) * n for x, n in zip((first, second), counts, strict=True))
            assert getattr(row, name) * row.num_tokens == pytest.approx(expected, rel=1e-3)
        loss = sum(math.log(x.perplexity) * n for x, n in zip((first, second), counts, strict=True))
        assert math.log(row.perplexity) * row.num_tokens == pytest.approx(loss, rel=1e-4)


def test_many_inputs_are_read_a_few_at_a_time() -> None:
    model, texts = family(WHISPER), texts_of(num_texts=9)
    given = {"input_features": torch.rand(9, 80, 200)}
    both = kvloom.quality(model, texts, ["int8:g8"], encoder_inputs=given)[1]
    parts = [
        kvloom.quality(
            model, texts[x], ["int8:g8"], encoder_inputs={"input_features": given["input_features"][x]}
        )[1]
        for x in (slice(0, 8), slice(8, 9))
    ]
    assert both.mean_kl * 99 == pytest.approx(parts[0].mean_kl * 88 + parts[1].mean_kl * 11, rel=1e-3)


def test_padding_of_documents_is_not_read() -> None:
    model, given, texts = family(BART), inputs(BART), texts_of()
    stock, _ = kvloom.quality(model, texts, ["auto"], encoder_inputs=given)
    given["input_ids"][1, 14:] = 7  # behind the mask
    assert kvloom.quality(model, texts, [], encoder_inputs=given)[0].perplexity == pytest.approx(
        stock.perplexity
    )
    whole = kvloom.quality(model, texts, [], encoder_inputs={"input_ids": given["input_ids"]})[0]
    assert whole.perplexity != pytest.approx(stock.perplexity, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "must be what the encoder of BartFor.* reads, as {'input_ids': ...}, got None"),
        ({"attention_mask": torch.ones(2, 5)}, "must be what the encoder of .* got \\['attention_mask'\\]"),
        (torch.ones(2, 5), "must be what the encoder of"),
        ({"input_ids": torch.ones(3, 5)}, "must have a row for each of 2 texts, got input_ids of \\[3, 5\\]"),
        ({"input_ids": [[1, 2]]}, "must have a row for each of 2 texts, got input_ids of \\[\\[1, 2\\]\\]"),
        ({"input_ids": torch.ones(2, 5).long(), "decoder_input_ids": torch.ones(2, 5)},
         "must have names of what BartForConditionalGeneration reads alone, got 'decoder_input_ids'"),
        ({"input_ids": torch.rand(2, 5)}, "must be what .* can read, got {'input_ids': \\[2, 5\\]}"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)  # fmt: skip
def test_inputs_that_are_none_are_named(given: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^encoder_inputs {sentence}"):
        kvloom.quality(family(BART), texts_of(), ["int8:g8"], encoder_inputs=given)


def test_a_decoder_takes_no_encoder_inputs() -> None:
    from oracles.language_models import make_model

    with pytest.raises(ArgumentError, match=r"^encoder_inputs must be None for \w+, which has no encoder"):
        kvloom.quality(make_model(), texts_of(), encoder_inputs=inputs(BART))


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ((0, 3), "ids below 0 at the ends of texts alone, got one before a token"),
        ((slice(None), slice(1, None)), "a text of more than 1 tokens, got none"),
    ],
)
def test_ends_within_texts_are_named(place: Any, sentence: str) -> None:
    texts = texts_of()
    texts[place] = -100
    with pytest.raises(ArgumentError, match=f"^input_ids must have {sentence}"):
        kvloom.quality(family(BART), texts, encoder_inputs=inputs(BART))


def test_a_model_that_reads_one_token_at_a_time_is_measured_so() -> None:
    name = "ProphetNetForConditionalGeneration"
    model, given = family(name), inputs(name)
    with pytest.raises(
        UnsupportedError, match=r"^model must read 4 tokens at once \(chunk, after\), got Prophet"
    ):
        kvloom.quality(model, texts_of(), ["int8:g8"], encoder_inputs=given, chunk=CHUNK)
    assert kvloom.quality(model, texts_of(), ["auto"], encoder_inputs=given, chunk=1)[1].agreed == 1.0
