"""LMCache's own Python reads what is made for it, and finds the formats that are said."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from layouts.test_lmcache import FORMATS, LATENTS, B, D, H, L, S, made

from kvloom.errors import ArgumentError
from kvloom.layouts import LAYOUTS
from kvloom.layouts.lmcache import LMCacheFormat, from_lmcache, to_lmcache

pytestmark = [
    pytest.mark.skipif(find_spec("lmcache") is None, reason="needs lmcache, which `make test-lmcache` gets"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # of its older formats
]

UNKNOWN = {"NL_X_NB_BSV_BSS"}
"""Pages of values and scales in regions of bytes, which are no order of axes."""
DETECTED = {
    "NB_NL_TWO_BS_NH_HS": {},
    "NL_X_TWO_NB_BS_NH_HS": {"kv_layout": "NHD"},
    "NL_X_NB_TWO_BS_NH_HS": {"kv_layout": "NHD"},
    "NL_X_TWO_NB_NH_BS_HS": {"kv_layout": "HND"},
    "NL_X_NB_TWO_NH_BS_HS": {"kv_layout": "HND"},
    "NL_X_NB_NH_BS_CS": {"kv_layout": "HND"},
    "NL_X_NB_BS_NH_CS": {"kv_layout": "NHD"},
    "NL_X_TWO_NB_NH_ONE_BS_HS": {},
    "NL_X_TWO_X_NB_BS_NH_HS": {},
}
"""Formats that it finds by the shapes of vLLM's caches, and the hints that it needs."""
OF_ENGINES = {
    "vllm": "NL_X_TWO_NB_BS_NH_HS",
    "vllm_gpu": "NL_X_NB_BS_NH_CS",
    "vllm_gpu_hnd": "NL_X_NB_NH_BS_CS",
    "flashinfer": "NL_X_NB_TWO_BS_NH_HS",
    "flashinfer_hnd": "NL_X_NB_TWO_NH_BS_HS",
}
"""Named layouts of engines that register with it, and its names of them."""


def formats() -> Any:
    from lmcache.v1.gpu_connector.kv_format.specs.registry import SPECS

    return {fmt.name: fmt for fmt in SPECS}


def test_every_format_is_read_or_refused_by_name() -> None:
    known = {*FORMATS, *LATENTS, "NL_X_NB_BS_NH_HS"}
    assert {*formats()} == known | UNKNOWN
    for name in UNKNOWN:
        with pytest.raises(ArgumentError, match="BSV"):
            LMCacheFormat.of(name)


@pytest.mark.parametrize("name", FORMATS)
def test_its_geometry_is_that_of_the_cache(name: str) -> None:
    from lmcache.v1.gpu_connector.kv_format.specs.base import describe_shape
    from lmcache.v1.gpu_connector.kv_format.specs.registry import get_spec

    fmt = formats()[name]
    source = from_lmcache(made("NL_X_NB_TWO_BS_NH_HS"), "NL_X_NB_TWO_BS_NH_HS")
    cache = to_lmcache(source, name)
    spec = get_spec(cache, fmt)
    assert (spec.num_layers(), spec.num_heads(), spec.tokens_per_layer()) == (L, H, B * S)
    packed = spec.kv_size() == 1  # then a head holds both
    assert spec.head_size() == D * (2 if packed else 1)
    if "NBBS" not in name:
        assert (spec.num_blocks(), spec.block_size()) == (B, S)
    assert all(spec.data_ptrs([*range(L)]))
    parts = [*LMCacheFormat.of(name).lists, *LMCacheFormat.of(name).dims]
    assert len(describe_shape(fmt).replace("x", ",").split(",")) == len(parts)


def test_tokens_of_its_chunks_are_where_the_layout_says() -> None:
    from lmcache.v1.memory_management import MemoryFormat

    assert MemoryFormat.KV_2LTD.token_dim() == LAYOUTS["lmcache"].key.split().index("T")


@pytest.mark.parametrize("layout", OF_ENGINES)
def test_its_formats_of_engines_are_the_named_layouts(layout: str) -> None:
    assert OF_ENGINES[layout] in formats()
    axes = LMCacheFormat.of(OF_ENGINES[layout]).layout.axes
    assert axes.replace("(2 D)", "2 D") == LAYOUTS[layout].key and not LAYOUTS[layout].value


@pytest.mark.parametrize("name", list(DETECTED))
def test_it_detects_what_was_made(name: str) -> None:
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector.kv_format.detection import detect_format

    source = from_lmcache(made("NL_X_NB_TWO_BS_NH_HS"), "NL_X_NB_TWO_BS_NH_HS")
    found, _ = detect_format(to_lmcache(source, name), EngineType.VLLM, DETECTED[name])
    assert found.name == name
