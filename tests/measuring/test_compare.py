"""Kinds of caches beside transformers' own: tokens, logits, bytes, and which attention reads them."""

import pytest
import torch
from oracles.language_models import make_model, make_prompts

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.models.cache_argument import given_cache
from kvloom.measuring.compare import compare


@pytest.mark.parametrize(
    ("kv", "limit"), [("float16", 1e-5), ("bfloat16", 1e-3), ("int8", 1e-2), ("int4,recent=0", 3)]
)
def test_smaller_kinds_stay_near_the_stock_logits(kv: str, limit: float) -> None:
    torch.manual_seed(0)
    rows = compare(make_model(), make_prompts([20])["input_ids"], [kv], max_new_tokens=12, num_runs=1)
    assert [row.kind for row in rows] == ["DynamicCache", kv]
    assert rows[0].mean_kl == 0
    assert rows[0].num_same == rows[0].num_tokens
    assert 0 < rows[1].mean_kl < limit
    assert rows[1].nbytes_per_token < rows[0].nbytes_per_token


def test_in_place_only_a_kvcache_meets_the_attention_that_reads_it_so() -> None:
    model, seen = make_model("sdpa"), set()

    def see(model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.add((type(given_cache(kwargs)).__name__, model.config._attn_implementation))

    model.register_forward_pre_hook(see, with_kwargs=True)
    ids = make_prompts([20])["input_ids"]
    for in_place, attention in ((True, "kvloom"), (False, "sdpa")):
        rows = compare(model, ids, ["float32"], max_new_tokens=4, num_runs=1, in_place=in_place)
        assert rows[1].num_same == rows[1].num_agreed == rows[1].num_tokens == 4
        found = {x for x in seen if x[0] != "NoneType"}
        assert found == {("DynamicCache", "sdpa"), ("KVCache", attention)}
        assert model.config._attn_implementation == "sdpa"
        seen.clear()


def test_what_is_compared_fits_the_model() -> None:
    model = make_model()
    model.config.max_position_embeddings = 10
    ids = torch.ones(1, 6, dtype=torch.int64)
    assert compare(model, ids, ["int8"], max_new_tokens=4, num_runs=1)[1].num_tokens <= 4
    with pytest.raises(ArgumentError, match=r"^input_ids and max_new_tokens must be at most 10 tokens"):
        compare(model, ids, ["int8"], max_new_tokens=5, num_runs=1)


def test_a_model_with_an_encoder_is_refused() -> None:
    """What it generates does not continue what it is given."""
    from integrations.models.test_encoder_decoder_families import family

    name = "BartForConditionalGeneration"
    with pytest.raises(UnsupportedError, match=f"^model must be without an encoder, got {name}"):
        compare(family(name), torch.ones(1, 4, dtype=torch.int64), ["int8:g8"], max_new_tokens=2, num_runs=1)
