"""``ops.KeySmoothing``: kernels and the reference, and what the bits of a key depend on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, generator
from oracles.pairs import pairwise
from torch import Tensor

from kvloom.ops import KeyOffset, KeySmoothing, schemas
from kvloom.quant import smoothing as reference
from kvloom.quant.rotation import block_of

HEADS = 3
DIMS = (1, 2, 16, 20, 64, 80, 96, 128, 256, 4096)
PAIRS = (0, 1, 4, 8, 9, 16, 17, 64)
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
WAVES = 2.0**-22  # error of a cosine or a sine, with that of the sum of two


def smoothing_of(head_dim: int, pairs: int, heads: int = HEADS, seed: int = 5) -> KeySmoothing:
    """Of pairs of any channels."""
    rng = generator(seed)
    gain = 0.25 + 4 * torch.rand(heads, head_dim, generator=rng)
    if not pairs:
        return KeySmoothing(gain)
    channels = torch.stack([torch.randperm(head_dim, generator=rng)[: 2 * pairs] for _ in range(heads)])
    frequencies = 10000.0 ** -torch.rand(heads, pairs, generator=rng, dtype=torch.float64)
    mean = 20 * torch.randn(heads, pairs, 2, generator=rng)
    return KeySmoothing(gain, KeyOffset(mean, channels.view(heads, pairs, 2), frequencies, head_dim))


def keys(*sizes: int, dtype: torch.dtype = torch.float32, is_by_token: bool = False, seed: int = 1) -> Tensor:
    """``[T, H, D]`` or ``[B, H, N, D]``; of the latter the heads of a token side by side, or not."""
    x = (10 * torch.randn(sizes, generator=generator(seed))).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if is_by_token else x


def positions_of(x: Tensor, seed: int = 2, largest: int = 2**40) -> Tensor:
    tokens = x.shape[:1] if x.dim() == 3 else (x.shape[0], x.shape[2])
    return torch.randint(-largest, largest, tokens, generator=generator(seed))


def arrays_of(smoothing: KeySmoothing) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    offset = smoothing.offset
    return (None, None, None) if offset is None else (offset.mean, offset.channels, offset.frequencies)


def by_reference(
    smoothing: KeySmoothing, x: Tensor, positions: Tensor, block: int, is_restored: bool
) -> Tensor:
    factor = smoothing.gain if is_restored else 1 / smoothing.gain
    at = None if smoothing.offset is None else positions
    return reference.smooth(x, at, factor, *arrays_of(smoothing), block, is_restored)


def error_of_offset(smoothing: KeySmoothing, block: int, is_restored: bool) -> Tensor:
    """What the waves of two backends may differ by in each element, ``[H, D]``."""
    offset, zeros = smoothing.offset, torch.zeros_like(smoothing.gain)
    if offset is None:
        return zeros
    lengths = offset.mean.abs().sum(-1, keepdim=True).expand_as(offset.mean).flatten(1)
    error = WAVES * zeros.scatter(1, offset.channels.flatten(1), lengths)
    if is_restored:
        return error
    error = error / smoothing.gain
    if not block:
        return error
    of_sums = 2.0**-22 * (50 + offset.mean.abs().max()) / smoothing.gain  # which round differently
    sums = (error + of_sums * (error > 0)).unflatten(1, (-1, block)).sum(-1, keepdim=True) / block**0.5
    sums = sums + (sums > 0) * 2.0**-22 * 200 * block**0.5
    expanded: Tensor = sums.expand(-1, -1, block).flatten(1)
    return expanded


def assert_near(found: Tensor, expected: Tensor, error: Tensor) -> None:
    """Within the error ``[H, D]`` of offsets, and one step of the dtype if they round to either side."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error = (error if found.dim() == 3 else error.unsqueeze(1)).double()
    step = 2 * UNIT[found.dtype] * expected.double().abs() + 2.0**-24 * (found.dtype == torch.float16)
    allowed = torch.where(error > 0, error + step, 0.0)
    assert bool(((found.double() - expected.double()).abs() <= allowed).all())


# --- kernels and the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "pairs", "dtype", "order", "is_rotated", "is_restored"),
    [
        case
        for case in pairwise(
            DIMS, PAIRS, FLOATS, ("3-D", "by head", "by token"), (False, True), (False, True)
        )
        if 2 * case[1] <= case[0]
    ],
)
def test_every_backend_gives_what_the_reference_gives(
    head_dim: int, pairs: int, dtype: torch.dtype, order: str, is_rotated: bool, is_restored: bool
) -> None:
    """The same bits but for the waves of an offset; without one, all."""
    smoothing, block = smoothing_of(head_dim, pairs), block_of(head_dim) if is_rotated else 0
    sizes = (9, HEADS, head_dim) if order == "3-D" else (2, HEADS, 7, head_dim)
    x = keys(*sizes, dtype=dtype, is_by_token=order == "by token")
    positions = positions_of(x, largest=10**6)
    found = smoothing.smoothed(x, positions, block, is_restored=is_restored)
    expected = by_reference(smoothing, x, positions, block, is_restored)
    assert_near(found, expected, error_of_offset(smoothing, block, is_restored))
    assert found.stride() == x.stride()  # or it would be stored several times slower


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 4), (64, 0), (20, 3), (80, 17)])
@pytest.mark.parametrize("query_heads", [HEADS, 4 * HEADS])
def test_queries_are_those_of_the_reference(
    head_dim: int, pairs: int, dtype: torch.dtype, query_heads: int
) -> None:
    smoothing = smoothing_of(head_dim, pairs)
    query = keys(5, query_heads, head_dim, dtype=dtype)
    mean, channels, frequencies = arrays_of(smoothing)
    for block in (0, block_of(head_dim)):
        found, bias = smoothing.query(query, torch.tensor([4]), block)
        expected, coefficients = reference.smooth_query(query, smoothing.gain, mean, channels, block)
        assert_same_bits(found, expected, "query")
        if pairs:
            assert bias is not None and bias.frequencies is frequencies
            assert bias.first_position is not None and bias.first_position.tolist() == [4]
            assert_same_bits(bias.coefficients, coefficients, "coefficients")
        else:
            assert bias is None


@pytest.mark.parametrize("pairs", [3, 9, 17])
@pytest.mark.parametrize("first", [0, -(2**20), 2**40, -(2**40)])
def test_far_positions_turn_as_near_ones(first: int, pairs: int) -> None:
    """Of frequencies that are 64ths of a turn, as exactly as float64 has these."""
    smoothing = smoothing_of(64, pairs)
    assert smoothing.offset is not None
    turns = torch.arange(HEADS * pairs).view(HEADS, pairs).double() / 64
    offset = KeyOffset(smoothing.offset.mean, smoothing.offset.channels, turns * 2 * torch.pi, 64)
    smoothing, x = KeySmoothing(smoothing.gain, offset), torch.zeros(64, HEADS, 64)
    near = smoothing.smoothed(x, torch.arange(64))
    far = smoothing.smoothed(x, torch.arange(64) + first)
    allowed = (
        error_of_offset(smoothing, 0, False) / WAVES * (2 * WAVES + 2 * torch.pi * abs(first) * 2.0**-53)
    )
    assert bool(((far - near).abs() <= allowed).all())
    assert float(near.abs().max()) > 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 4), (20, 3), (128, 30)])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_restored_keys_are_those_of_before(
    head_dim: int, pairs: int, dtype: torch.dtype, is_rotated: bool
) -> None:
    smoothing, block = smoothing_of(head_dim, pairs), block_of(head_dim) if is_rotated else 0
    x = keys(2, HEADS, 50, head_dim, dtype=dtype)
    positions = positions_of(x)
    back = smoothing.restored(smoothing.smoothed(x, positions, block), positions, block)
    # What is rounded is as large as the key and its offset are, in rotated vectors also those of others.
    largest = (x.float().abs().amax() + 150.0) * 4.5 * max(1, block) ** 0.5
    assert float((back.double() - x.double()).abs().max()) <= 4 * UNIT[dtype] * float(largest) + 1e-3


# --- what bits depend on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 0), (64, 4), (64, 9), (64, 17), (20, 3)])
@pytest.mark.parametrize("is_restored", [False, True])
def test_bits_depend_on_the_key_its_head_and_its_position(
    head_dim: int, pairs: int, dtype: torch.dtype, is_restored: bool
) -> None:
    smoothing = smoothing_of(head_dim, pairs)
    x = keys(2, HEADS, 700, head_dim, dtype=dtype, is_by_token=True)
    positions = positions_of(x)

    def smoothed(x: Tensor, positions: Tensor) -> Tensor:
        return smoothing.smoothed(x, positions, block_of(head_dim), is_restored=is_restored)

    expected = smoothed(x, positions)
    assert_same_bits(smoothed(x.contiguous(), positions), expected, "by head")
    assert_same_bits(smoothed(x[1:], positions[1:]), expected[1:], "one sequence")
    assert_same_bits(smoothed(x[:, :, 5:9], positions[:, 5:9]), expected[:, :, 5:9], "a cut")
    assert_same_bits(smoothed(x[:, :, 3:4], positions[:, 3:4].int().long()), smoothed(
        x[:, :, 3:4].clone(), positions[:, 3:4].int()), "positions of 32 bits")  # fmt: skip
    every = slice(1, None, 3)
    assert_same_bits(smoothed(x[:, :, every], positions[:, every]), expected[:, :, every], "strided tokens")
    assert_same_bits(smoothed(x.flip(2), positions.flip(1)), expected.flip(2), "order")
    assert_same_bits(smoothed(x.mT.contiguous().mT, positions), expected, "strided vectors")
    packed = x.transpose(1, 2).flatten(0, 1)
    assert_same_bits(
        smoothed(packed, positions.flatten()), expected.transpose(1, 2).flatten(0, 1), "packed tokens"
    )
    same = x[:1, :, :1].expand(2, HEADS, 5, head_dim), positions[:1, :1].expand(2, 5)
    assert_same_bits(smoothed(*same), expected[:1, :, :1].expand(2, HEADS, 5, head_dim), "expanded")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_same_bits(smoothed(x, positions), expected, "one thread")
    finally:
        torch.set_num_threads(threads)


def test_heads_have_offsets_and_gains_of_their_own() -> None:
    """Of more heads than have waves at once."""
    heads = 70
    smoothing, x = smoothing_of(32, 16, heads), keys(6, heads, 32)
    positions, offset = positions_of(x), smoothing.offset
    assert offset is not None
    expected = smoothing.smoothed(x, positions)
    for h in (0, 1, 63, 64, 69):
        one = slice(h, h + 1)
        own = KeyOffset(offset.mean[one], offset.channels[one], offset.frequencies[one], 32)
        alone = KeySmoothing(smoothing.gain[one], own).smoothed(x[:, one], positions)
        assert_same_bits(alone, expected[:, one], f"head {h}")


@pytest.mark.parametrize("shape", [(0, 3, 64), (2, 3, 0, 64), (0, 3, 2, 64)])
@pytest.mark.parametrize("pairs", [0, 4])
def test_no_tokens_are_smoothed_to_none(shape: tuple[int, ...], pairs: int) -> None:
    smoothing, x = smoothing_of(64, pairs), torch.empty(shape)
    positions = positions_of(x)
    assert smoothing.smoothed(x, positions, 64).shape == shape
    assert smoothing.restored(x, positions).shape == shape
    if len(shape) == 3:
        assert smoothing.query(x)[0].shape == shape


def test_head_dims_beyond_the_kernel_are_smoothed_by_the_reference() -> None:
    smoothing, x = smoothing_of(4100, 5), keys(3, HEADS, 4100)
    positions = positions_of(x)
    for block in (0, 4):
        for is_restored in (False, True):
            found = smoothing.smoothed(x, positions, block, is_restored=is_restored)
            assert_same_bits(found, by_reference(smoothing, x, positions, block, is_restored), "key")
    mean, channels, _ = arrays_of(smoothing)
    expected, _ = reference.smooth_query(x, smoothing.gain, mean, channels, 4)
    assert_same_bits(smoothing.query(x, None, 4)[0], expected, "query")


# --- special values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("is_restored", [False, True])
def test_special_values_are_those_of_the_reference(
    dtype: torch.dtype, head_dim: int, block: int, is_restored: bool
) -> None:
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, tiny, tiny / 2, largest, -largest, 1.0, -3.0], dtype=dtype)
    x = special[torch.randint(8, (40, HEADS, head_dim), generator=generator(1))]
    x[7, 1, 3], x[8, 0, 10], x[9, 1, 0] = float("nan"), float("inf"), float("-inf")
    smoothing = smoothing_of(head_dim, 0)
    found = smoothing.smoothed(x, None, block, is_restored=is_restored)
    expected = by_reference(smoothing, x, torch.arange(40), block, is_restored)
    assert torch.equal(found.isnan(), expected.isnan())
    infinite = {"posinf": torch.inf, "neginf": -torch.inf}  # or they would pass for the largest numbers
    assert torch.equal(found.nan_to_num(**infinite), expected.nan_to_num(**infinite))
    if dtype == torch.float16:  # in which float32 has room for every product
        assert not bool(found[10:].isinf().any())


@pytest.mark.parametrize("head_dim", [64, 20])
def test_zeros_keep_their_signs(head_dim: int) -> None:
    smoothing, x = smoothing_of(head_dim, 2), torch.full((4, HEADS, head_dim), -0.0)
    assert smoothing.offset is not None
    has_none = torch.ones_like(smoothing.gain).scatter(1, smoothing.offset.channels.flatten(1), 0.0) > 0
    for found in (smoothing.smoothed(x, torch.arange(4)), smoothing.restored(x, torch.arange(4))):
        assert bool((found[:, has_none] == 0).all())
    assert bool(smoothing.smoothed(x, torch.arange(4))[:, has_none].signbit().all())


# --- as a part of torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [0, 3])
@pytest.mark.parametrize("block", [0, 16])
def test_opcheck(pairs: int, block: int) -> None:
    smoothing = smoothing_of(16, pairs, 2)
    arrays, gain = arrays_of(smoothing), smoothing.gain
    for x in (keys(5, 2, 16), keys(2, 2, 3, 16), keys(2, 2, 3, 16, is_by_token=True), torch.empty(0, 2, 16)):
        at = positions_of(x) if pairs else None
        torch.library.opcheck(schemas.smooth, (x, at, gain, *arrays, block, False))
    torch.library.opcheck(schemas.smooth_query, (keys(5, 4, 16), gain, *arrays[:2], block))


@pytest.mark.compile
def test_it_compiles() -> None:
    smoothing, x = smoothing_of(16, 3, 2), keys(5, 2, 16)

    def both(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, bias = smoothing.query(x, None, 16)
        assert bias is not None
        return smoothing.smoothed(x, positions, 16) + 1, query, bias.coefficients

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(x, positions_of(x)), both(x, positions_of(x)), strict=True):
        assert_same_bits(found, expected, "compiled")


def test_results_have_no_gradient_and_are_new() -> None:
    smoothing, x = smoothing_of(16, 3), keys(4, HEADS, 16).requires_grad_()
    before = x.detach().clone()
    positions = torch.arange(4)
    query, bias = smoothing.query(x)
    assert bias is not None
    for found in (
        smoothing.smoothed(x, positions),
        smoothing.restored(x, positions),
        query,
        bias.coefficients,
    ):
        assert not found.requires_grad
    assert torch.equal(x, before)
    learning = KeySmoothing(smoothing.gain.clone().requires_grad_(), smoothing.offset)
    assert not learning.smoothed(x, positions).requires_grad


# --- the object ---------------------------------------------------------------------------------------------


def test_copies_are_the_same() -> None:
    smoothing = smoothing_of(16, 3)
    again = pickle.loads(pickle.dumps(smoothing))  # noqa: S301
    assert again.digest == smoothing.digest and len(smoothing.digest) == 32
    x, positions = keys(4, HEADS, 16), torch.arange(4)
    assert_same_bits(again.smoothed(x, positions), smoothing.smoothed(x, positions), "key")
    assert copy.deepcopy(smoothing) is smoothing
    assert smoothing.to(torch.device("cpu")) is smoothing
    elsewhere = smoothing.to(torch.device("meta"))
    assert elsewhere.gain.is_meta and elsewhere.offset is not None and elsewhere.offset.mean.is_meta


def test_digests_are_of_every_number() -> None:
    smoothing = smoothing_of(16, 3)
    offset = smoothing.offset
    assert offset is not None
    gain, mean, frequencies = (x.clone() for x in (smoothing.gain, offset.mean, offset.frequencies))
    gain[2, 15] += 1
    mean[2, 2, 1] += 1
    frequencies[2, 2] += 1
    channels = offset.channels.flip(-1)
    others = [
        KeySmoothing(gain, offset),
        KeySmoothing(smoothing.gain),
        KeySmoothing(smoothing.gain, KeyOffset(mean, offset.channels, offset.frequencies, 16)),
        KeySmoothing(smoothing.gain, KeyOffset(offset.mean, channels, offset.frequencies, 16)),
        KeySmoothing(smoothing.gain, KeyOffset(offset.mean, offset.channels, frequencies, 16)),
    ]
    assert len({smoothing.digest, *(x.digest for x in others)}) == 6
