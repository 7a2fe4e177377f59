"""Caches that rotate head vectors before they quantize them: what they keep, and what they give back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracles.bits import generator
from torch import Tensor

from kvloom import ops
from kvloom.caches import CacheFormat, FixedLayer, Layer, PagedLayer, PrefixCache, QuantizedLayer, Sequences
from kvloom.core.specs import QuantSpec
from kvloom.quant.affine import quantize
from kvloom.quant.rotation import rotate

HEADS, DIM, WINDOW = 2, 32, 12
PLAIN, ROTATED = QuantSpec(4, 16), QuantSpec(4, 16, rotated=True)
KINDS: dict[str, Callable[[CacheFormat], Layer]] = {
    "paged": PagedLayer,
    "window": lambda format: PagedLayer(format, Sequences(format, WINDOW)),
    "fixed": lambda format: FixedLayer(format_of(format, 64)),
    "fixed window": lambda format: FixedLayer(format_of(format, 64), WINDOW),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def format_of(format: CacheFormat, max_tokens: int) -> CacheFormat:
    return CacheFormat(quant=format.quant, page_size=1, max_tokens=max_tokens, values=format.values)


def with_outliers(count: int, seed: int, heads: int = HEADS) -> Tensor:
    """Tokens ``[1, H, N, D]`` of which two channels are much larger, as keys of Llama and Qwen have them."""
    x = torch.randn(1, heads, count, DIM, generator=generator(seed))
    x[..., [3, 20]] *= 15
    return x


def queries(count: int, seed: int) -> Tensor:
    """Of two heads for each head of the keys, small where those are large."""
    x = torch.randn(1, 2 * HEADS, count, DIM, generator=generator(seed))
    x[..., [3, 20]] /= 15
    return x


def exact(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of the last tokens in float64, ``[1, Q, Hq, D]``."""
    position = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    column = torch.arange(key.shape[2])
    seen = (column <= position) & (column > position - (window or key.shape[2]))
    args = (x.double() for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*args, seen, enable_gqa=True)
    return out.transpose(1, 2)


def error(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Norm of the error of attention in place, by that of the output; what is gathered must be near, too."""
    for start in range(0, key.shape[2], 9):
        out = layer.append(key[:, :, start : start + 9], value[:, :, start : start + 9])
    found = out.attend(query)
    expected = exact(query, key, value, layer.window)
    if layer.window is None:
        for x, back in zip((key, value), layer.stored().gather(torch.float32), strict=True):
            assert (
                torch.nn.functional.cosine_similarity(back[:, :, : x.shape[2]].flatten(), x.flatten(), 0)
                > 0.95
            )
    return float((found - expected).norm() / expected.norm())


@every_kind
def test_keys_with_outliers_err_less_rotated(make: Callable[[CacheFormat], Layer]) -> None:
    key, value, query = with_outliers(45, 1), torch.randn(1, HEADS, 45, DIM), queries(3, 2)
    plain, keys, both = (
        error(make(CacheFormat(quant=quant, values=CacheFormat(quant=values))), query, key, value)
        for quant, values in ((PLAIN, PLAIN), (ROTATED, PLAIN), (ROTATED, ROTATED))
    )
    assert keys < 0.75 * plain
    assert both < 0.75 * plain


def test_values_with_outliers_err_less_rotated() -> None:
    key, value, query = torch.randn(1, HEADS, 45, DIM), with_outliers(45, 3), torch.randn(1, 4, 3, DIM)
    plain, values = (
        error(PagedLayer(CacheFormat(quant=PLAIN, values=CacheFormat(quant=quant))), query, key, value)
        for quant in (PLAIN, ROTATED)
    )
    assert values < 0.75 * plain


@pytest.mark.parametrize("rotate_what", ["keys", "values", "both"])
def test_codes_are_those_of_the_rotated_vectors(rotate_what: str) -> None:
    key, value = with_outliers(20, 4), with_outliers(20, 5)
    layer = QuantizedLayer(f"int4:g16,rotate={rotate_what}", recent=3)
    layer.update(key, value)
    found = layer.codes()
    for side, (name, x) in enumerate((("keys", key), ("values", value))):
        x = x.transpose(1, 2)
        turned = rotate(x, DIM) if rotate_what in (name, "both") else x
        codes, scales = quantize(turned, 4, 16, torch.float16, full_range=True)
        assert torch.equal(found[side], codes)
        assert torch.equal(found[2 + side], scales)


def test_a_text_has_the_same_codes_however_it_is_split() -> None:
    key, value = with_outliers(40, 6), with_outliers(40, 7)
    whole, pieces = (QuantizedLayer("int4:g8,rotate=both") for _ in range(2))
    whole.update(key, value)
    for n in range(0, 40, 3):
        pieces.update(key[:, :, n : n + 3], value[:, :, n : n + 3])
    assert all(torch.equal(a, b) for a, b in zip(whole.codes(), pieces.codes(), strict=True))


def test_assigned_keys_are_rotated_too() -> None:
    key, value = with_outliers(20, 8), with_outliers(20, 9)
    layer, other = (QuantizedLayer("int8:g16,rotate=both") for _ in range(2))
    layer.update(key, value)
    other.update(value, key)
    other.keys = key
    assert torch.equal(other.keys, layer.keys)
    other.values = value
    assert torch.equal(other.values, layer.values)


def test_ragged_sequences_with_prefixes_are_rotated() -> None:
    key, value, query = with_outliers(20, 10)[0], with_outliers(20, 11)[0], queries(1, 12)[0]
    key, value, query = (x.transpose(0, 1) for x in (key, value, query))
    errors = []
    for quant in (PLAIN, ROTATED):
        format = CacheFormat(torch.float32, quant, page_size=4, max_tokens=64)
        cache = PrefixCache(format, num_layers=1, heads=HEADS, head_dim=DIM, dtype=torch.float32)
        first = cache.begin(range(20))
        cache.append(first, 0, key, value)
        cache.commit(first)
        second = cache.begin(range(20))
        assert second.num_cached == 16
        cache.append(second, 0, key[16:], value[16:])
        out = cache.attend(query.repeat(2, 1, 1), [first, second], 0)
        assert torch.equal(out[0], out[1])
        expected = exact(*(x.transpose(0, 1)[None] for x in (query, key, value)), None)[0]
        errors.append(float((out[:1] - expected).norm() / expected.norm()))
    assert errors[1] < 0.75 * errors[0]


def test_what_cannot_be_stored_is_refused_by_the_name_of_the_argument() -> None:
    layer = PagedLayer(CacheFormat(quant=ROTATED))
    key = torch.randn(1, HEADS, 4, DIM)
    layer.append(key, key)
    before = layer.keys
    for bad in (key[..., :16], key.double(), key[0], key[:, :1]):
        with pytest.raises(ValueError, match=r"^(key|value) must"):
            layer.append(bad, bad)
    assert torch.equal(layer.keys, before)


def test_dialects_and_operators_do_not_rotate() -> None:
    """A view says nothing of rotation: what is stored through it are the codes of the vectors."""
    layer = PagedLayer(CacheFormat(quant=ROTATED, page_size=16))
    key = torch.randn(1, HEADS, 5, DIM)
    layer.append(key, key)
    assert layer.storage is not None
    found, _ = ops.load(torch.arange(5), layer.storage.view, dtype=torch.float32)
    assert not torch.allclose(found.transpose(0, 1), key[0], atol=0.5)
    assert torch.allclose(layer.keys, key, atol=0.5)
