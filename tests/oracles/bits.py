"""Tensors as bit patterns: compare them, fill them with poison, remember them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x`` in row-major order; the last axis grows by the element size."""
    x = x.detach().contiguous()
    if x.numel() == 0:  # may have any strides, 0 among them
        x = x.new_empty(x.shape)
    return x.reshape(1).view(torch.uint8) if x.dim() == 0 else x.view(torch.uint8)


def assert_same_bits(
    actual: Tensor | None, expected: Tensor | None, name: str, any_nan: bool = False
) -> None:
    """Equal dtype, shape and bit patterns; with ``any_nan`` every NaN equals every other NaN."""
    if expected is None:
        assert actual is None, f"{name} should be None"
        return
    assert actual is not None, f"{name} is None"
    assert actual.dtype == expected.dtype, f"{name} has dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name} is {list(actual.shape)}, expected {list(expected.shape)}"
    if any_nan:
        assert torch.equal(actual.isnan(), expected.isnan()), f"{name} has NaN in other places than expected"
        zero = torch.zeros((), dtype=expected.dtype)
        actual, expected = (
            torch.where(actual.isnan(), zero, actual),
            torch.where(expected.isnan(), zero, expected),
        )
    if torch.equal(bits(actual), bits(expected)):
        return
    width = actual.element_size()
    differs = (bits(actual) != bits(expected)).reshape(-1, width).any(-1).reshape(actual.shape)
    first = tuple(differs.nonzero()[0].tolist())
    got, want = (
        f"{'codes' if x.dtype == torch.bits2x4 else x[first].item()} (bytes {bits(x[first]).tolist()})"
        for x in (actual, expected)
    )
    raise AssertionError(
        f"{name} differs at {int(differs.sum())} of {differs.numel()} elements, first at {first}: "
        f"got {got}, expected {want}"
    )


def poison(shape: Iterable[int], dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Random bytes: for a float dtype this includes NaN, infinities and subnormal values."""
    shape = list(shape)
    element = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, [*shape[:-1], shape[-1] * element], dtype=torch.uint8, generator=rng)
    return raw.view(dtype)


def filled(shape: Iterable[int], byte: int, dtype: torch.dtype) -> Tensor:
    """Every byte alike."""
    shape = list(shape)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full([*shape[:-1], shape[-1] * size], byte, dtype=torch.uint8).view(dtype)


def generator(seed: int) -> torch.Generator:
    """A seeded source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def snapshot(arguments: Mapping[str, object]) -> dict[str, Tensor]:
    """Copies of the tensors among ``arguments``."""
    return {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}


def assert_unchanged(arguments: Mapping[str, object], before: Mapping[str, Tensor], *but: str) -> None:
    """Every tensor of ``before``, except those named, still has its bytes."""
    for name, old in before.items():
        if name not in but:
            now = arguments[name]
            assert isinstance(now, Tensor)
            assert_same_bits(now, old, name)
