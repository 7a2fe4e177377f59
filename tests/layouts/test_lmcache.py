"""LMCache's layouts: each one to each other, the elements where its name says, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvloom import KVTensors
from kvloom.errors import ArgumentError, ShapeError
from kvloom.layouts.lmcache import LMCacheFormat, from_lmcache, to_lmcache

L, B, S, H, D = 3, 4, 2, 2, 6
FORMATS = [
    "NB_NL_TWO_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_TWO_BS_NH_HS",
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_TWO_NB_NH_BS_HS",
    "NL_X_NB_TWO_NH_BS_HS",
    "NB_NL_TWO_NH_BS_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "NL_X_NB_NH_BS_TWO_HS",
    "NL_X_NB_BS_NH_TWO_HS",
    "NL_X_NB_NH_BS_CS",
    "NL_X_NB_BS_NH_CS",
    "NL_X_TWO_NB_NH_ONE_BS_HS",
    "NL_X_TWO_X_NB_BS_NH_HS",
]
"""Of keys and values."""
LATENTS = ["NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS", "NL_X_NP_X_NB_BS_ONE_HS"]
"""Of one plane."""
LOGICAL = torch.arange(L * 2 * B * S * H * D, dtype=torch.float32).reshape(L, 2, B, S, H, D)
WORDS = {
    "NL": "l",
    "TWO": "k",
    "NB": "b",
    "BS": "s",
    "NH": "h",
    "HS": "d",
    "NBBS": "bs",
    "CS": "kd",
    "ONE": "",
}


def tensor_of(logical: Tensor, letters: str, words: list[str]) -> Tensor:
    """``logical``, whose dimensions are ``letters``, in the order of words; two letters are one dimension."""
    order = "".join(WORDS[word] for word in words)
    x = torch.einsum(f"{letters}->{order}", logical)
    sizes = dict(zip(letters, logical.shape, strict=True))
    shape = []
    for word in words:
        extent = 1
        for letter in WORDS[word]:
            extent *= sizes[letter]
        shape.append(extent)
    return x.reshape(shape)


def made(name: str, logical: Tensor = LOGICAL, letters: str = "lkbshd") -> Any:
    """A cache in a format of LMCache, by the words of its name alone."""
    *lists, words = (part.split("_") for part in name.split("_X_"))

    def nested(outer: list[str], x: Tensor, left: str) -> Any:
        if not outer:
            return tensor_of(x, left, words)
        at = left.index(WORDS[outer[0]])
        return [nested(outer[1:], y, left.replace(WORDS[outer[0]], "")) for y in x.unbind(at)]

    return nested([word for part in lists for word in part], logical, letters)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other) and other.is_contiguous()
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_its_name_says(name: str) -> None:
    cache = made(name)
    read = from_lmcache(cache, name)
    assert len(read.views) == L and read.heads == H
    for layer, [view] in enumerate(read.views):
        for i, side in enumerate(view.sides):
            found = side.cache.reshape(B * S, H, D) if "NBBS" not in name else side.cache.reshape(-1, H, D)
            assert torch.equal(found, LOGICAL[layer, i].reshape(B * S, H, D))
    read.views[0][0].key.cache.zero_()  # memory is shared
    first = cache
    while not isinstance(first, Tensor):
        first = first[0]
    assert (first == 0).any()


@pytest.mark.parametrize("source", FORMATS)
def test_each_format_becomes_each_other(source: str) -> None:
    for target in FORMATS:
        page_size = S if "NBBS" in source else None
        converted = to_lmcache(from_lmcache(made(source), source), target, page_size=page_size)
        assert same(made(target), converted), target


@pytest.mark.parametrize(("source", "target"), [*itertools.product(LATENTS, LATENTS)])
def test_latents_of_one_plane(source: str, target: str) -> None:
    latent = LOGICAL[:, 0, :, :, 0]

    def planes(name: str) -> Any:
        cache = made(name.replace("_X_NP", "").replace("NP_X_", ""), latent, "lbsd")
        return [[x] for x in cache] if "NP" in name else cache

    page_size = S if "NBBS" in source else None
    converted = to_lmcache(from_lmcache(planes(source), source), target, page_size=page_size)
    assert same(planes(target), converted)


def test_planes_of_two_widths_are_latents_and_rope_keys() -> None:
    name = "NL_X_NP_X_NB_BS_ONE_HS"
    cache = [[torch.randn(B, S, 1, 8), torch.randn(B, S, 1, 4)] for _ in range(L)]
    read = from_lmcache(cache, name)
    flat = read.views[1][0]
    assert flat.value is not None
    assert torch.equal(flat.value.cache.flatten(), cache[1][1].flatten())
    assert same(cache, to_lmcache(read, name))


def test_components_are_keys_of_lists() -> None:
    name = "NL_X_NB_BS_NH_HS"
    cache = [*LOGICAL[:, 0]]
    assert same([x.contiguous() for x in cache], to_lmcache(from_lmcache(cache, name), name))


def test_a_cache_of_one_layer() -> None:
    for name in FORMATS:
        cache = made(name, LOGICAL[:1])
        assert same(cache, to_lmcache(from_lmcache(cache, name), name, page_size=S))


def test_other_pages() -> None:
    read = from_lmcache(made(FORMATS[1]), FORMATS[1])
    four = to_lmcache(read, "NL_X_NB_TWO_NH_BS_HS", page_size=4)
    assert [x.shape for x in four] == [(B // 2, 2, H, 4, D)] * L
    assert same(
        made(FORMATS[1]), to_lmcache(from_lmcache(four, "NL_X_NB_TWO_NH_BS_HS"), FORMATS[1], page_size=S)
    )


def test_the_partition_of_axes() -> None:
    partitions = {
        name: LMCacheFormat.of(name).partition for name in ("TWO_X_NL_X_NBBS_NH_HS", "NL_X_NB_BS_NH_CS")
    }
    assert partitions == {
        "TWO_X_NL_X_NBBS_NH_HS": [["KV"], ["L"], ["B", "N"], ["H"], ["C"]],
        "NL_X_NB_BS_NH_CS": [["L"], ["B"], ["N"], ["H"], ["KV", "C"]],
    }


KEYS = KVTensors({"key": torch.zeros(4, 2, 1, 8)}, "B S H D")
BOTH = KVTensors({"cache": torch.zeros(2, 4, 2, 2, 8)}, "2 B S H D")
SHARDS = KVTensors({f"shards.{i}.cache": torch.zeros(2, 4, 2, 2, 8) for i in range(2)}, "2 B S H D")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LMCacheFormat.of("NL_X_NB_BSV_BSS"), "where 'NL_X_NB_BSV_BSS' has 'BSV'"),
        (lambda: LMCacheFormat.of("NB_X_NL_BS_NH_HS"), "where 'NB_X_NL_BS_NH_HS' has 'NB'"),
        (lambda: LMCacheFormat.of("NL_X_NL_NB_BS_NH_HS"), "format must name each axis once"),
        (lambda: LMCacheFormat.of("NL_X_NB_BS"), "axes must name H, D"),
        (lambda: LMCacheFormat.of(3), "format must be a name of LMCache's EngineKVFormat, got 3"),  # type: ignore[arg-type]
        (lambda: from_lmcache(torch.zeros(2), FORMATS[1]), "kv_caches must be a list that is not empty"),
        (lambda: from_lmcache([[]], FORMATS[3]), r"kv_caches\[0\] must be a list that is not empty"),
        (lambda: from_lmcache([[torch.zeros(4, 2, 1, 8)] * 3], LATENTS[2]), "got 3 of them"),
        (lambda: from_lmcache([torch.zeros(2, 4, 2, 2)], FORMATS[1]), r"kv_caches\[0\] must have the axes"),
        (lambda: from_lmcache([torch.zeros(2, 4, 2, 3, 2, 8)], FORMATS[12]), r"\[2 B H 1 S D\], got"),
        (lambda: from_lmcache(["x"], FORMATS[1]), r"kv_caches\[0\]"),
        (lambda: to_lmcache(BOTH, "NL_X_NB_BS_NH_HS"), "source must have keys alone"),
        (lambda: to_lmcache(BOTH, LATENTS[0]), "source must have the one head of a latent"),
        (lambda: to_lmcache(KEYS, FORMATS[1]), "value"),
        (lambda: to_lmcache(SHARDS, FORMATS[1]), "source must be one shard, got 2"),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises((ArgumentError, ShapeError, ValueError), match=message):
        call()
