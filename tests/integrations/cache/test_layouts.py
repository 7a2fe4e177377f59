"""In which axis order a ``KVCache`` keeps its pages, and that its tokens do not depend on it."""

from __future__ import annotations

import pytest
from oracles.language_models import generate, make_model, make_prompts

from kvloom import ops
from kvloom.caches.format import PAGE_LAYOUTS
from kvloom.core.layouts import NATIVE_KEYS, NATIVE_VALUES
from kvloom.errors import ConfigError
from kvloom.integrations.transformers import KVCache


def axes_of(cache: KVCache) -> tuple[str, ...]:
    """Axes of the keys and the values of the first layer."""
    storage = cache.layers[0].pages.storage
    assert storage is not None
    return tuple(spec.axes.axes for spec in storage.specs)


@pytest.mark.parametrize("kv", ["float32", "int8:g16"])
def test_tokens_that_are_gathered_lie_in_rows(kv: str) -> None:
    model = make_model("sdpa")
    cache = KVCache.for_model(model, kv=kv)
    generate(model, make_prompts([20, 5]), cache)
    assert axes_of(cache) == ("B H S D", "B H S D")


def test_the_attention_of_the_first_tokens_chooses_the_layout() -> None:
    model = make_model("sdpa")
    cache = KVCache.for_model(model, kv="int8:g16")
    model.set_attn_implementation("kvloom")
    generate(model, make_prompts([20, 5]), cache)
    in_place = KVCache.for_model(model, kv="int8:g16")
    generate(model, make_prompts([20, 5]), in_place)
    assert axes_of(cache) == axes_of(in_place)


@pytest.mark.skipif(ops.cpu_kernels() is None, reason="without kernels every page is kept by rows")
@pytest.mark.parametrize(
    ("kv", "axes"), [("float32", ("B H S D",) * 2), ("int8:g16", (NATIVE_KEYS.axes, NATIVE_VALUES.axes))]
)
def test_pages_that_are_read_in_place_are_as_the_kernels_like_them(kv: str, axes: tuple[str, str]) -> None:
    model = make_model("kvloom")
    cache = KVCache.for_model(model, kv=kv)
    generate(model, make_prompts([20, 5]), cache)
    assert axes_of(cache) == axes


@pytest.mark.parametrize("implementation", ["sdpa", "kvloom"])
def test_every_layout_gives_the_same_tokens(implementation: str) -> None:
    model = make_model(implementation)
    found = []
    for layout in PAGE_LAYOUTS:
        cache = KVCache.for_model(model, kv="int8:g16", layout=layout)
        found.append(generate(model, make_prompts([20, 5]), cache).sequences)
    assert all(x.equal(found[0]) for x in found)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="layout must be one of"):
        KVCache.for_model(make_model(), layout="columns")
