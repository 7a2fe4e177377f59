"""Pools of encoder-decoders: what the encoder read finds its keys and values, and prefixes of the decoder."""

import io
import pickle
from typing import Any

import pytest
import torch
from integrations.models.test_encoder_decoder_families import NAMES, TAKE_NONE, family, inputs
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from kvloom.errors import ArgumentError, OutOfPages, StateError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, content_of, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
from kvloom.integrations.transformers.versions import IS_4

OF_EACH_KIND = (
    "T5ForConditionalGeneration", "WhisperForConditionalGeneration", "CanaryForConditionalGeneration",
    "MoonshineForConditionalGeneration", "EncoderDecoderModel", "Pop2PianoForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration", "T5GemmaForConditionalGeneration",
)  # fmt: skip
"""Inputs of tokens, audio and pictures; encoders that return masks; one token; equal rows; experts."""
REFUSED = TAKE_NONE | ({"SwitchTransformersForConditionalGeneration"} if IS_4 else set())
"""The last needs what its own encoder says of its experts, without which it cannot be tried."""
READS_AGAIN = "CohereAsrForConditionalGeneration"
START = torch.tensor([[1], [1]])
LENGTH = 9


def generated(model: Any, given: dict[str, Any], cache: Any = None, **options: Any) -> Tensor:
    """Tokens without Whisper's own ``generate``, which cuts long audio; those of a prompt among them."""
    torch.manual_seed(0)
    count = LENGTH - options.get("decoder_input_ids", START).shape[1]
    counts = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    caches = {} if cache is None else {CACHE_ARGUMENT: cache}
    tokens: Tensor = GenerationMixin.generate(model, **given, **counts, **caches, **options)
    return tokens


def pool_of(model: Any, kv: str = "auto", **options: Any) -> KVPool:
    return KVPool.for_model(model, kv, page_size=4, **{"max_tokens": 512} | options)


def filled(
    name: str = "T5ForConditionalGeneration", **options: Any
) -> tuple[Any, dict[str, Any], KVPool, Tensor]:
    """A model, inputs, a pool that knows them, and the tokens of its answer."""
    model, given = family(name), inputs(name)
    pool = pool_of(model, **options)
    cache = pool.begin(START, content=pool.content_of(given))
    tokens = generated(model, given, cache)
    pool.commit(cache, tokens)
    return model, given, pool, tokens


def found_tokens(pool: KVPool, given: dict[str, Any], ids: Tensor = START, **options: Any) -> int:
    """Number of tokens of an encoder that a cache finds."""
    cache: Any = pool.begin(ids, content=pool.content_of(given), **options)
    return int(cache.cross_attention_cache.get_seq_length())


@pytest.mark.parametrize("name", [x for x in OF_EACH_KIND if x in NAMES and x not in REFUSED])
def test_a_second_decoding_needs_no_encoder(name: str) -> None:
    model, given = family(name), inputs(name)
    expected = generated(model, given)
    beams = generated(model, given, num_beams=3)
    pool = pool_of(model)
    first: Any = pool.begin(START, content=pool.content_of(given))
    assert first.skip_encoder() == {}
    assert torch.equal(generated(model, given, first), expected)
    pool.commit(first)
    for ids, options, answer in (
        (START, {}, expected),
        (expected[:, :6], {}, expected),
        (START, {"num_beams": 3}, beams),
    ):
        cache: Any = pool.begin(ids, content=pool.content_of(given))
        encoder = cache.cross_attention_cache
        assert encoder.get_seq_length() == first.cross_attention_cache.get_seq_length()
        assert cache.get_seq_length() == (4 if len(ids[0]) == 6 else 0)
        skipped = cache.skip_encoder()
        assert skipped["encoder_outputs"][0].shape[0] == 2
        found = generated(model, given, cache, **skipped, **options, decoder_input_ids=ids)
        assert torch.equal(found, answer)
        assert encoder.num_pages_held == first.cross_attention_cache.num_pages_held  # beams hold the same
        pool.commit(cache, found)
        pool.check()
    assert pool.report()["encoders"]["rows_found"] == 6


@pytest.mark.skipif(READS_AGAIN not in NAMES, reason="this version of transformers does not have the family")
def test_a_model_that_reads_its_encoder_in_each_step_runs_it() -> None:
    model, given, pool, tokens = filled(READS_AGAIN)
    cache: Any = pool.begin(START, content=pool.content_of(given))
    assert cache.cross_attention_cache.get_seq_length() > 0
    assert cache.skip_encoder() == {}
    assert torch.equal(generated(model, given, cache), tokens)


@pytest.mark.parametrize(
    ("kv", "attention"),
    [("int8", "sdpa"), ("int8", "kvloom"), ("int4", "kvloom"), ("int4,recent=0", "sdpa")],
)
def test_found_codes_give_the_logits_of_stored_ones(kv: str, attention: str) -> None:
    model, given = family("BartForConditionalGeneration"), inputs("BartForConditionalGeneration")
    model.set_attn_implementation(attention)
    pool = pool_of(model, kv)

    def logits(cache: Any, outputs: Any) -> Tensor:
        ids, own = torch.tensor([[1, 7, 8], [1, 9, 4]]), {CACHE_ARGUMENT: cache, "use_cache": True}
        with torch.no_grad():
            found: Tensor = model(**given, **own, **outputs, decoder_input_ids=ids).logits
        return found

    with torch.no_grad():
        outputs = {"encoder_outputs": model.get_encoder()(**given)}
    expected = logits(KVCache.for_model(model, kv, page_size=4), outputs)
    for skips in (False, True, True):
        cache: Any = pool.begin(START, content=pool.content_of(given))
        assert bool(cache.skip_encoder()) == skips
        assert torch.equal(logits(cache, cache.skip_encoder() or outputs), expected)
        pool.commit(cache)
        own = KVCache.for_model(model, kv, page_size=4)
        logits(own, outputs)
        assert torch.equal(logits(cache, cache.skip_encoder() or outputs), logits(own, outputs))


def test_an_encoder_is_found_by_all_that_it_reads() -> None:
    _, given, pool, _ = filled()
    ids, mask = given["input_ids"], given["attention_mask"]
    others = [
        {"input_ids": ids},
        {"input_ids": ids.roll(1, 1), "attention_mask": mask},
        {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]},
        {"input_ids": ids[:, 1:], "attention_mask": mask[:, 1:]},
        given | {"position_ids": torch.arange(20).expand(2, -1)},
        given | {"inputs_embeds": torch.zeros(2, 20, 32)},
    ]
    assert found_tokens(pool, given) == 20
    assert [found_tokens(pool, x) for x in others] == [0] * len(others)
    assert found_tokens(pool, given, salt="another") == 0
    # Rows are known one by one, and a mask that hides nothing is none.
    row = {"input_ids": ids[:1]}
    assert found_tokens(pool, row, START[:1]) == 20
    swapped = {name: x.flip(0) for name, x in given.items()}
    assert found_tokens(pool, swapped) == 20
    labels = given | {"labels": ids, "decoder_input_ids": ids, "use_cache": True, "output_attentions": True}
    assert found_tokens(pool, labels) == 20


def test_a_prefix_of_the_decoder_is_found_behind_the_same_encoder_alone() -> None:
    _, given, pool, tokens = filled()
    assert pool.begin(tokens, content=pool.content_of(given)).get_seq_length() == 8
    other = given | {"input_ids": given["input_ids"].roll(1, 1)}
    assert pool.begin(tokens, content=pool.content_of(other)).get_seq_length() == 0
    flipped = pool.content_of(given)[::-1]
    assert pool.begin(tokens, content=flipped).get_seq_length() == 0


def test_many_questions_to_one_document() -> None:
    model, given = family("T5ForConditionalGeneration"), inputs("T5ForConditionalGeneration")
    one = {name: x[:1] for name, x in given.items()}
    pool, questions = pool_of(model), torch.tensor([[1, 7, 8, 9], [1, 5, 6, 7]])
    every = {name: x.repeat(2, 1) for name, x in one.items()}
    expected = generated(model, every, decoder_input_ids=questions)
    for skips in (False, True):
        cache: Any = pool.begin(questions, content=pool.content_of(one))
        skipped = cache.skip_encoder()
        assert bool(skipped) == skips
        found = generated(model, every, cache, **skipped, decoder_input_ids=questions)
        assert torch.equal(found, expected)
        assert cache.cross_attention_cache.num_pages_held == 5  # of 20 tokens, once
        pool.commit(cache)


def test_content_must_be_of_the_pool() -> None:
    _, given, pool, _ = filled()
    said = pool.content_of(given)
    for content in (None, "", content_of(given), "a" * 64, said + said[:1], [*said[:1], ""]):
        with pytest.raises(ArgumentError, match=r"content must be pool\.content_of\(inputs\)"):
            pool.begin(START, content=content)
    with pytest.raises(ArgumentError, match="inputs must have one of"):
        pool.content_of({"attention_mask": given["attention_mask"]})
    reads = pool_of(family("Florence2ForConditionalGeneration"))
    ids = torch.tensor([[5, reads._bound().watch.model.config.image_token_id, 7]])
    with pytest.raises(ArgumentError, match="inputs must have what token"):
        reads.content_of({"input_ids": ids})
    assert reads.content_of({"input_ids": ids, "pixel_values": torch.ones(1, 3, 4, 4)})
    with pytest.raises(ArgumentError, match="inputs must be a mapping"):
        pool.content_of([1])  # type: ignore[arg-type]


def test_another_input_than_the_content_is_refused() -> None:
    model, given, pool, _ = filled()
    other = given | {"input_ids": given["input_ids"].roll(1, 1)}
    cache = pool.begin(START, content=pool.content_of(given))
    with pytest.raises(StateError, match="encoder_outputs must be what the cache has"):
        generated(model, other, cache)
    cache = pool.begin(START, content=pool.content_of({"input_ids": given["input_ids"][:, :19]}))
    with pytest.raises(ArgumentError, match="attention_mask must be among the inputs"):
        generated(model, given, cache)
    cache = pool.begin(START, content=pool.content_of(given))
    with pytest.raises(ArgumentError, match="decoder_attention_mask must be left out"):
        model(
            **given,
            **{CACHE_ARGUMENT: cache},
            decoder_input_ids=torch.tensor([[1, 2], [1, 2]]),
            decoder_attention_mask=torch.tensor([[1, 1], [0, 1]]),
        )


def test_outputs_that_were_not_computed_are_never_read() -> None:
    model, given, pool, tokens = filled()
    cache: Any = pool.begin(START, content=pool.content_of(given))
    [outputs] = cache.skip_encoder().values()
    states = outputs.last_hidden_state
    assert (states.shape, states.dtype, states.device) == ((2, 20, 32), torch.float32, torch.device("cpu"))
    for read in (
        lambda: states.sum().item(),
        lambda: states @ torch.ones(32, 2),
        lambda: states[0] + torch.ones(1),
    ):
        with pytest.raises(StateError, match="the encoder did not run"):
            read()
    again: Any = pool.begin(START, content=pool.content_of(given))
    unknown = given | {"input_ids": given["input_ids"].roll(1, 1)}
    empty: Any = pool.begin(START, content=pool.content_of(unknown))
    for other in (KVCache.for_model(model), again, empty):
        with pytest.raises(StateError, match="encoder_outputs must be computed for this cache"):
            generated(model, given, other, encoder_outputs=outputs)
    assert torch.equal(generated(model, given, cache.fork(), encoder_outputs=outputs), tokens)
    cache.reset()
    assert cache.skip_encoder() == {}


def test_a_changed_model_finds_nothing() -> None:
    model, given, pool, _ = filled()
    began = pool.begin(START, content=pool.content_of(given))
    with torch.no_grad():
        model.get_encoder().block[0].layer[0].SelfAttention.q.weight.mul_(2)
    with pytest.raises(StateError, match="the model must be unchanged"):
        generated(model, given, began)
    assert found_tokens(pool, given) == 0


def test_keys_that_nobody_saw_computed_are_not_shared() -> None:
    model, given, pool = family("T5ForConditionalGeneration"), inputs("T5ForConditionalGeneration"), None
    pool = pool_of(model)
    cache: Any = pool.begin(START, content=pool.content_of(given))
    for i in range(len(cache.layers)):
        cache.cross_attention_cache.update(torch.zeros(2, 4, 20, 8), torch.zeros(2, 4, 20, 8), i)
        cache.is_updated[i] = True
    generated(model, given, cache)
    pool.commit(cache)
    assert found_tokens(pool, given) == 0
    found: Any = pool.begin(START, content=pool.content_of(given))
    generated(model, given, found)
    found.cross_attention_cache.layers[0].keys = torch.zeros(2, 4, 20, 8)
    pool.commit(found)
    assert found_tokens(pool, given) == 0


def test_encoders_are_evicted_when_room_is_needed() -> None:
    model, given, pool, tokens = filled(max_encoder_tokens=60)  # 15 pages; two rows take ten
    other = given | {"input_ids": given["input_ids"].roll(1, 1)}
    cache = pool.begin(START, content=pool.content_of(other))
    assert torch.equal(generated(model, other, cache), generated(model, other))
    pool.commit(cache)
    del cache
    assert (found_tokens(pool, given), found_tokens(pool, other)) == (0, 20)
    pool.check()
    again: Any = pool.begin(START, content=pool.content_of(given))
    assert torch.equal(generated(model, given, again, **again.skip_encoder()), tokens)
    third = given | {"input_ids": given["input_ids"].roll(2, 1)}
    with pytest.raises(OutOfPages, match="max_encoder_tokens must be at least 80"):
        generated(model, third, pool.begin(START, content=pool.content_of(third)))
    assert again.cross_attention_cache.get_seq_length() == 20
    pool.check()


def test_a_saved_pool_finds_encoders_again() -> None:
    model, given, pool, tokens = filled(kv="int8,recent=0")
    file = io.BytesIO()
    pickle.dump(pool, file)
    loaded = pickle.loads(file.getvalue()).bind(model)  # noqa: S301 (written above)
    cache: Any = loaded.begin(tokens[:, :6], content=loaded.content_of(given))
    assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (4, 20)
    skipped = cache.skip_encoder()
    assert torch.equal(generated(model, given, cache, **skipped, decoder_input_ids=tokens[:, :6]), tokens)
    other = given | {"input_ids": given["input_ids"].roll(1, 1)}
    with pytest.raises(StateError, match="encoder_outputs must be what the cache has"):
        generated(model, other, loaded.begin(START, content=loaded.content_of(given)))
    loaded.check()


def test_autocast_has_encoders_of_its_own() -> None:
    model, given, pool, _ = filled("BartForConditionalGeneration", kv="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert found_tokens(pool, given) == 0
        expected = generated(model, given)
        for count in (0, 20):
            cache: Any = pool.begin(START, content=pool.content_of(given))
            assert cache.cross_attention_cache.get_seq_length() == count
            assert torch.equal(generated(model, given, cache, **cache.skip_encoder()), expected)
            pool.commit(cache)
    assert found_tokens(pool, given) == 20


def test_all_uses_of_a_cache_of_both_halves() -> None:
    model, given, pool, tokens = filled()
    enable(model)  # another attention, so another state
    cache: Any = pool.begin(START, content=pool.content_of(given))
    assert torch.equal(generated(model, given, cache), tokens)
    pool.commit(cache)
    cache = pool.begin(tokens, content=pool.content_of(given))
    fork = cache.fork()
    fork.batch_select_indices(torch.tensor([1]))
    assert fork.skip_encoder()["encoder_outputs"][0].shape == (1, 20, 32)
    one = {name: x[1:] for name, x in given.items()}
    fork.crop(-4)
    ids = tokens[1:, :5]
    out = generated(
        model,
        one,
        fork,
        **fork.skip_encoder(),
        decoder_input_ids=ids,
        decoder_attention_mask=torch.ones(1, 5),
    )
    assert torch.equal(out, tokens[1:])
    assert cache.get_seq_length() == 8
    loaded = pickle.loads(pickle.dumps(fork))  # noqa: S301 (written above)
    assert torch.equal(loaded.cross_attention_cache.layers[0].keys, fork.cross_attention_cache.layers[0].keys)


def test_what_pools_of_encoder_decoders_refuse() -> None:
    model = family("T5ForConditionalGeneration")
    with pytest.raises(UnsupportedError, match="store must be None for T5ForConditionalGeneration"):
        pool_of(model, store="memory:")
    with pytest.raises(ArgumentError, match="max_encoder_tokens must be at least 1"):
        pool_of(model, max_encoder_tokens=0)
    with pytest.raises(UnsupportedError, match="must take position_ids for rows with padding"):
        pool_of(model).begin(
            torch.tensor([[1, 2]]), content="input_ids " + "0" * 64, attention_mask=torch.tensor([[0, 1]])
        )
    with pytest.raises(UnsupportedError, match="must attend to earlier tokens alone"):
        pool_of(family("FSMTForConditionalGeneration"))


def test_a_direct_forward_finds_what_it_is_given() -> None:
    model, given = family("WhisperForConditionalGeneration"), inputs("WhisperForConditionalGeneration")
    pool, ids = pool_of(model), torch.tensor([[1, 7], [1, 8]])
    outputs = []
    for count in (0, 100):
        cache: Any = pool.begin(ids, content=pool.content_of(given))
        assert cache.cross_attention_cache.get_seq_length() == count
        assert cache.skip_encoder() == {}  # nobody saw what the encoder returned
        with torch.no_grad():
            outputs.append(model(**given, **{CACHE_ARGUMENT: cache}, decoder_input_ids=ids).logits)
        pool.commit(cache)
    assert torch.equal(*outputs)
    cache = pool.begin(ids, content=pool.content_of(given))
    with pytest.raises(ArgumentError, match="input_features must be among the inputs of"):
        model(input_features=given["input_features"] + 1, **{CACHE_ARGUMENT: cache}, decoder_input_ids=ids)
    states = BaseModelOutput(last_hidden_state=model.get_encoder()(**given)[0].detach())
    with torch.no_grad():
        again = model(encoder_outputs=states, **{CACHE_ARGUMENT: cache}, decoder_input_ids=ids).logits
    assert torch.equal(again, outputs[0])


def test_tokens_that_were_found_are_fed_once() -> None:
    model, given = family("BartForConditionalGeneration"), inputs("BartForConditionalGeneration")
    one, ids = {name: x[:1] for name, x in given.items()}, torch.tensor([[1, 5, 6, 7, 8, 9]])
    helper, pool = family("BartForConditionalGeneration"), pool_of(model)
    expected = generated(model, one, decoder_input_ids=ids)
    for found in (0, 4, 4):  # what the assistant drafts follows all tokens that were asked for
        cache: Any = pool.begin(ids, content=pool.content_of(one))
        assert cache.get_seq_length() == found
        skipped = cache.skip_encoder()
        answer = generated(model, one, cache, **skipped, decoder_input_ids=ids, assistant_model=helper)
        assert torch.equal(answer, expected)
        pool.commit(cache)

    def begun() -> Any:
        return pool.begin(ids, content=pool.content_of(one))

    with torch.no_grad():
        whole = model(**one, decoder_input_ids=torch.cat([ids, ids], 1)).logits
        for first in (4, 0):
            own = {CACHE_ARGUMENT: begun(), "decoder_input_ids": torch.cat([ids, ids], 1)[:, first:]}
            torch.testing.assert_close(model(**one, **own).logits, whole[:, 4:], rtol=1e-4, atol=1e-4)
        for others in (ids[:, :5], ids[:, :1], ids + 1, ids[:, 3:]):
            with pytest.raises(ArgumentError, match="decoder_input_ids must be all tokens with which the"):
                model(**one, **{CACHE_ARGUMENT: begun()}, decoder_input_ids=others)
        for labels in (None, ids):
            with pytest.raises(ArgumentError, match="decoder_input_ids must be given with a cache of a pool"):
                model(**one, **{CACHE_ARGUMENT: begun()}, labels=labels)
        cache, two = begun(), {name: x.repeat(2, 1) for name, x in one.items()}
        cache.batch_repeat_interleave(2)  # tokens that a reordered cache is given later are new ones
        for part in (ids[:, 4:], ids):
            model(**two, **{CACHE_ARGUMENT: cache}, decoder_input_ids=part.repeat(2, 1))
            cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.get_seq_length() == 12


@pytest.mark.parametrize("change", ["weights", "weights after begin", "autocast", "training mode", "cast"])
def test_outputs_of_an_encoder_in_another_state_are_not_shared(change: str) -> None:
    model, given = family("BartForConditionalGeneration"), inputs("BartForConditionalGeneration")
    pool, encoder = pool_of(model), model.get_encoder()

    def begun() -> Any:
        return pool.begin(START, content=pool.content_of(given))

    cache = begun()
    encoder.train(change == "training mode")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        outputs = encoder(**given)
        outputs.last_hidden_state = outputs.last_hidden_state.float()
        if change == "cast":
            outputs.last_hidden_state = outputs.last_hidden_state.bfloat16().float()
    encoder.eval()
    if "weights" in change:
        with torch.no_grad():
            encoder.layers[0].fc1.weight.mul_(2)
    if change == "weights":
        cache = begun()
    pool.commit(cache, generated(model, given, cache, encoder_outputs=outputs))
    assert found_tokens(pool, given) == 0
    with torch.no_grad():
        outputs = encoder(**given)
    cache = begun()
    assert torch.equal(generated(model, given, cache, encoder_outputs=outputs), generated(model, given))
    pool.commit(cache)
    assert found_tokens(pool, given) == 20


@pytest.mark.parametrize("is_known", [True, False])
def test_a_forward_reads_the_content_of_its_cache(is_known: bool) -> None:
    model, given, pool, _ = filled("BartForConditionalGeneration")
    own = {name: x[1:] for name, x in given.items()}  # its mask hides padding
    if not is_known:
        own["input_ids"] = own["input_ids"].roll(2, 1)
    other_ids, no_mask = own["input_ids"].roll(1, 1), torch.ones(1, 20, dtype=torch.int64)
    with torch.no_grad():
        outputs = {"encoder_outputs": model.get_encoder()(**own), "input_ids": None}
        unmasked = {"encoder_outputs": model.get_encoder()(own["input_ids"]), "input_ids": None}
        others = {"encoder_outputs": model.get_encoder()(other_ids, own["attention_mask"])}
    reads: list[dict[str, Any]] = [
        {"input_ids": other_ids}, {"attention_mask": None}, {"attention_mask": no_mask},
        {"attention_mask": own["attention_mask"].roll(1, 1)}, outputs | {"attention_mask": no_mask},
        unmasked, others | {"input_ids": None},
    ]  # fmt: skip
    for read in [*reads, {}, outputs, {"attention_mask": own["attention_mask"].bool()}]:
        cache: Any = pool.begin(START[:1], content=pool.content_of(own))
        assert bool(cache.skip_encoder()) == is_known
        forward = {**own, **read, CACHE_ARGUMENT: cache, "decoder_input_ids": START[:1]}
        if any(read is x for x in reads):
            with pytest.raises((ArgumentError, StateError), match=r"must be (among|what the cache has)"):
                model(**forward)
            with pytest.raises(ArgumentError, match="attention_mask must be among"):
                model(**forward | outputs | {"attention_mask": no_mask} | cache.skip_encoder())
        else:
            model(**forward)
        assert cache.get_seq_length() == (0 if any(read is x for x in reads) else 1)
    pool.check()


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("M2M100ForConditionalGeneration", True),  # counts positions without it
        ("T5GemmaForConditionalGeneration", True),  # hides it
        ("BartForConditionalGeneration", False),
    ],
)
def test_padding_in_a_prompt_is_read_as_without_a_pool(name: str, reads: bool) -> None:
    model, given, padded = family(name), inputs(name), torch.tensor([[1, 0, 7, 8, 9, 5], [1, 5, 0, 6, 8, 9]])
    pool = pool_of(model)
    with torch.no_grad():
        expected = model(**given, decoder_input_ids=padded).logits[:, -1]
        for found in (0, 0 if reads else 4):
            cache: Any = pool.begin(padded, content=pool.content_of(given))
            assert cache.get_seq_length() == found
            logits = model(**given, **{CACHE_ARGUMENT: cache}, decoder_input_ids=padded).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
            pool.commit(cache)
    assert found_tokens(pool, given, padded) == (0 if reads else 20)
    assert cache.get_seq_length() == 6
