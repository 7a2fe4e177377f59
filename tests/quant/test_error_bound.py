"""How far a value may be from what was stored, derived and then held by ten million values.

Let u1, t1 be the unit roundoff and the smallest subnormal of the input dtype, u3, t3 those of the scale
dtype, and e(v) = max(u |v|, t / 2) the most that rounding v moves it. With s the scale in the input dtype, a
quotient q = x / s rounded once, its integer c, the stored scale s3 = s rounded, p = c s3 rounded, r = p
rounded:

* ``|c - x/s| <= 1/2 + e1(x/s)``: half a step for the integer, and the rounding of the quotient. The clamp to
  qmax only acts where the quotient was rounded up past qmax + 1/2, and brings it nearer.
* ``|s3 - s| <= e3(s)``, ``|p - c s3| <= e3(c s3)``, ``|r - p| <= e1(p)``.

So ``|r - x| <= s/2 + s e1(x/s) + |c| e3(s) + e3(c s3) + e1(p)``. Saturation replaces p or r by the nearest
finite value, which is nearer to x if x itself lies within the range; a group beyond the range of its scale
dtype is left out here and has tests of its own.
"""

from __future__ import annotations

import pytest
import torch
from oracles.bits import FLOATS, generator
from torch import Tensor

from kvloom.quant.affine import dequantize, quantize
from kvloom.quant.packing import unpack

GROUP = 16
VALUES = 560_000  # of each of 18 combinations: 10,080,000 in all


def roundoff(v: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that rounding ``v`` to ``dtype`` moves it."""
    info = torch.finfo(dtype)
    return (v.abs() * (info.eps / 2)).clamp_min(info.smallest_normal * info.eps / 2)


def adversarial(dtype: torch.dtype, seed: int) -> Tensor:
    """Groups of normal, log-uniform, tied, equal and sparse values at magnitudes over the whole range."""
    rng = generator(seed)
    rows = VALUES // GROUP // 5

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    def normal() -> Tensor:
        return torch.randn(rows, GROUP, generator=rng, dtype=torch.float64)

    largest = torch.finfo(dtype).max
    low, high = {torch.float16: (-24, 13), torch.bfloat16: (-60, 60), torch.float32: (-60, 60)}[dtype]
    exponents = (low + (high - low) * uniform(rows, 1)).exp2()
    ties = torch.randint(-127, 127, (rows, GROUP), generator=rng) + 0.5
    ties[:, 0] = 127
    kinds = [
        normal() * exponents,
        normal().sign() * (-12 * uniform(rows, GROUP)).exp2() * exponents,
        ties * exponents / 127,
        torch.ones(rows, GROUP, dtype=torch.float64) * exponents * 1.37,
        torch.where(uniform(rows, GROUP) < 0.2, normal(), 0.0) * exponents,
    ]
    return torch.cat(kinds).clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale_dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_value_is_within_the_bound(dtype: torch.dtype, scale_dtype: torch.dtype, bits: int) -> None:
    x = adversarial(dtype, seed=bits)
    assert x.numel() == VALUES
    codes, stored = quantize(x, bits, GROUP, scale_dtype)
    back = dequantize(codes, stored, bits, dtype).double()
    exact_scale = quantize(x, bits, GROUP, torch.float32)[1].double()  # float32 holds every dtype's scale
    c = (codes if bits == 8 else unpack(codes, bits)).double()
    s, x = exact_scale.expand(-1, GROUP), x.double()
    product = c * stored.double().expand(-1, GROUP)
    bound = s / 2 + s * roundoff(x / s, dtype) + c.abs() * roundoff(s, scale_dtype)
    bound += roundoff(product, scale_dtype) + roundoff(product * (1 + torch.finfo(scale_dtype).eps), dtype)
    in_range = (x.abs().amax(-1) <= torch.finfo(scale_dtype).max).unsqueeze(-1).expand_as(x)
    error = (back - x).abs()
    assert bool(back.isfinite().all())
    assert in_range.double().mean() > 0.6
    worst = (error / bound)[in_range].max()
    assert worst <= 1 + 1e-9, f"{float(worst):.4f} of the bound"
    assert worst > 0.6, f"the bound is not sharp: {float(worst):.4f}"


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_that_is_a_multiple_of_the_scale_is_exact(dtype: torch.dtype) -> None:
    steps = torch.arange(-127, 128, dtype=torch.float64)
    for power in (-6, 0, 5):
        x = (steps * 2.0**power).to(dtype)
        codes, scale = quantize(x, 8, x.numel(), dtype)
        assert scale.tolist() == [2.0**power]
        assert torch.equal(dequantize(codes, scale, 8, dtype), x + 0.0)
