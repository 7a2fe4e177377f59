"""Pages are found by the inputs of forwards that decide keys and values, and unseen forwards publish none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from integrations.pool.test_page_identity import TEXT, pool_of
from integrations.pool.test_pool import ask, generate, text
from oracles.changes import ScaledLlama, peft_model
from oracles.language_models import kosmos, make_model
from oracles.stateful_models import stateful_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import KVCache, KVPool, content_of, continuous_batching
from kvloom.integrations.transformers.models.layer_specs import StatefulLayer
from kvloom.integrations.transformers.versions import IS_4

BESIDE: dict[str, Any] = {
    "is_causal": lambda model: {"is_causal": False},
    "cache_position": lambda model: {"cache_position": torch.arange(5, 27)},
    "inputs_embeds": lambda model: {"input_ids": None, "inputs_embeds": torch.randn(1, 22, 64)},
    "position_ids": lambda model: {"position_ids": torch.arange(5, 27)[None]},
    "attention_mask": lambda model: {"attention_mask": (torch.arange(22) > 3).long()[None]},
}


def masks(model: Any) -> Any:
    """A mask for each kind of layers, as some models take them, that hides a token."""
    mask = torch.ones(22, 22).tril().bool()
    mask[5:, 3] = False
    return {"attention_mask": {"full_attention": mask[None, None]}}


def test_masks_by_kinds_of_layers_are_refused_without_content() -> None:
    model = make_model()
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^attention_mask must be left out"):
        model(TEXT, past_key_values=pool_of(model).begin(TEXT), **masks(model))


def test_options_of_what_a_forward_returns_are_no_content() -> None:
    model = make_model("eager")
    pool = pool_of(model)
    options: dict[str, Any] = {"use_cache": True, "output_attentions": True, "output_hidden_states": True}
    for found in (0, 20):
        cache = pool.begin(TEXT)
        assert cache.get_seq_length() == found
        with torch.no_grad():
            model(TEXT[:, found:], past_key_values=cache, is_causal=True, logits_to_keep=1, **options)
        pool.commit(cache, TEXT)


@pytest.mark.parametrize(
    "nothing", [None, {}, [], (), {"image": None}, {"image": {}, "video": []}, [None], torch.zeros(0, 3, 8)]
)
def test_an_empty_input_is_none(nothing: Any) -> None:
    """As what ``generate`` of transformers 5.24 gives models that see for a text without pictures."""
    assert content_of({"input_ids": TEXT, "mm_encoder_outputs": nothing}) == ""
    assert content_of({"x": TEXT, "mm_encoder_outputs": nothing}) == content_of({"x": TEXT})
    text = TEXT % 99
    names = [] if StatefulLayer is type(None) else ["qwen3_next"]  # this version keeps no such states
    for model in (make_model(), *map(stateful_model, names)):
        pool = KVPool.for_model(model, page_size=4, max_tokens=400, state_interval=4)
        for found in (0, 20):
            cache = pool.begin(text)
            assert cache.get_seq_length() == found
            with torch.no_grad():
                model(text[:, found:], past_key_values=cache, mm_encoder_outputs=nothing)
            pool.commit(cache, text)


@pytest.mark.parametrize("something", [{"image": torch.ones(1)}, [0], {"image": {"x": 1}}, "", 0, [False]])
def test_an_input_that_is_not_empty_is_content(something: Any) -> None:
    assert content_of({"mm_encoder_outputs": something}) != ""
    model = make_model()
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^mm_encoder_outputs must be left out"):
        model(TEXT, past_key_values=pool_of(model).begin(TEXT), mm_encoder_outputs=something)


def test_adapters_of_each_row_are_content() -> None:
    model = peft_model()
    torch.manual_seed(2)
    with warnings.catch_warnings():  # peft warns of a second adapter
        warnings.simplefilter("ignore")
        model.add_adapter("other", model.peft_config["default"])
    model.eval()
    pool = pool_of(model)
    names: dict[str, Any] = {"adapter_names": ["other"]}
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^adapter_names must be left out"):
        model(TEXT, past_key_values=pool.begin(TEXT), **names)


def test_a_model_that_changes_within_its_own_forward_publishes_nothing() -> None:
    original = make_model()
    model = ScaledLlama(original.config).eval()
    model.load_state_dict(original.state_dict())
    pool = pool_of(model)
    for model.factor in (1.0, 0.5):
        cache = pool.begin(TEXT)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            model(TEXT, past_key_values=cache)
        pool.commit(cache, TEXT)


def test_another_precision_of_products_finds_nothing_of_before() -> None:
    model = make_model()
    pool = pool_of(model)
    ask(pool, model, TEXT)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert pool.begin(TEXT).get_seq_length() == 0
    finally:
        torch.set_float32_matmul_precision(before)
    assert pool.begin(TEXT).get_seq_length() == 20


def test_a_cache_of_another_model_is_refused_or_not_published() -> None:
    model, other = make_model(), make_model()
    pool = pool_of(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(2)
        cache = pool.begin(TEXT)
        other(TEXT, past_key_values=cache)  # its inputs are seen by no pool
    pool.commit(cache, TEXT)
    assert pool.begin(TEXT).get_seq_length() == 0
    pool_of(other)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"^cache must be of a pool of this"),
    ):
        other(TEXT, past_key_values=pool.begin(TEXT))


@pytest.mark.compile
def test_a_compiled_model_publishes_nothing_that_no_pool_has_seen() -> None:
    model = make_model(num_layers=1)
    pool = pool_of(model)
    model.compile(backend="eager")
    for inputs in ({}, {"position_ids": torch.arange(5, 27)[None]}):
        cache = pool.begin(TEXT)
        with torch.no_grad():
            model(TEXT, past_key_values=cache, **inputs)
        pool.commit(cache, TEXT)
        assert pool.begin(TEXT).get_seq_length() == 0


def test_a_model_that_became_one_of_later_tokens_is_refused() -> None:
    model = make_model()
    pool = pool_of(model)
    model.config.is_causal = False
    with pytest.raises(UnsupportedError, match=r"^model must attend to earlier tokens alone"):
        pool.begin(TEXT)
    with pytest.raises(UnsupportedError, match=r"^model must attend to earlier tokens alone"):
        pool_of(model)


@pytest.mark.parametrize("name", list(BESIDE))
def test_inputs_beside_tokens_are_refused_without_content(name: str) -> None:
    model = make_model()
    pool = pool_of(model)
    for _ in range(2):
        cache = pool.begin(TEXT)
        inputs = {"input_ids": TEXT, "past_key_values": cache} | BESIDE[name](model)
        with torch.no_grad(), pytest.raises(ArgumentError, match=f"^{name} must be left out"):
            model(**inputs)
        assert cache.get_seq_length() == 0
    cache = pool.begin(TEXT, content="a digest")
    inputs = {"input_ids": TEXT, "past_key_values": cache} | BESIDE[name](model)
    with torch.no_grad():
        model(**inputs)
    pool.commit(cache, TEXT)
    found = [pool.begin(TEXT, content=x).get_seq_length() for x in (None, "other", "a digest")]
    assert found == [0, 0, 20]


def test_default_positions_and_masks_that_hide_nothing_are_no_content() -> None:
    model = make_model()
    pool = pool_of(model)
    ask(pool, model, TEXT)
    cache = pool.begin(TEXT)
    with torch.no_grad():
        model(
            TEXT[:, 20:],
            attention_mask=torch.ones_like(TEXT),
            position_ids=torch.arange(20, 22)[None],
            past_key_values=cache,
        )
    assert cache.get_seq_length() == 22


SIZES = {"vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.25}  # fmt: skip


def phi3() -> Any:
    """A Phi-3 whose texts of more than 32 tokens have other frequencies."""
    torch.manual_seed(0)
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    config = Phi3Config(
        **SIZES,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_scaling=rope,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config).eval()


def dynamic() -> Any:
    """A Llama whose frequencies depend on the length of each text beyond 32 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES,
        max_position_embeddings=32,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("make", [phi3, dynamic])
def test_texts_share_within_one_set_of_frequencies(make: Any) -> None:
    model = make()
    pool = pool_of(model)
    long, longer = text(60), torch.cat((text(60), text(9, 1)), dim=1)
    with torch.no_grad():
        for tokens in (long, long[:, :24], longer, long[:, :25], longer):
            expected = make()(tokens).logits[:, -1]  # of a model that read no longer text before
            cache = pool.begin(tokens)
            found = int(cache.get_seq_length())
            logits = model(tokens[:, found:], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            pool.commit(cache, tokens)
    assert pool.begin(long[:, :25]).get_seq_length() == 24
    assert pool.begin(longer).get_seq_length() == (68 if make is phi3 else 0)


@pytest.mark.parametrize("make", [phi3, dynamic])
def test_rows_share_within_the_frequencies_of_their_batch(make: Any) -> None:
    """The longest row decides for all of them, padding apart."""
    model, ids = make(), torch.cat((text(60), text(60, 1)))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    pool = pool_of(model)
    for tokens, shown, is_shared in ((ids, mask, make is phi3), (ids[:, 29:], mask[:, 29:], True)):
        position = (shown.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = make()(tokens, attention_mask=shown, position_ids=position).logits
            for is_known in (False, True):
                cache = pool.begin(tokens, attention_mask=shown)
                columns = slice(int(cache.get_seq_length()), None)
                assert (columns.start > 0) == (is_known and is_shared)
                logits = model(
                    tokens[:, columns],
                    attention_mask=shown,
                    position_ids=position[:, columns],
                    past_key_values=cache,
                ).logits
                for own, want, row in zip(logits, expected[:, columns], shown[:, columns], strict=True):
                    torch.testing.assert_close(own[row > 0], want[row > 0], rtol=1e-4, atol=1e-4)
                pool.commit(cache, tokens)
    assert pool.begin(ids[1:, 40:]).get_seq_length() == 16


def test_a_model_that_counts_positions_otherwise_finds_those_of_generate() -> None:
    """RoBERTa's position of the first token is behind the number of the padding token, unless it is given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = RobertaForCausalLM(RobertaConfig(vocab_size=99, is_decoder=True, **sizes)).eval()
    pool, ids = KVPool.for_model(model, page_size=4, max_tokens=400), TEXT % 90 + 5
    cache = pool.begin(ids)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"^position_ids must be given, as generate does"),
    ):
        model(ids, past_key_values=cache)
    for found in (0, 20):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        pool.commit(cache, model.generate(ids, past_key_values=cache, max_new_tokens=2, pad_token_id=1))


@pytest.mark.skipif(IS_4, reason="version 4 has no Kosmos-2.5, or gives it positions")
def test_positions_that_generate_leaves_out_are_refused() -> None:
    model = kosmos()
    pool, ids = KVPool.for_model(model, page_size=4, max_tokens=400), TEXT % 90 + 5
    cache = pool.begin(ids)
    positions = torch.arange(22)[None]
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^position_ids must be left out, as generate"):
        model(ids, position_ids=positions, past_key_values=cache)
    for found in (0, 20):
        cache = pool.begin(ids)
        assert cache.get_seq_length() == found
        pool.commit(cache, model.generate(ids, past_key_values=cache, max_new_tokens=2, pad_token_id=1))


@pytest.mark.parametrize("make", [phi3, dynamic])
def test_why_a_text_that_grew_longer_is_not_shared_is_said(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    pool, grown = pool_of(model), text(60)
    limit = 32 if make is phi3 else 31
    cache = pool.begin(grown[:, :30])
    with torch.no_grad():
        model(grown[:, :30], past_key_values=cache)
        model(grown[:, 30:], past_key_values=cache)
    pool.commit(cache, grown)
    assert pool.begin(grown).get_seq_length() == 0
    assert f"more than {limit} tokens" in caplog.text
    assert "RoPE frequencies" in caplog.text


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # version 4, of weights on the meta device
def test_a_model_whose_weights_are_loaded_for_each_forward_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate comes with peft")
    model = make_model()
    pool = pool_of(model)
    ask(pool, model, TEXT)
    accelerate.cpu_offload(model, execution_device="cpu")
    doors: list[Any] = [lambda: pool.begin(TEXT), lambda: pool_of(model)]
    if not IS_4:
        doors.append(lambda: continuous_batching(model))
    for door in doors:
        with pytest.raises(
            UnsupportedError, match=r"^model must keep its weights between forwards, .*cpu_off"
        ):
            door()
    for kv in ("auto", "int8"):
        assert generate(model, TEXT, KVCache.for_model(model, kv), 4).shape[1] == 26
