"""Layers of a step share what the first worked out, and have the bits of a call of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ops import kernels
from ops.attention import Case, make_case
from ops.kernels import DEVICE, there
from ops.latents import latent_case
from ops.pools import Kind
from oracles.bits import assert_same_bits
from torch import Tensor

from kvloom import KVView, QuantSpec, ops
from kvloom.caches import CacheFormat, PagedLayer
from kvloom.caches.rows.pages import Pages
from kvloom.caches.rows.sequences import Sequences
from kvloom.errors import ShapeError
from kvloom.ops import AttendedPart, Batch, KeyOffset, KeySmoothing, PositionalBias, Scores
from kvloom.ops.fast import steps

pytestmark = kernels.pytestmark

NEW, STORED = [1, 1, 1], [30, 7, 290]
INT8, INT4 = Kind(torch.int8, 8, 32), Kind(torch.uint8, 4, 32)


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Steps are launched on the device that there is; each plan that is made."""
    launching = pytest.importorskip("kvloom.ops.impl.triton.attending.launch")
    made: list[Any] = []
    make_plan = launching.make_plan

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return make_plan(*arguments)

    monkeypatch.setattr(launching, "make_plan", counted)
    monkeypatch.setattr(steps, "DEVICES", ["cuda", "cpu"])
    with torch.no_grad():
        yield made


def layers(kind: Kind, count: int = 2, **how: Any) -> list[Case]:
    """Caches of one kind with other numbers, over which one batch attends."""
    return [
        make_case(NEW, STORED, kind=kind, head_dim=64, contiguous=True, seed=i, **how) for i in range(count)
    ]


def fixed(case: Case) -> Batch:
    return replace(case.batch(), is_fixed=True)


def both(
    cases: list[Case], call: Callable[..., Any], scores: list[Scores] | None = None, **how: Any
) -> list[tuple[Any, Any]]:
    """Results of each layer: in a step, and alone."""
    found = []
    with there(fixed(cases[0]), *(x for case in cases for x in (case.query, case.kv))) as (batch, *rest):
        for i in range(len(cases)):
            query, kv = rest[2 * i : 2 * i + 2]
            with there(Scores() if scores is None else scores[i]) as (own,):
                step = call(query, kv, batch, own, **how)
                found.append((step, call(query, kv, batch, own, backend="triton", **how)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Kind(torch.bfloat16), INT8, INT4], ids=["bfloat16", "int8", "int4"])
def test_layers_share_a_plan(kind: Kind, dtype: torch.dtype, plans: list[Any]) -> None:
    for step, alone in both(layers(kind, dtype=dtype), ops.attend):
        assert_same_bits(step, alone, "output")
    assert len(plans) == 1 + 2  # of the step, and of each call alone


def test_latents_share_a_plan(plans: list[Any]) -> None:
    cases = [latent_case(new=NEW, stored=STORED, contiguous=True, seed=i) for i in range(2)]
    for step, alone in both(cases, ops.attend, is_latent=True):
        assert_same_bits(step, alone, "output")
    assert len(plans) == 1 + 2


def test_each_layer_has_its_own_sinks_and_coefficients(plans: list[Any]) -> None:
    cases = layers(INT8)
    numbers = torch.Generator().manual_seed(0)

    def scores() -> Scores:
        waves = torch.randn(3, 4, 6, generator=numbers), torch.rand(2, 3, generator=numbers)
        bias = PositionalBias(*waves, torch.tensor([0, 3, 5]))
        return Scores(window=9, softcap=3.0, sinks=torch.randn(4, generator=numbers), positional_bias=bias)

    for step, alone in both(cases, ops.attend, [scores() for _ in cases]):
        assert_same_bits(step, alone, "output")
    assert len(plans) == 1 + 2


def test_other_scores_have_plans_of_their_own() -> None:
    cases = [layers(INT8, 1)[0]] * 4
    scores = [Scores(), Scores(window=3), Scores(scale=0.5), Scores(softcap=2.0)]
    results = both(cases, ops.attend, scores)
    for step, alone in results:
        assert_same_bits(step, alone, "output")
    assert len({step.cpu().numpy().tobytes() for step, _ in results}) == 4


def test_parts_share_a_plan(plans: list[Any]) -> None:
    def parts(query: Tensor, kv: KVView, batch: Batch, scores: Scores, **how: Any) -> AttendedPart:
        newest = ops.attend_part(query, kv, batch, replace(scores, window=4), **how)
        return ops.attend_part(query, kv, batch, scores, skip=4, prior=newest, **how)

    for step, alone in both(layers(INT4), parts):
        assert_same_bits(step.out, alone.out, "output")
        assert_same_bits(step.lse, alone.lse, "logarithms of sums")
    assert len(plans) == 2 + 4


def test_a_batch_that_may_change_is_planned_at_each_call(plans: list[Any]) -> None:
    (case,) = layers(INT8, 1)
    with there(case.query, case.kv, case.batch()) as (query, kv, batch):
        before = ops.attend(query, kv, batch)
        batch.kvstarts.sub_(torch.tensor([0, 1, 2, 3], device=DEVICE))
        after = ops.attend(query, kv, batch)
        torch.testing.assert_close(after, ops.attend(query, kv, batch, backend="triton"))
    assert not torch.equal(before, after)


def test_what_differs_is_checked_again() -> None:
    cases = layers(INT8, 2)
    with there(fixed(cases[0]), cases[0].query, cases[0].kv) as (batch, query, kv):
        ops.attend(query, kv, batch)
        with pytest.raises(ShapeError, match="query must be"):
            ops.attend(query[..., :32], kv, batch)
        with pytest.raises(ShapeError, match="multiple of 2 heads"):
            ops.attend(query[:, :3], kv, batch)
        with pytest.raises(ShapeError, match="sinks must be"):
            ops.attend(query, kv, batch, Scores(sinks=torch.zeros(3, device=DEVICE)))
        with pytest.raises(ShapeError, match=r"prior\.lse must be"):
            ops.attend_part(query, kv, batch, prior=AttendedPart(query.float(), query[0, :, 0].float()))


@pytest.mark.parametrize("by_row", [False, True], ids=["tokens", "rows"])
@pytest.mark.parametrize("is_transformed", [False, True], ids=["plain", "smoothed and rotated"])
@pytest.mark.parametrize("kind", [Kind(torch.bfloat16), INT8, INT4], ids=["bfloat16", "int8", "int4"])
def test_later_stores_have_the_bits_of_the_first(kind: Kind, is_transformed: bool, by_row: bool) -> None:
    case, again = (make_case([1] * 5, [9] * 5, kind=kind, head_dim=64) for _ in range(2))
    numbers = torch.Generator().manual_seed(1)
    how: dict[str, Any] = {}
    if is_transformed:
        mean, channels = torch.randn(2, 1, 2, generator=numbers), torch.tensor([[[0, 5]], [[3, 9]]])
        offset = KeyOffset(mean, channels, torch.rand(2, 1, generator=numbers), 64)
        how = {
            "smoothing": KeySmoothing(torch.rand(2, 64, generator=numbers) + 0.5, offset),
            "blocks": (64, 64),
        }
    kept = []
    with there(case.kv, how.get("smoothing")) as (kv, smoothing):
        for count in (3, 3, 5):
            slots = torch.randperm(case.kv.num_slots, generator=numbers)[:count]
            new = [torch.randn(count, 1, 2, 64, generator=numbers).transpose(1, 2) for _ in range(2)]
            positions = torch.arange(count) + 7 if is_transformed else None
            rows = [x.squeeze(2) for x in new]
            ops.store(*rows, slots, again.kv, backend="reference", positions=positions, **how)
            if by_row:
                rows, slots = new, slots.unsqueeze(1)
                positions = None if positions is None else positions.unsqueeze(1)
            with there(*rows, slots, positions) as (key, value, where, at):
                moved = how | {"smoothing": smoothing} if how else {}
                ops.store(key, value, where, kv, positions=at, **moved)
            kept.append(len(kv._derived))
    for mine, expected in zip(case.kv.tensors, again.kv.tensors, strict=True):
        assert_same_bits(mine, expected, "cache")
    assert kept == [1, 1, 2]


def test_a_store_that_was_checked_is_checked_again_for_other_vectors() -> None:
    case = make_case([1] * 5, [9] * 5, kind=INT8, head_dim=64)
    key, slots = torch.zeros(2, 2, 64), torch.tensor([3, 1])
    with there(key, slots, case.kv) as (key, slots, kv):
        for _ in range(2):
            ops.store(key, key, slots, kv)
        with pytest.raises(ShapeError, match="slots must be"):
            ops.store(key, key, slots[:1], kv)
        with pytest.raises(ShapeError, match="value must be"):
            ops.store(key, key.half(), slots, kv)
        with pytest.raises(ShapeError, match="must not overlap"):
            ops.store(as_vectors(kv, key), key, slots, kv)


@pytest.mark.parametrize(
    "format",
    [CacheFormat(), CacheFormat(quant=QuantSpec(8, 32)), CacheFormat(quant=QuantSpec(4, 32), recent=4)],
    ids=["float32", "int8", "int4"],
)
def test_steps_of_a_cache_are_planned_once(
    format: CacheFormat, plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that begin a page, and those of a residual window of 4 tokens, which have two plans."""
    caches = [layers_of_one_table(format) for _ in range(2)]
    numbers = torch.Generator().manual_seed(0)
    for count in (14, 1, 1, 1, 1):
        plans.clear()
        for layer in range(2):
            key, value = (torch.randn(2, 2, count, 32, generator=numbers) for _ in range(2))
            query = torch.randn(2, 4, count, 32, generator=numbers)
            found = []
            for cache, devices in zip(caches, (["cuda", "cpu"], []), strict=True):
                monkeypatch.setattr(steps, "DEVICES", devices)
                tokens = cache[layer].append(key.to(DEVICE), value.to(DEVICE))
                found.append(tokens.attend(query.to(DEVICE)))
            torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
        assert count > 1 or DEVICE == "cuda" or len(plans) == (2 if format.recent else 1)


@pytest.mark.process
def test_a_step_launches_what_triton_chooses_for_each_layer() -> None:
    """On a driver that launches nothing: machine code depends on strides and alignment of each tensor."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("launch_kernels.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(script.parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found and all(all(same) for same in found.values()), found


def layers_of_one_table(format: CacheFormat) -> list[PagedLayer]:
    """Two layers whose rows share a page table."""
    sequences = Sequences(Pages(format))
    residual = sequences.of_residual()
    return [PagedLayer(format, sequences, i, residual) for i in range(2)]


def as_vectors(kv: KVView, like: Tensor) -> Tensor:
    """Vectors such as others in the memory of a cache."""
    flat = kv.key.cache.untyped_storage()
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(flat, 0, like.shape, like.stride())
