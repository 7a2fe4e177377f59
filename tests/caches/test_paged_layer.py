"""A paged layer by example: growth, limits, bytes, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom.caches import PagedLayer, Pages, Sequences
from kvloom.caches.layers.paged import CacheFormat
from kvloom.core.specs import QuantSpec
from kvloom.errors import ConfigError, KVError, OutOfPages, ShapeError, StateError
from kvloom.quant.affine import dequantize, quantize

QUANTS = [None, QuantSpec(8, 4), QuantSpec(4, 8, torch.float32)]
every_quant = pytest.mark.parametrize("quant", QUANTS, ids=["plain", "int8", "int4"])


def tokens(batch: int, count: int, seed: int = 0, heads: int = 2, width: int = 8) -> Tensor:
    return torch.randn(batch, heads, count, width, generator=generator(seed))


def append(layer: PagedLayer, batch: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Append random tokens and return them."""
    key, value = tokens(batch, count, seed), tokens(batch, count, seed + 1)
    layer.append(key, value)
    return key, value


def as_kept(x: Tensor, quant: QuantSpec | None) -> Tensor:
    """What a round trip through storage makes of ``x``."""
    if quant is None:
        return x
    codes, scale = quantize(x, quant.bits, quant.group, quant.scale_dtype)
    return dequantize(codes, scale, quant.bits, x.dtype)


def storage(layer: PagedLayer) -> list[Tensor]:
    """The tensors of the layer: keys, values and their scales."""
    found = layer.sequences.storages.get(layer.index)
    if found is None:
        return []
    kv = found.view
    return [x for x in kv.tensors if x is not None]


def real_bytes(layer: PagedLayer) -> int:
    """Bytes of storage behind the layer's tensors."""
    return sum(x.untyped_storage().nbytes() for x in storage(layer))


# --- storing ------------------------------------------------------------------------------------------------


@every_quant
@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_gather_gives_every_token_of_every_sequence(quant: QuantSpec | None, page_size: int) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=page_size))
    parts = [append(layer, 3, count, seed) for seed, count in ((0, 5), (10, 1), (20, 4))]
    assert layer.num_tokens == 10
    for got, chunks in zip(layer.gather(torch.float32), zip(*parts, strict=True), strict=True):
        assert_same_bits(got.contiguous(), as_kept(torch.cat(chunks, dim=2), quant), "tokens")


@pytest.mark.parametrize("kept", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_are_kept_in_the_dtype_of_the_format(kept: torch.dtype, dtype: torch.dtype) -> None:
    layer = PagedLayer(CacheFormat(dtype=kept))
    key = tokens(2, 3).to(dtype)
    layer.append(key, key)
    assert storage(layer)[0].dtype == kept
    assert_same_bits(layer.gather(dtype)[0].contiguous(), key.to(kept).to(dtype), "key")


def test_format_without_a_dtype_keeps_that_of_the_keys() -> None:
    layer = PagedLayer(CacheFormat())
    layer.append(tokens(1, 1).bfloat16(), tokens(1, 1).bfloat16())
    assert [x.dtype for x in storage(layer)] == [torch.bfloat16] * 2


def test_keys_and_values_may_differ_in_width() -> None:
    layer = PagedLayer(CacheFormat(page_size=2, quant=QuantSpec(8, 4)))
    key, value = tokens(2, 3), tokens(2, 3, width=12)
    layer.append(key, value)
    got_key, got_value = layer.gather(torch.float32)
    assert_same_bits(got_key.contiguous(), as_kept(key, QuantSpec(8, 4)), "key")
    assert_same_bits(got_value.contiguous(), as_kept(value, QuantSpec(8, 4)), "value")


def test_no_tokens_are_appended_as_none() -> None:
    layer = PagedLayer(CacheFormat(page_size=2))
    append(layer, 2, 0)
    assert layer.num_tokens == 0
    assert layer.gather(torch.float32)[0].shape == (2, 2, 0, 8)
    key, _ = append(layer, 2, 3)
    append(layer, 2, 0)
    assert_same_bits(layer.gather(torch.float32)[0].contiguous(), key, "key")


def test_tokens_are_kept_without_their_gradient() -> None:
    layer = PagedLayer(CacheFormat(page_size=2))
    for _ in range(3):
        layer.append(tokens(1, 2).requires_grad_(), tokens(1, 2).requires_grad_())
    assert not any(x.requires_grad for x in (*storage(layer), *layer.gather(torch.float32)))


# --- growth -------------------------------------------------------------------------------------------------


@every_quant
def test_growth_keeps_every_byte(quant: QuantSpec | None) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=2))
    for step in range(12):
        append(layer, 2, 1, seed=step)
        before = [x.clone() for x in layer.gather(torch.float32)]
        append(layer, 2, 3, seed=100 + step)
        for got, old in zip(layer.gather(torch.float32), before, strict=True):
            assert_same_bits(got[:, :, : old.shape[2]].contiguous(), old.contiguous(), "tokens")


@every_quant
def test_nbytes_is_what_is_allocated(quant: QuantSpec | None) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=3))
    assert layer.nbytes == 0
    sizes = []
    for step in range(20):
        append(layer, 2, 1, seed=step)
        assert layer.nbytes == real_bytes(layer)
        sizes.append(layer.nbytes)
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def test_appending_moves_a_bounded_number_of_bytes() -> None:
    """Storage doubles up to 128 tokens, then grows by a quarter: it moves a few times, little is unused."""
    layer = PagedLayer(CacheFormat(page_size=4))
    allocations = set()
    for _ in range(1000):
        append(layer, 1, 1)
        allocations.add(layer.nbytes)
        unused = min(layer.num_tokens, max(128, 0.25 * layer.num_tokens)) + 8
        assert layer.nbytes <= (layer.num_tokens + unused) * layer.nbytes_per_token
    assert len(allocations) <= 15


@pytest.mark.parametrize(
    ("quant", "dtype", "expected"),
    [(None, torch.float32, 128), (None, torch.float16, 64), (QuantSpec(8, 4), torch.float32, 32 + 16),
     (QuantSpec(4, 8, torch.float32), torch.float16, 16 + 16)],
)  # fmt: skip
def test_nbytes_per_token_counts_both_sides_and_scales(
    quant: QuantSpec | None, dtype: torch.dtype, expected: int
) -> None:
    layer = PagedLayer(CacheFormat(quant=quant))
    assert layer.nbytes_per_token == 0
    layer.append(tokens(3, 1).to(dtype), tokens(3, 1).to(dtype))
    assert layer.nbytes_per_token == expected


# --- truncate and reset -------------------------------------------------------------------------------------


@every_quant
def test_truncated_tokens_are_overwritten(quant: QuantSpec | None) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=2))
    first, _ = append(layer, 2, 7)
    bytes_before = layer.nbytes
    layer.truncate(3)
    assert layer.num_tokens == 3
    assert_same_bits(layer.gather(torch.float32)[0].contiguous(), as_kept(first[:, :, :3], quant), "key")
    second, _ = append(layer, 2, 4, seed=9)
    assert layer.nbytes == bytes_before
    expected = as_kept(torch.cat([first[:, :, :3], second], dim=2), quant)
    assert_same_bits(layer.gather(torch.float32)[0].contiguous(), expected, "key")


@pytest.mark.parametrize("count", [-1, 4, 100])
def test_truncate_beyond_what_is_stored_is_refused(count: int) -> None:
    layer = PagedLayer(CacheFormat())
    append(layer, 1, 3)
    with pytest.raises(StateError, match=rf"num_tokens must be in \[0, 3\], got {count}"):
        layer.truncate(count)
    assert layer.num_tokens == 3


def test_reset_gives_the_memory_back_and_takes_another_batch() -> None:
    layer = PagedLayer(CacheFormat(page_size=2, max_tokens=8))
    append(layer, 2, 4)
    layer.reset()
    assert (layer.num_tokens, layer.nbytes, layer.nbytes_per_token) == (0, 0, 0)
    with pytest.raises(StateError, match="gather"):
        layer.gather(torch.float32)
    key, value = tokens(1, 8, heads=3, width=4), tokens(1, 8, 1, heads=3, width=4)
    layer.append(key, value)
    assert_same_bits(layer.gather(torch.float32)[1].contiguous(), value, "value")


# --- limits -------------------------------------------------------------------------------------------------


@every_quant
def test_max_tokens_is_reached_exactly(quant: QuantSpec | None) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=2, max_tokens=12))
    append(layer, 2, 6)
    assert layer.nbytes == 12 * layer.nbytes_per_token
    before, bytes_before = [x.clone() for x in storage(layer)], layer.nbytes
    with pytest.raises(
        OutOfPages,
        match="max_tokens must be at least 16 to hold 1 more token of 2 sequences, got 12 with 6 of 6 pages",
    ):
        append(layer, 2, 1)
    assert (layer.num_tokens, layer.nbytes) == (6, bytes_before)
    for x, old in zip(storage(layer), before, strict=True):
        assert_same_bits(x, old, "storage")
    layer.truncate(5)
    append(layer, 2, 1)
    assert layer.num_tokens == 6


def test_refused_growth_leaves_room_for_a_smaller_one() -> None:
    layer = PagedLayer(CacheFormat(page_size=2, max_tokens=12))
    key, _ = append(layer, 2, 3)
    with pytest.raises(OutOfPages):
        append(layer, 2, 4)
    more, _ = append(layer, 2, 3, seed=5)
    assert_same_bits(layer.gather(torch.float32)[0].contiguous(), torch.cat([key, more], dim=2), "key")


def test_refused_first_append_leaves_the_layer_as_new() -> None:
    layer = PagedLayer(CacheFormat(page_size=2, max_tokens=4))
    with pytest.raises(OutOfPages):
        append(layer, 3, 2)
    assert (layer.num_tokens, layer.nbytes) == (0, 0)
    key, _ = append(layer, 1, 4)
    assert_same_bits(layer.gather(torch.float32)[0], key, "key")


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 100])
def test_as_many_tokens_as_were_said_fit_and_their_last_page(max_tokens: int, is_kept: bool) -> None:
    format = CacheFormat(page_size=16, max_tokens=max_tokens)
    layer = PagedLayer(format, Sequences(Pages(format, is_kept)))
    append(layer, 1, max_tokens)
    fits = -(-max_tokens // 16) * 16
    append(layer, 1, fits - max_tokens)
    with pytest.raises(OutOfPages, match=f"got {max_tokens} with"):
        append(layer, 1, 1)
    assert layer.nbytes == fits * layer.nbytes_per_token


# --- refused ------------------------------------------------------------------------------------------------

BAD_TOKENS = {
    "smaller batch": ((1, 2, 3, 8), (1, 2, 3, 8), "key must be .* B=2"),
    "larger batch": ((3, 2, 3, 8), (3, 2, 3, 8), "key must be .* B=2"),
    "fewer heads": ((2, 1, 3, 8), (2, 1, 3, 8), "key must be .* H=2"),
    "wider keys": ((2, 2, 3, 16), (2, 2, 3, 8), "key must be .* Dk=8"),
    "narrower values": ((2, 2, 3, 8), (2, 2, 3, 4), "value must be .* Dv=8"),
    "rank 3": ((2, 2, 8), (2, 2, 8), r"key must be \[B, H, Q, Dk\]"),
    "value of rank 3": ((2, 2, 3, 8), (2, 2, 8), r"value must be \[B, H, Q, Dv\]"),
    "fewer values": ((2, 2, 3, 8), (2, 2, 2, 8), "value must be .* Q=3"),
    "value heads": ((2, 2, 3, 8), (2, 1, 3, 8), "value must be .* H=2"),
    "value batch": ((2, 2, 3, 8), (1, 2, 3, 8), "value must be .* B=2"),
}


@every_quant
@pytest.mark.parametrize(("key", "value", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_tokens_that_do_not_fit_are_refused(
    key: tuple[int, ...], value: tuple[int, ...], message: str, quant: QuantSpec | None
) -> None:
    layer = PagedLayer(CacheFormat(quant=quant, page_size=2))
    append(layer, 2, 4)
    before, bytes_before = [x.clone() for x in storage(layer)], layer.nbytes
    with pytest.raises(ShapeError, match=message):
        layer.append(torch.ones(key), torch.ones(value))
    assert (layer.num_tokens, layer.nbytes) == (4, bytes_before)
    for x, old in zip(storage(layer), before, strict=True):
        assert_same_bits(x, old, "storage")


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        (torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8).half(), "value"),
        (torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8, device="meta"), "value"),
        (torch.ones(2, 2, 1, 8, device="meta"), torch.ones(2, 2, 1, 8, device="meta"), "key"),
        (torch.ones(2, 2, 1, 8).int(), torch.ones(2, 2, 1, 8).int(), "key"),
    ],
    ids=["value dtype", "value device", "device", "dtype"],
)
def test_tokens_of_another_dtype_or_device_are_refused(key: Tensor, value: Tensor, name: str) -> None:
    layer = PagedLayer(CacheFormat(quant=QuantSpec(8, 8)))
    append(layer, 2, 4)
    with pytest.raises(ShapeError, match=f"^{name} must be"):
        layer.append(key, value)
    assert layer.num_tokens == 4


def test_group_that_does_not_divide_the_head_dim_is_refused() -> None:
    layer = PagedLayer(CacheFormat(quant=QuantSpec(8, 16)))
    with pytest.raises(ConfigError, match="head_dim must be a multiple of group 16, got 8"):
        append(layer, 1, 1)
    assert layer.nbytes == 0


def test_gather_needs_tokens() -> None:
    with pytest.raises(StateError, match="gather needs"):
        PagedLayer(CacheFormat()).gather(torch.float32)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"page_size": n}, "page_size") for n in (0, -1, True, 1.5, None)]
    + [({"max_tokens": n}, "max_tokens") for n in (0, -1, True, 16.5, "16")],
    ids=str,
)
def test_bad_format_is_refused_by_name(change: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        CacheFormat(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OutOfPages, StateError, ShapeError, ConfigError])
def test_errors_are_also_builtin_ones(error: type[KVError]) -> None:
    builtin = {
        OutOfPages: MemoryError,
        StateError: RuntimeError,
        ShapeError: ValueError,
        ConfigError: ValueError,
    }
    assert issubclass(error, KVError)
    assert issubclass(error, builtin[error])


def test_two_layers_share_nothing() -> None:
    first, second = PagedLayer(CacheFormat()), PagedLayer(CacheFormat())
    key, _ = append(first, 1, 2)
    append(second, 1, 2, seed=7)
    assert_same_bits(first.gather(torch.float32)[0], key, "key")
    pointers = [x.untyped_storage().data_ptr() for x in itertools.chain(storage(first), storage(second))]
    assert len(set(pointers)) == 4
