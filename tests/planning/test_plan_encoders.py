"""Plans of encoder-decoders: both halves to the byte, the encoder's once for all beams of an input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_encoder_decoder_families import (
    NAMES,
    TAKE_NONE,
    family,
    inputs,
    joined,
    prepared,
    small,
)
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

import kvloom
from kvloom.cli import main
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT, as_argument
from kvloom.integrations.transformers.versions import IS_4
from kvloom.planning.model import ModelShape
from kvloom.planning.plan import kinds_for

KEEP_EXPERTS_BY_NAME = {"SwitchTransformersForConditionalGeneration"}
if not IS_4:
    KEEP_EXPERTS_BY_NAME.add("NllbMoeForConditionalGeneration")
"""Which a forward without data cannot look up."""
READ_NOTHING = {"Pop2PianoForConditionalGeneration"}
"""Whose features only a ``generate`` of its own gives to its encoder."""
PLANNED = [x for x in NAMES if x not in KEEP_EXPERTS_BY_NAME | TAKE_NONE | READ_NOTHING]
NUM_NEW, PAGE = 6, 4
WHISPER = "WhisperForConditionalGeneration"


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def read(model: Any, cache: Any, num_inputs: int, beams: int, num_read: int, context: int) -> Any:
    """Fill a cache as ``generate`` does, which repeats what the encoder made."""
    width = getattr(model.get_encoder(), "config", model.config).hidden_size
    states = torch.randn(num_inputs, num_read, width).repeat_interleave(beams, 0)
    ids = torch.ones(num_inputs * beams, context, dtype=torch.int64)
    encoded = BaseModelOutput(last_hidden_state=states)
    encoded.attention_mask = None
    model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, **as_argument(model, cache))
    return cache


def generated(model: Any, given: dict[str, Any], kv: str, **way: Any) -> Any:
    """A cache after ``generate`` of two inputs, with as many slots as three sequences of each need."""
    cache = KVCache.for_model(model, kv, page_size=PAGE, max_tokens=2 * 3 * -(-NUM_NEW // PAGE) * PAGE)
    options = {
        "max_new_tokens": NUM_NEW,
        "min_new_tokens": NUM_NEW,
        "do_sample": False,
        "num_beams": 1,
        **way,
    }
    GenerationMixin.generate(model, **given, **options, **{CACHE_ARGUMENT: cache})
    return cache


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_what_generate_leaves_in_a_cache(name: str) -> None:
    model = family(name)
    shape = ModelShape.of(model.config)
    assert shape.weights == sum(x.nbytes for x in [*model.parameters(), *model.buffers()])
    cache = generated(model, inputs(name), "float16", do_sample=True, num_return_sequences=3)
    num_read, context = cache.cross_attention_cache.get_seq_length(), cache.get_seq_length()
    planned = kvloom.plan(
        shape, "float16", context=context, batch=2, page_size=PAGE, encoder_tokens=num_read, beams=3
    )
    assert planned.cache == cache.nbytes
    assert planned.by_kind()["encoder"][1].cache == cache.cross_attention_cache.nbytes > 0


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "T5ForConditionalGeneration"])
def test_beams_take_no_more_than_is_planned(name: str, num_beams: int) -> None:
    """They share pages of their texts, too, once they were chosen."""
    model = family(name)
    cache = generated(model, inputs(name), "int8:g8", num_beams=num_beams)
    num_read, context = cache.cross_attention_cache.get_seq_length(), cache.get_seq_length()
    planned = kvloom.plan(
        model.config, "int8:g8", context=context, batch=2, page_size=PAGE, encoder_tokens=num_read,
        beams=num_beams,
    )  # fmt: skip
    assert planned.by_kind()["encoder"][1].total == cache.cross_attention_cache.nbytes
    assert cache.nbytes <= planned.cache + planned.scales
    assert num_beams > 1 or cache.nbytes == planned.cache + planned.scales


@pytest.mark.parametrize("name", [
    "WhisperForConditionalGeneration", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "MoonshineForConditionalGeneration", "Pix2StructForConditionalGeneration",
])  # fmt: skip
def test_a_plan_is_what_a_cache_allocates(name: str) -> None:
    model = family(name)
    shape = ModelShape.of(model.config)
    for kv in [*kinds_for(shape), "int4:g2,recent=3", "int8:g4,smooth=none"]:
        for num_inputs, beams in ((1, 1), (1, 5), (8, 5)) if kv in ("auto", "int8", "int4") else ((2, 2),):
            for page_size in (1, 16) if kv == "int8" else (4,):
                cache = KVCache.for_model(model, kv, page_size=page_size)
                read(model, cache, num_inputs, beams, 21, 30)
                planned = kvloom.plan(
                    shape, kv, context=30, batch=num_inputs, page_size=page_size, at_once=True,
                    encoder_tokens=21, beams=beams,
                )  # fmt: skip
                assert planned.cache + planned.scales == cache.nbytes
                counts = {kind: count for kind, (count, _) in planned.by_kind().items()}
                assert counts == {"full": 2, "encoder": 2}
    theirs = read(model, EncoderDecoderCache(DynamicCache(), DynamicCache()), 2, 5, 16, 16)
    halves = (theirs.self_attention_cache, theirs.cross_attention_cache)
    own, beside = (sum(x.keys.nbytes + x.values.nbytes for x in half.layers) for half in halves)
    planned = kvloom.plan(shape, context=16, batch=2, beams=5, encoder_tokens=16)
    assert planned.cache == own + beside / 5


def test_a_plan_is_what_a_pool_allocates() -> None:
    model, given = family(WHISPER), inputs(WHISPER)
    pool = KVPool.for_model(model, "int8:g8", page_size=PAGE, max_tokens=16, max_encoder_tokens=200)
    start = torch.ones(2, 1, dtype=torch.int64)
    cache = pool.begin(start, content=pool.content_of(given))
    options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    GenerationMixin.generate(model, **given, decoder_input_ids=start, **options, **{CACHE_ARGUMENT: cache})
    planned = kvloom.plan(
        model.config,
        "int8:g8",
        context=int(cache.get_seq_length()),
        batch=2,
        page_size=PAGE,
        encoder_tokens=100,
    )
    assert planned.cache + planned.scales == cache.nbytes


def test_values_of_another_kind_are_those_of_both_halves() -> None:
    model = family("BartForConditionalGeneration")
    cache = KVCache.for_model(model, "int8:g8", values="int4:g4,recent=0", page_size=PAGE)
    read(model, cache, 2, 3, 10, 9)
    planned = kvloom.plan(
        model.config, "int8:g8", values="int4:g4,recent=0", context=9, batch=2, beams=3, page_size=PAGE,
        encoder_tokens=10,
    )  # fmt: skip
    assert planned.cache + planned.scales == cache.nbytes
    assert planned.waste == cache.nbytes - sum(
        pages.nbytes_per_token * count
        for half, count in ((cache, 6 * 9), (cache.cross_attention_cache, 2 * 10))
        for pages in (layer.pages for layer in half.layers)
    )


def test_windows_are_of_the_decoders_tokens_alone() -> None:
    model = family("T5GemmaForConditionalGeneration")
    window = next(x.window for x in ModelShape.of(model.config).layers if x.window)
    assert window is not None
    model.config.decoder.sliding_window = 8
    for context in (5, 30):
        cache = KVCache.for_model(model, page_size=PAGE)
        read(model, cache, 2, 2, 50, context)
        planned = kvloom.plan(
            model.config, context=context, batch=2, beams=2, page_size=PAGE, encoder_tokens=50, at_once=True
        )
        assert planned.cache == cache.nbytes


def test_an_encoder_may_have_other_sizes_than_its_decoder() -> None:
    """Dia's is wider than its decoder, whose tokens have several channels; of two models each has its own."""
    vision = joined("VisionEncoderDecoderModel").config
    vision.decoder.cross_attention_hidden_size = None
    vision.encoder.hidden_size, vision.encoder.intermediate_size = 48, 40
    model = prepared(transformers.VisionEncoderDecoderModel(vision).eval())
    cache = KVCache.for_model(model, page_size=PAGE)
    read(model, cache, 2, 3, 17, 5)
    planned = kvloom.plan(model.config, context=5, batch=2, beams=3, page_size=PAGE)  # of its only size
    assert (planned.encoder_tokens, planned.cache) == (17, cache.nbytes)
    if not hasattr(transformers, "DiaConfig"):
        return
    config = small(transformers.DiaConfig())
    config.encoder_config.hidden_size = config.decoder_config.cross_hidden_size = 48
    config.decoder_config.cross_head_dim = 16
    dia: Any = transformers.DiaForConditionalGeneration(config).eval()
    cache = KVCache.for_model(dia, page_size=PAGE)
    states = torch.randn(2, 13, 48).repeat_interleave(3, 0)
    ids = torch.ones(6, 7, config.decoder_config.num_channels, dtype=torch.int64)
    dia(encoder_outputs=(states,), decoder_input_ids=ids, use_cache=True, **as_argument(dia, cache))
    planned = kvloom.plan(config, context=7, batch=2, beams=3, page_size=PAGE, encoder_tokens=13)
    assert planned.cache == cache.nbytes
    assert {x.key.head_dim for x in ModelShape.of(config).encoder.values()} == {16}


@pytest.mark.parametrize("name", ["BertLMHeadModel", "BartForCausalLM", "GPT2LMHeadModel"])
def test_what_the_caller_gives_a_decoder_of_an_encoder_is_counted(name: str) -> None:
    form: Any = getattr(transformers, name)
    config = small(form.config_class())
    config.is_encoder_decoder, config.is_decoder, config.add_cross_attention = False, True, True
    if name == "GPT2LMHeadModel":
        config.n_embd, config.n_layer, config.n_head = 32, 2, 4
    model = form(config).eval()
    cache = KVCache.for_model(model, "int4:g8", page_size=PAGE)
    given = {"encoder_hidden_states": torch.randn(2, 13, 32).repeat_interleave(3, 0)}
    ids = torch.ones(6, 9, dtype=torch.int64)
    model(input_ids=ids, **given, use_cache=True, **as_argument(model, cache))
    sizes: dict[str, Any] = {"context": 9, "batch": 2, "beams": 3, "page_size": PAGE, "at_once": True}
    planned = kvloom.plan(config, "int4:g8", encoder_tokens=13, **sizes)
    assert planned.cache + planned.scales == cache.nbytes
    alone = kvloom.plan(config, "int4:g8", **sizes)
    assert alone.encoder_tokens == 0 and alone.by_kind().keys() == {"full"}
    own = planned.by_kind()["full"][1].total
    assert alone.cache + alone.scales == own == cache.nbytes - cache.cross_attention_cache.nbytes


def test_what_fits_counts_inputs_with_their_beams() -> None:
    shape = ModelShape.of(family("WhisperForConditionalGeneration").config)
    sizes: dict[str, Any] = {"encoder_tokens": 100, "beams": 5, "page_size": PAGE}
    memory = kvloom.plan(shape, "int8:g8", context=40, batch=7, **sizes).total
    planned = kvloom.plan(shape, "int8:g8", context=40, batch=2, **sizes)
    assert planned.largest_batch(memory) == 7
    seven = kvloom.plan(shape, "int8:g8", context=3, batch=7, **sizes)
    assert seven.longest_context(memory) == 40


def test_defaults_are_the_most_that_a_configuration_says() -> None:
    whisper = kvloom.plan(transformers.WhisperConfig())
    assert (whisper.context, whisper.encoder_tokens, whisper.beams) == (448, 1500, 1)
    bart = kvloom.plan(transformers.BartConfig(max_position_embeddings=300))
    assert (bart.context, bart.encoder_tokens) == (300, 300)
    led = kvloom.plan(transformers.LEDConfig(encoder_layers=1, decoder_layers=1))
    assert (led.context, led.encoder_tokens) == (1024, 16384)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        ("T5Config", {"context": 9}, "encoder_tokens must be given if the configuration does not say"),
        ("MoonshineConfig", {}, "encoder_tokens must be given if the configuration does not say"),
        ("T5Config", {"encoder_tokens": 9}, "context must be given"),
        ("WhisperConfig", {"encoder_tokens": 0}, "encoder_tokens must be an int of at least 1, got 0"),
        ("WhisperConfig", {"encoder_tokens": True}, "encoder_tokens must be an int of at least 1, got True"),
        ("WhisperConfig", {"beams": 0}, "beams must be an int of at least 1, got 0"),
        ("LlamaConfig", {"encoder_tokens": 9}, "encoder_tokens must be None for a model without an encoder"),
    ],
)
def test_bad_arguments_are_named(config: str, options: dict[str, Any], sentence: str) -> None:
    sizes = {"num_hidden_layers": 1} if config == "LlamaConfig" else {}
    with pytest.raises(ArgumentError, match=f"^{sentence}"):
        kvloom.plan(getattr(transformers, config)(**sizes), **options)


def test_beams_of_a_decoder_are_sequences() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    assert (
        kvloom.plan(config, context=9, batch=2, beams=3).cache
        == kvloom.plan(config, context=9, batch=6).cache
    )


@pytest.mark.parametrize("name", sorted(KEEP_EXPERTS_BY_NAME & {*NAMES}))
def test_models_that_cannot_be_planned_are_named(name: str) -> None:
    config = family(name).config
    with pytest.raises(
        UnsupportedError, match=rf"^config must be of an encoder-decoder .* {type(config).__name__}"
    ):
        kvloom.plan(config, context=9, encoder_tokens=9)


def test_layers_of_pictures_are_refused() -> None:
    from integrations.cache.test_cross_layers import mllama

    with pytest.raises(UnsupportedError, match=r"^config must .*, got keys and values of pictures in Mllama"):
        kvloom.plan(mllama().config, context=9)


def test_the_command_plans_both_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = family("WhisperForConditionalGeneration")
    model.config.save_pretrained(tmp_path)
    asked = ["plan", "--model", str(tmp_path), "--kv", "int8:g8", "--batch", "8", "--beams", "5"]
    asked += ["--context", "200", "--memory", "1GB"]
    planned = kvloom.plan(model.config, "int8:g8", context=200, batch=8, beams=5)
    assert planned.encoder_tokens == 100  # of the configuration
    assert main(asked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 x 5 beams x 200 tokens and 8 x 100 of the encoder in pages of 16" in shown
    of_encoder = planned.by_kind()["encoder"][1]
    assert "2 encoder" in shown and f" {of_encoder.total:,} " in shown and f" {planned.total:,} " in shown
    assert main([*asked, "--encoder-tokens", "50", "--json", "--plot", str(tmp_path / "plan.svg")]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    fewer = kvloom.plan(model.config, "int8:g8", context=200, batch=8, beams=5, encoder_tokens=50)
    assert (found["beams"], found["encoder_tokens"], found["total"]) == (5, 50, fewer.total)
    assert [x["kind"] for x in found["layers"]] == ["full", "full", "encoder", "encoder"]
    assert found["largest_batch"] == fewer.largest_batch(10**9)
    assert main([*asked, "--encoder-tokens", "0"]) == 2
    assert "kvloom: --encoder-tokens must be an int of at least 1, got 0" in capsys.readouterr().err
