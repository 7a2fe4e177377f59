"""Which layer's keys a layer reads that keeps none, by either word of a configuration."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
from integrations.models.test_families import FAMILIES, family
from oracles.batching import alone, batched, random_requests

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.layer_specs import sources_of
from kvloom.integrations.transformers.session.requests.groups import token_layers_of

KINDS = ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_the_last_own_layer_of_the_same_kind(name: str) -> None:
    config = deepcopy(family(name).config)
    assert sources_of(config) == {3: 1}
    config.num_kv_shared_layers = 2
    assert sources_of(config) == {2: 0, 3: 1}
    assert sources_of(family("Llama").config) == {}


@pytest.mark.skipif("MiMo-V2" not in FAMILIES, reason="this version of transformers has no such model")
def test_layers_have_the_heads_that_the_model_gives_them() -> None:
    """Its configuration says other numbers than its layers with windows have, and than its values."""
    model = family("MiMo-V2")
    requests = random_requests(6, seed=3)
    expected = [alone(model, request, 8) for request in requests]
    assert batched(model, requests, 8) == expected
    sizes = {
        (x.entry.heads, x.entry.key.head_dim, x.entry.value.head_dim) for x in token_layers_of(model).values()
    }
    assert sizes == {(2, 16, 8), (4, 16, 8)}


def test_modes_and_their_number_say_the_same() -> None:
    number = SimpleNamespace(num_hidden_layers=6, num_kv_shared_layers=3, layer_types=KINDS)
    modes = SimpleNamespace(kv_sharing_modes=[None, "store", "store", *["reuse"] * 3], layer_types=KINDS)
    assert sources_of(number) == sources_of(modes) == {3: 1, 4: 2, 5: 1}


def test_a_model_that_reads_the_keys_of_another_is_refused() -> None:
    config = deepcopy(family("Gemma4").config)
    config.num_kv_shared_layers = config.num_hidden_layers
    # The configuration of transformers 5.23 refuses it itself.
    with pytest.raises(
        (UnsupportedError, ValueError), match=r"got layer 0, which has none|different than the set"
    ):
        sources_of(config)
