"""A cache is found under the name ``cache``, which models have for it since transformers 5.24."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.language_models import make_model, make_prompts
from transformers import DynamicCache

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers import KVCache, KVPool, content_of, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT, argument_of, as_argument

NAMES = pytest.mark.parametrize("name", ["cache", "past_key_values"])


@pytest.fixture(autouse=True)
def has_the_name(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["name"] == "cache" != CACHE_ARGUMENT:
        pytest.skip("models take `cache` since transformers 5.24")


@NAMES
def test_an_enabled_model_uses_the_cache_that_it_is_given(name: str) -> None:
    model, inputs = make_model(), make_prompts([9])
    enable(model)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    for theirs in (DynamicCache(), KVCache.for_model(model)):
        assert model(**inputs, **{name: theirs})[CACHE_ARGUMENT] is theirs
    for theirs in (DynamicCache(), KVCache.for_model(model)):
        assert model.generate(**inputs, **options, **{name: theirs})[CACHE_ARGUMENT] is theirs
    ours = [model(**inputs, **{name: None}), model.generate(**inputs, **options, **{name: None})]
    assert [type(x[CACHE_ARGUMENT]) for x in ours] == [KVCache] * 2


@NAMES
def test_a_pool_looks_at_the_forwards_of_its_caches(name: str) -> None:
    model, tokens = make_model(), make_prompts([9])["input_ids"]
    pool = KVPool.for_model(model, page_size=4, max_tokens=200)
    embeddings = model.get_input_embeddings()(tokens)
    with pytest.raises(ArgumentError, match=r"^inputs_embeds"):
        model(inputs_embeds=embeddings, **{name: pool.begin(tokens)})
    with pytest.raises(ArgumentError, match=r"^position_ids"):
        model(tokens, position_ids=torch.arange(3, 12)[None], **{name: pool.begin(tokens)})
    cache = pool.begin(tokens)
    with torch.no_grad():
        model(tokens, **{name: cache})
    pool.commit(cache, tokens)
    assert pool.begin(tokens).get_seq_length() == 8


@NAMES
def test_a_cache_is_no_content(name: str) -> None:
    assert content_of({"input_ids": torch.ones(1, 3), name: DynamicCache()}) == ""


@NAMES
def test_custom_code_may_have_the_name_of_older_versions(name: str) -> None:
    def forward(input_ids: Any, past_key_values: Any = None) -> None:
        """Of a model of custom code."""

    model = make_model()
    assert argument_of(model) == CACHE_ARGUMENT
    model.forward = forward
    assert as_argument(model, 1) == {"past_key_values": 1}
